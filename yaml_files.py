"""YAML from people and strangers: bounded before it is built, values by the core schema of YAML 1.2, no key twice."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import yaml
from typing_extensions import override
from yaml.composer import Composer
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.resolver import BaseResolver

from .errors import UsageError
from .files import MOST_NESTED, read_text
from .messages import one_line

#: Bytes of the largest file, and the most values that it may have with its aliases expanded.
MOST_BYTES, MOST_VALUES = 1 << 18, 1 << 16

#: libyaml's where PyYAML was built with it, as its wheels are: fifteen times faster.
_PARSER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _CoreSchema(BaseResolver):
    """The kinds of plain values that YAML 1.2 knows (its §10.3.2), and merges.

    PyYAML has those of YAML 1.1, where 1:30:00 is 5,400, 010 is 8, ``no`` is false, a date no text, and 1e-3 no number.
    """


_TAG = "tag:yaml.org,2002:"
#: Kind of plain values → its pattern, and the characters that they begin with.
_KINDS = {
    "null": (r"null|Null|NULL|~|", ("~", "n", "N", "")),
    "bool": (r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", tuple("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
    "merge": (r"<<", ("<",)),
}
for _kind, (_pattern, _first) in _KINDS.items():
    _CoreSchema.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"(?:{_pattern})$"), list(_first))


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    """Build an integer: decimal, whatever zeros it begins with, or after 0o and 0x."""
    text = str(loader.construct_scalar(node))
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _strictly(kind: str, build: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a constructor of one kind of value, which refuses a text that is none: a tag may say anything."""

    def construct(loader: Any, node: Any) -> Any:
        text = loader.construct_scalar(node)
        if not re.fullmatch(_KINDS[kind][0], text):
            raise ConstructorError(None, None, f"{text!r} is no {kind}", node.start_mark)
        return build(loader, node)

    return construct


class _CoreConstructor(SafeConstructor):
    """Builder of the core schema's values, and of no others. Refuses a key that stands twice: the second would silently
    replace the first.
    """

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        f"{_TAG}null": _strictly("null", SafeConstructor.construct_yaml_null),
        f"{_TAG}bool": _strictly("bool", SafeConstructor.construct_yaml_bool),
        f"{_TAG}int": _strictly("int", _integer),
        f"{_TAG}float": _strictly("float", SafeConstructor.construct_yaml_float),
        f"{_TAG}str": SafeConstructor.construct_yaml_str,
        f"{_TAG}seq": SafeConstructor.construct_yaml_seq,
        f"{_TAG}map": SafeConstructor.construct_yaml_map,
        None: SafeConstructor.construct_undefined,
    }

    @override
    def flatten_mapping(self, node: Any) -> None:
        """Put the keys that a merge brings before those of the mapping, which has each key once then.

        PyYAML leaves both in the node, so that a key which is replaced stands twice for the next that merges it; 6.0.4
        drops one of them by identity, and for short keys the wrong one.
        """
        own: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        merges = [value for key, value in node.value if key.tag == f"{_TAG}merge"]
        if len(merges) > 1:
            raise yaml.YAMLError(f"<< stands twice ({_line(node.start_mark)} and below)")
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool, type(None))):
                raise yaml.YAMLError(f"a list or a group is a name ({_line(key_node.start_mark)})")
            if key in own:
                raise yaml.YAMLError(f"{key} stands twice ({_line(node.start_mark)} and below)")
            own[key] = key_node, value_node
        for merge in merges:
            for source in merge.value if isinstance(merge, yaml.SequenceNode) else [merge]:
                if not isinstance(source, yaml.MappingNode):
                    raise ConstructorError(None, None, "<< takes a group, or a list of groups", source.start_mark)
                self.flatten_mapping(source)
                for pair in source.value:
                    merged.setdefault(self.construct_object(pair[0], deep=True), pair)
        node.value = list((merged | own).values())


class _Loader(Composer, _CoreConstructor, _CoreSchema):
    """Builder of the values that checked events describe."""

    def __init__(self, events: Iterable[yaml.Event]) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        _CoreSchema.__init__(self)
        self._events = deque(events)

    def check_event(self, *kinds: type[yaml.Event]) -> bool:
        """Say if there is a next event, of one of ``kinds`` if some are given."""
        return bool(self._events) and (not kinds or isinstance(self._events[0], kinds))

    def peek_event(self) -> yaml.Event | None:
        """Return the next event without taking it."""
        return self._events[0] if self._events else None

    def get_event(self) -> yaml.Event:
        """Take the next event."""
        return self._events.popleft()


class ValueLoader(_CoreConstructor, _CoreSchema, _PARSER):  # type: ignore[misc, valid-type]
    """A loader of PyYAML for single values, such as options of a command line, by the core schema."""


for _loader in (_Loader, ValueLoader):
    _loader.yaml_implicit_resolvers = _CoreSchema.yaml_implicit_resolvers


class _Dumper(_CoreSchema, yaml.SafeDumper):
    """Dumper that quotes text which the core schema would read as something else."""


# YAML 1.1 would read some of it as something else too: both kinds are quoted.
_resolvers = (_CoreSchema.yaml_implicit_resolvers, yaml.SafeDumper.yaml_implicit_resolvers)
_Dumper.yaml_implicit_resolvers = {
    first: [resolver for kind in _resolvers for resolver in kind.get(first, [])]
    for first in {first for kind in _resolvers for first in kind}
}


def yaml_text(value: Any) -> str:
    """Write plain data as YAML that :func:`parse_yaml` and readers of YAML 1.1 read alike, keys in the order given."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(file: Path) -> Any:
    """Read a YAML file, refusing tags of Python and other languages.

    Raises:
        UsageError: the file is no regular file, too large, or no YAML; the message names it.
    """
    return parse_yaml(read_text(file, MOST_BYTES, UsageError), str(file))


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; see :func:`read_yaml`. Errors begin with ``where``."""
    try:
        return _Loader(_checked(yaml.parse(text, Loader=_PARSER))).get_single_data()
    # A number of too many digits is a ValueError.
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{where}: not YAML ({one_line(_reason(error))})") from None


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem}, {_line(error.problem_mark)}"
    return str(error)


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}"


def _checked(events: Iterable[yaml.Event]) -> Iterator[yaml.Event]:
    """Yield the events, but raise if their content would be nested too deep or become too large. Nothing is built here,
    however deep it is.
    """
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = []
    total = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise yaml.YAMLError(f"*{event.anchor} stands inside of itself")
            total += sizes.get(str(event.anchor), 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes |= {} if anchor is None else {anchor: total - before}
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            sizes |= {} if event.anchor is None else {event.anchor: 1}
        if len(opened) > MOST_NESTED:
            raise yaml.YAMLError(f"nested more than {MOST_NESTED} deep ({_line(event.start_mark)})")
        if total > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES:,} values ({_line(event.start_mark)})")
        yield event
