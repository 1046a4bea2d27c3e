"""Parser of config files and command lines, whose errors are one line for a person."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import jsonargparse._loaders_dumpers
from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from ..errors import UsageError
from ..files import user_path
from ..models.config import dotted, nested
from ..schema import SchemaError, converted, quoted
from ..yaml_files import ValueLoader, parse_yaml, yaml_text
from .by_name.shipped_configs import find_config, shipped_configs
from .config import RunConfig
from .saved_config import read_config_yaml

# The dataclasses' attribute docstrings are the help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)
# Its loader has the numbers of YAML 1.1, in which 1:30:00 is 5,400; `set_loader` does not reach typed options.
vars(jsonargparse._loaders_dumpers)["yaml_default_loader"] = ValueLoader


class Parser(ArgumentParser):
    """Parser that raises UsageError in place of printing a usage text and exiting, and that accepts no abbreviated
    fields.
    """

    bare = ""
    """Option that a word without an option stands for, if the command has no argument for it."""
    bare_kind = ""
    """Kind of name that it takes, as a metavar has it: CONFIG or MODEL."""
    passes_on = False
    """True if the words of the command line are those of another command, in their order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse like the library, but refuse what it would ignore, and a number with more digits than a float has."""
        words = list(self._normal_groups(args[0] if args and args[0] is not None else sys.argv[1:]))
        args = (words, *args[1:])
        for name in {action.dest for action in self._actions} & _listed_fields().keys():
            for option in (name, f"{name}+"):
                for value in _values_of(f"--{option}", words):
                    _check_listed("", value, _listed_fields()[name], option)
        try:
            return super().parse_args(*args, **kwargs)
        except OverflowError:
            raise UsageError("an option has a number of very many digits: give a smaller one") from None

    def _normal_groups(self, words: Iterable[str]) -> Iterator[str]:
        """Yield the words, with the values of groups checked as those of a file and each field in one spelling."""
        fields = {action.dest for action in self._actions}
        # Other commands have a --data without fields.
        groups = {f"--{group}" for group in _groups() if any(name.startswith(f"{group}.") for name in fields)}
        waiting = ""
        for word in words:
            option, equals, value = (waiting, "", word) if waiting else word.partition("=")
            if option in groups and (equals or waiting):
                yield f"{option}={_normal_group(option.removeprefix('--'), value)}"
                waiting = ""
            elif option in groups:
                waiting = option
            else:
                yield word
        if waiting:
            yield waiting

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise the message as one line, without a usage text."""
        line = " ".join(message.split())
        if found := re.search(r"Parser key \"([^\"]+)\": .*?(?:Got|Given) value: (.*)", line):
            kinds = {action.dest: getattr(action, "_typehint", None) for action in self._actions}
            if kinds.get(found[1]) is not None:
                raise UsageError(f"{found[1]}: {found[2]!r} is not {_in_words(kinds[found[1]])}")
        if found := re.search(r"the following arguments are required: (\w+)", line):
            raise UsageError(f"{found[1]}: missing; see {self.prog} --help")
        if found := re.search(r"unrecognized arguments: (--?)?([^ ]+)", line):
            if not found[1]:
                raise UsageError(f"{found[2]}: one name too many; see {self.prog} --help")
            names = [name.lstrip("-") for name in self._option_string_actions if name not in ("-h", "--help")]
            raise UsageError(unknown_option(found[2].partition("=")[0], names, self.prog))
        raise UsageError(re.sub(r".*Parser key \"([^\"]+)\"", r"\1", line))


class ConfigFile(ActionConfigFile):
    """Action for a config file, found by path or by name, whose groups must be groups."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Add the file's fields to those before it."""
        file = find_config(values)
        where = f"--config {values}: "
        fields = known_fields(where, read_config_yaml(file))
        _check_values(where, fields)
        # The library's own reading of a file takes the last spelling of a group for all of it.
        cfg.update(parser.parse_object(nested(fields), env=False, defaults=False))
        cfg[self.dest] = [*(cfg.get(self.dest) or []), str(file)]

    def completer(self, prefix: str, **kwargs: Any) -> list[str]:
        """List files and names that begin with ``prefix``, for the shell."""
        names = (config.name for config in shipped_configs() if config.kind != "study")
        return [*super().completer(prefix, **kwargs), *(name for name in names if name.startswith(prefix))]


_GROUP_FORM = "write fields as `name: value` under it"


def known_fields(where: str, content: Any) -> dict[str, Any]:
    """Return dotted names and values of a file's content, all of which must be fields of a run; empty groups are left
    out.

    Raises:
        UsageError: a field is unknown or stands twice, a value is in place of a group, which the parser would ignore,
            or a number is larger than any float; the message begins with ``where`` and names the field.
    """
    if not isinstance(content, Mapping):
        raise UsageError(f"{where}the file is {quoted(content, none='null')}; {_GROUP_FORM}")
    try:
        fields = dotted(content)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from None
    groups = _groups()
    for name, value in fields.items():
        # Floats are smaller, and the parser would fail to make it one.
        if isinstance(value, int) and value.bit_length() > 128:
            raise UsageError(f"{where}{name} is {quoted(value)}: give a smaller one")
        if name in groups and not isinstance(value, Mapping):
            raise UsageError(f"{where}{name} is {quoted(value, none='null')}; {_GROUP_FORM}")
        if name in _listed_fields():
            _check_listed(where, value, _listed_fields()[name], name)
    if unknown := unknown_fields(fields):
        raise UsageError(where + "; ".join(unknown))
    return {name: value for name, value in fields.items() if name not in groups}


def _check_values(where: str, fields: Mapping[str, Any]) -> None:
    """Refuse values of another type than their fields, with messages that begin with ``where``."""
    kinds = field_kinds(RunConfig)
    for name, value in fields.items():
        if name in kinds and value is not None and listed_config(kinds[name]) is None:
            field_value(f"{where}{name}", value, kinds[name])


@cache
def field_types(config: type) -> Mapping[str, Any]:
    """Return the types of a config's fields; finding them takes longer than reading a file."""
    return get_type_hints(config)


@cache
def field_kinds(config: type, prefix: str = "") -> Mapping[str, Any]:
    """Return the types of the leaves of a tree of configs by dotted name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        group = field.default_factory
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            found |= field_kinds(group, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = field_types(config)[field.name]
    return found


def field_value(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a field of type ``kind``: ``"3"`` is a number if the field is one.

    A text is read as YAML unless the field takes nothing but text, and stays as it is where that gives text too.

    Raises:
        UsageError: the value has another type; names the field.
    """
    for reading in _readings(name, value, kind):
        with contextlib.suppress(SchemaError):
            return converted(reading, kind)
    if value is None:
        raise UsageError(f"{name} is null: give a value, or leave it out")
    raise UsageError(f"{name}: {quoted(value)} is not {_in_words(kind)}")


def _readings(name: str, value: Any, kind: Any) -> Iterator[Any]:
    if isinstance(value, str) and value and kind is not str:
        with contextlib.suppress(UsageError):
            # Another text loses what YAML takes for a comment or a name, as in the folder `a #b`.
            if not isinstance(reading := parse_yaml(value, name), str):
                yield reading
    yield value


def _in_words(kind: Any) -> str:
    """Put the type of a field in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_in_words, get_args(kind)))
    if get_origin(kind) is dict:
        return "a group, {NAME: NUMBER}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words.get(kind, "a list, [A, B]")


def listed_config(kind: Any) -> type | None:
    """Return the config that a field of this type lists, or None."""
    listed = get_args(kind)[0] if get_origin(kind) is list else None
    return listed if isinstance(listed, type) and dataclasses.is_dataclass(listed) else None


def _check_listed(where: str, content: Any, config: type, group: str) -> None:
    """Refuse entries of a list that are not such configs, or whose values have another type than their fields, with
    their place, which the parser would omit.
    """
    if isinstance(content, str):
        content = parse_yaml(content, f"{where}{group}")
    if content is None:
        raise UsageError(f"{where}{group} is null: give a list, [] for none")
    known = [field.name for field in dataclasses.fields(config)]
    # They stand first, as in every dataclass.
    required = [field.name for field in dataclasses.fields(config) if _is_required(field)]
    optional = f", with any of {', '.join(known[len(required) :])}" if len(known) > len(required) else ""
    form = f"write {{{', '.join(f'{name}: …' for name in required)}}}{optional}"
    for i, entry in enumerate(content if isinstance(content, list) else [content]):
        place = f"{where}{group}[{i}]"
        if not isinstance(entry, dict):
            raise UsageError(f"{place} is {quoted(entry, none='null')}: {form}")
        if missing := [name for name in required if entry.get(name) is None]:
            raise UsageError(f"{place}.{missing[0]}: missing; {form}")
        if unknown := [name for name in entry if name not in known]:
            raise UsageError(f"{place}.{unknown[0]}: no such field; there are {', '.join(known)}")
        for name, value in entry.items():
            field_value(f"{place}.{name}", value, field_types(config)[name])


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@cache
def _listed_fields() -> Mapping[str, type]:
    """Return the fields that list configs, by dotted name, with the listed config."""
    listed = ((name, listed_config(kind)) for name, kind in field_kinds(RunConfig).items())
    return {name: config for name, config in listed if config is not None}


@cache
def _groups() -> frozenset[str]:
    """Return the dotted names of a run's groups of fields."""
    return frozenset(_fields(RunConfig)) - field_kinds(RunConfig).keys()


def _normal_group(group: str, value: str) -> str:
    """Check the value of a group's option, YAML or the name of a file, and write it as nested YAML."""
    content = parse_yaml(value, group)
    if isinstance(content, str) and user_path(content).is_file():
        content = read_config_yaml(user_path(content))
    fields = known_fields("", {group: content})
    _check_values("", fields)
    tree: Any = nested(fields)
    for part in group.split("."):
        tree = tree.get(part, {})
    return yaml_text(tree)


def _values_of(option: str, words: Sequence[str]) -> list[str]:
    """Return the values of an option on a command line, after a space or an equals sign."""
    after = [value for word, value in pairwise(words) if word == option]
    return after + [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]


def add_run_fields(parser: Parser) -> None:
    """Let ``parser`` take every field of a run, and ``--config`` files that hold some of them: words alone are such
    files.
    """
    parser.bare, parser.bare_kind = "config", "CONFIG"
    parser.add_argument(
        "--config",
        action=ConfigFile,
        metavar="CONFIG",
        help="YAML file with any of the fields below, or the name of one that comes with the package.",
    )
    parser.add_class_arguments(RunConfig, None, as_group=False)


# ── its messages ─────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _fields(config: type) -> tuple[str, ...]:
    """List dotted names of all fields of a tree of configs, and of its groups, each before its content."""
    parts = [name.split(".") for name in field_kinds(config)]
    return tuple(dict.fromkeys(".".join(name[: i + 1]) for name in parts for i in range(len(name))))


def unknown_fields(names: Iterable[str]) -> list[str]:
    """Write a line about each name that is neither a field of a run nor a group of fields."""
    known = _fields(RunConfig)
    return [unknown_option(name, known, "birthmark pretrain") for name in names if name not in known]


def unknown_option(name: str, known: Sequence[str], command: str) -> str:
    """Write a line about a field or an option that does not exist, with the one that was probably meant."""
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75) or [
        k for k in known if difflib.SequenceMatcher(None, k.rpartition(".")[2], last).ratio() > 0.8
    ]
    # A command takes either the fields of a run or a few options.
    dashes, what = ("", "field") if any("." in k for k in known) else ("--", "option")
    hint = f"; did you mean {dashes}{close[0]}?" if close else f"; see {command} --help"
    return f"{dashes}{name}: no such {what}{hint}"
