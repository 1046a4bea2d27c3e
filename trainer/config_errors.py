"""What went wrong, in one line for a person: messages of the argument parser, said again."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from functools import cache

from .config import RunConfig


@cache
def _fields(config: type, prefix: str = "") -> tuple[str, ...]:
    """Dotted names of all fields of a tree of dataclasses, and of its groups."""
    names: list[str] = []
    for name, value in ((f.name, f.default_factory) for f in dataclasses.fields(config)):
        names.append(prefix + name)
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            names += _fields(value, f"{prefix}{name}.")
    return tuple(names)


def unknown_fields(names: Iterable[str]) -> list[str]:
    """A line about each name that is no field of a run, nor a group of fields."""
    known = _fields(RunConfig)
    return [_unknown(name) for name in names if name not in known]


def _unknown(name: str) -> str:
    """A line about a field that does not exist, with the one that was probably meant."""
    known = _fields(RunConfig)
    last = name.rpartition(".")[2]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75) or [
        k for k in known if difflib.SequenceMatcher(None, k.rpartition(".")[2], last).ratio() > 0.8
    ]
    return f"{name}: no such field" + (f"; did you mean {close[0]}?" if close else "; see birthmark pretrain --help")


def _kind(annotation: str) -> str:
    """A type as people say it."""
    choices = re.fullmatch(r"(?:typing\.)?Literal\[(.*)\]", annotation)
    if choices:
        return f"one of {choices[1]}"
    simple = re.fullmatch(r"<class '(\w+)'>", annotation)
    return {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(
        simple[1] if simple else annotation, annotation
    )


def explain(message: str) -> str:
    """One line for a person, from a message of the argument parser."""
    line = " ".join(message.split())
    for pattern, rewrite in (
        (r"Group '([^']+)' does not accept option '([^']+)'", lambda m: _unknown(f"{m[1]}.{m[2]}")),
        (r"Group '([^']+)' does not accept nested key '([^']+)'", lambda m: _unknown(f"{m[1]}.{m[2]}")),
        (r"Subcommand '[^']+' does not accept option '([^']+)'", lambda m: _unknown(m[1])),
        (
            r"the following arguments are required: \w+\.(\w+)",
            lambda m: f"{m[1]}: missing; see the command with --help",
        ),
        (r"unrecognized arguments: --?([^ =]+)", lambda m: _unknown(m[1])),
        (
            r"Parser key \"([^\"]+)\": Expected a (?:typing\.)?(.+?)\. Got value: (.*)",
            lambda m: f"{m[1]}: {m[3]!r} is not {_kind(m[2])}",
        ),
        (
            r"Parser key \"([^\"]+)\": Does not validate against any of the Union subtypes .*Given value: (.*)",
            lambda m: f"{m[1]}: {m[2]!r} is not a value of this field; see its type in birthmark pretrain --help",
        ),
        (r"Parser key \"([^\"]+)\": (.*)", lambda m: f"{m[1]}: {m[2]}"),
    ):
        found = re.search(pattern, line)
        if found:
            return rewrite(found)
    return line
