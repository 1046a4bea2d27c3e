"""The reference of a model's config, made from its code: ``python -m birthmark.launch.reference.model_fields``.

Values come from the dataclasses, meaning and sources from their attribute docstrings, refusals from trying all pairs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, combinations
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from docstring_parser import parse_from_object

from ...errors import UsageError
from ...models.attention.kernel_choice import KERNELS, kernel_name
from ...models.config import ModelConfig

_HEAD = """\
# Fields of a model

`birthmark pretrain --help` says how to set fields, in YAML and on the command line. This page is made from the code by
`python -m birthmark.launch.reference.model_fields > docs/model-fields.md`, and a test compares the two.

- **values**: the names that a field may have, one row each; of other fields the type. **Bold** is the default.
- **source** of the value, or else of its field or group: [AS] When Attention Sink Emerges in Language Models, arXiv
  2410.10781; [BB] Transformers Are Born Biased, arXiv 2602.05927; [SO] The Structural Origin of Attention Sink, arXiv
  2605.06611; [SP] SeedPrints, arXiv 2509.26404.
- **kernel** on which attention runs in the default model with this value and the fields that it needs; a field without
  names has a value that is not its default. –: the field has no influence.

| kernel | what attention runs |
|---|---|
"""

_REFUSED = """\
## What is refused

A field that nothing reads is refused, and so is a contradiction. The table has one example of each, of single values
and then of pairs with what they need. *Only X reads it*: leave the field out, or change X. Sizes that are out of range
or do not divide are refused too.
"""

_SOURCE = r"(?:(?P<group>\[(?:AS|BB|SO|SP)\])|\((?P<work>[^()]*(?:arXiv \d|\b(?:19|20)\d\d\b)[^()]*)\))"
_WORDS = re.compile(_SOURCE + r"|``(?P<choice>[^`]+)``|(?P<stop>[;.](?=\s|$))")
#: Message about a field that nothing reads: its field stands in the example, its mend above the table.
_UNREAD = re.compile(r"model\.[\w. ]+ is set, but (only .+ reads it): leave it out or change that")
_READER = re.compile(r"but only (model\.[\w.]+) (\w+)")
_hints = cache(get_type_hints)  # hundreds of configs are built


@dataclasses.dataclass(frozen=True)
class Field:
    """One leaf of the config."""

    path: str
    """Dotted, from ``model`` on."""
    hint: Any
    default: Any
    text: str
    """Docstring of the field, on one line."""
    group: str
    """Docstring of its dataclass, on one line."""

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that the field, or an element of it, may have."""
        return next((get_args(hint) for hint in self._kinds if get_origin(hint) is Literal), ())

    @property
    def named(self) -> bool:
        """True if the field's value is one of ``choices``, or the name of a class."""
        return bool(self.choices) and get_origin(self.hint) is not list

    @property
    def _kinds(self) -> tuple[Any, ...]:
        """Types that the field, or an element of it, may have."""
        return get_args(self.hint) if get_origin(self.hint) in (list, Union, UnionType) else (self.hint,)

    def others(self) -> list[Any]:
        """Return values other than the default: all names, or an example."""
        kinds = [kind for kind in get_args(self.hint) or (self.hint,) if kind is not NoneType]
        if self.choices:
            return [c for c in self.choices if c != self.default] if self.named else [[c] for c in self.choices]
        if bool in kinds:
            return [value for value in (False, True) if value is not self.default]
        if self.default is None:
            return [{int: 2, float: 2.0}.get(kinds[0], [0])]
        return [self.default // 2 if self.hint is int else self.default / 2]

    def sources(self) -> dict[str | None, list[str]]:
        """Return the sources by value; None stands for all values. A source belongs to the values named before it in
        its clause, which ends at ; or a full stop.
        """
        found: dict[str | None, list[str]] = {}
        clause: list[str | None] = []
        for word in _WORDS.finditer(self.text):
            if source := word["group"] or word["work"]:
                for value in clause or [None]:
                    found.setdefault(value, []).append(source)
            elif word["stop"]:
                clause = []
            elif word["choice"] in self.choices and self.named:
                clause.append(word["choice"])
        return found or {None: re.findall(r"\[(?:AS|BB|SO|SP)\]", self.group)}


def model_fields(config: type = ModelConfig, prefix: str = "model") -> Iterator[Field]:
    """Yield every field of a tree of dataclasses, in order."""
    texts = {p.arg_name: " ".join((p.description or "").split()) for p in parse_from_object(config).params}
    for field, (name, hint) in zip(dataclasses.fields(config), _hints(config).items(), strict=True):
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from model_fields(hint, f"{prefix}.{name}")
        else:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            yield Field(f"{prefix}.{name}", hint, default, texts[name], " ".join((config.__doc__ or "").split()))


def build(changes: dict[str, Any], config: type = ModelConfig, prefix: str = "model") -> Any:
    """Build the default config with some fields, dotted, changed; UsageError if the config refuses them."""
    given = {}
    for name, hint in _hints(config).items():
        path = f"{prefix}.{name}"
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            given[name] = build(changes, hint, path)
        elif path in changes:
            given[name] = changes[path]
    return config(**given)


def _problems(changes: dict[str, Any]) -> list[str]:
    try:
        build(changes)
    except UsageError as error:
        return str(error).split("; ")
    return []


def companions(changes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Add to ``changes`` the fields that its refusals ask for, and return the result with the remaining problems."""
    while True:
        problems = _problems(changes)
        readers = (_READER.search(problem) for problem in problems)
        needed = [(reader[1], reader[2]) for reader in readers if reader and reader[1] not in changes]
        if not needed:
            return changes, problems
        changes = changes | {needed[0][0]: yaml.safe_load(needed[0][1])}


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kernel_legend() -> Iterator[str]:
    """Yield a row for each name that may occur in the table's last column."""
    for name, words in KERNELS.items():
        added = words[0] in ",;"
        yield _row(f"**{'… + ' if added else ''}{name}**", words.lstrip(",; "))


def _rows(field: Field) -> Iterator[str]:
    needed = companions({field.path: field.others()[0]})[0]
    values = list(field.choices) if field.named else field.others()[:1]
    kernels = [kernel_name(build(companions(needed | {field.path: value})[0])) for value in values]
    without = kernel_name(build({path: value for path, value in needed.items() if path != field.path}))
    apart = not field.path.startswith("model.attention.") and set(kernels) == {without}
    meaning = re.sub(r"\s*" + _SOURCE, "", field.text).replace("``", "`")
    found = field.sources()
    for i, value in enumerate(values):
        if field.named:
            cell = f"**{value}**" if value == field.default else value
            sources = found.get(value, []) + (found.get(None, []) if value != "none" else [])
        else:
            cell, sources = _type(field), found.get(None, [])
        kernel = "–" if apart else kernels[i]
        yield _row(f"`{field.path}`", cell, "" if i else meaning, ", ".join(sources) or "–", kernel)


def _type(field: Field) -> str:
    kind = field.hint.__name__ if isinstance(field.hint, type) else str(field.hint)
    kind = f"list of {', '.join(field.choices)}" if field.choices else kind
    return f"{kind.replace(' | None', ' or null')}; **{_yaml(field.default)}**"


def refusals() -> dict[str, dict[str, Any]]:
    """Return every message that refuses one value, or two with the fields that they need, with its first example."""
    settings = [(field.path, value) for field in model_fields() for value in field.others()]
    alone = (({path: value}, _problems({path: value})) for path, value in settings)
    pairs = (companions(dict(pair)) for pair in combinations(settings, 2) if pair[0][0] != pair[1][0])
    found: dict[str, dict[str, Any]] = {}
    for changes, problems in chain(alone, pairs):
        for problem in problems:
            found.setdefault(problem, changes)
    return found


def field_table() -> str:
    """Return the text of docs/model-fields.md."""
    lines = [_HEAD + "\n".join(_kernel_legend()), ""]
    lines += [_row("field", "values", "what it does", "source", "kernel"), "|---" * 5 + "|"]
    lines += [row for field in model_fields() for row in _rows(field)]
    lines += ["", _REFUSED, _row("example", "why"), "|---" * 2 + "|"]
    for problem, changes in refusals().items():
        lines.append(
            _row(", ".join(f"`{path}: {_yaml(value)}`" for path, value in changes.items()), _UNREAD.sub(r"\1", problem))
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(field_table(), end="")
