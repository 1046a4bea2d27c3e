"""Config files: read, checked, and turned into the config of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from copy import copy
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import Namespace

from ..errors import UsageError
from ..models.config import ModelConfig, dotted, nested
from ..models.user_classes import name_user_code
from ..schema import quoted
from .by_name.shipped_configs import find_config
from .config import RunConfig
from .config_parser import (
    Parser,
    add_run_fields,
    check_groups,
    field_kinds,
    field_types,
    listed_config,
    unknown_fields,
)
from .saved_config import read_config_yaml


def read_config(path: Path | str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read the config of a run from a YAML file.

    Args:
        path: the file, or the name of one that the package brings; missing fields have their defaults.
        overrides: fields that replace the file's, by dotted names or nested: ``{"trainer.max_steps": 3}``. A string is
            read as on the command line: ``"3"`` is a number if the field is one.

    Raises:
        UsageError: no such file, field or value, or an impossible config; the message names the field, and the file if
            the mistake is in it.
    """
    file = find_config(path)
    fields = _dotted_fields(read_config_yaml(file), f"{file}: ")
    changes = _dotted_fields(overrides or {})
    name_user_code(changes)
    try:
        return _build(fields | changes)
    except UsageError:
        _build_or_blame(fields, file)  # raises if the file is wrong by itself
        raise


def build_config(fields: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Build the config of a run from these fields alone, by dotted names or nested, over the defaults; like
    `read_config`.
    """
    asked = _dotted_fields(fields) | _dotted_fields(overrides or {})
    name_user_code(asked)
    return _build(asked)


def build_model(fields: Mapping[str, Any]) -> ModelConfig:
    """Build the config of a model from these fields alone, nested and without ``model.``; checks that concern a whole
    run are skipped.

    Raises:
        UsageError: an unknown field, an impossible value; the message names the field.
    """
    parsed = parse_fields(_dotted_fields({"model": dict(fields)}))
    found = _instance(ModelConfig, parsed.get("model", {}), "model.")
    assert isinstance(found, ModelConfig)
    return found


def _dotted_fields(tree: Any, where: str = "") -> dict[str, Any]:
    """Return dotted names and values of ``tree``, all of which must be fields of a run; UsageError begins with
    ``where``.
    """
    tree = nested(dotted(tree)) if isinstance(tree, Mapping) else tree
    check_groups(where, tree)
    fields = dotted(tree)
    if unknown := unknown_fields(fields):
        raise UsageError(where + "; ".join(unknown))
    return fields


def _build(fields: Mapping[str, Any]) -> RunConfig:
    # Defaults are left to the dataclasses: the parser would take six times as long to check them. What has its field's
    # type needs no parser either, which takes ten times as long as all else: most of a file that a run wrote.
    kinds = field_kinds(RunConfig)
    ready = {name: copy(value) for name, value in fields.items() if name in kinds and is_ready(value, kinds[name])}
    parsed = parse_fields({name: value for name, value in fields.items() if name not in ready})
    return _run_of(nested(ready | dotted(parsed)))


def parse_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Parse fields of a run, by dotted names, like the command line; return them nested: ``"3"`` is a number if the
    field is one. UsageError names the field.
    """
    return dict(_run_parser().parse_object(nested(fields), defaults=False).as_dict()) if fields else {}


def is_ready(value: Any, kind: Any) -> bool:
    """Return True if the parser would leave ``value`` unchanged in a field of type ``kind``; False if that is not
    obvious.
    """
    options = get_args(kind)
    if kind in (bool, int, float, str):
        return type(value) is kind
    if get_origin(kind) is Literal:
        return any(type(value) is type(option) and value == option for option in options)
    if get_origin(kind) is list:
        return type(value) is list and all(is_ready(one, options[0]) for one in value)
    # In a union a text may be meant as another of its types.
    texts = isinstance(value, (str, list))
    return get_origin(kind) in (Union, UnionType) and any(
        value is None if option is type(None) else is_ready(value, option)
        for option in options
        if not texts or get_origin(option) is Literal
    )


def _build_or_blame(fields: Mapping[str, Any], file: Path) -> None:
    try:
        _build(fields)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


@cache
def _run_parser() -> Parser:
    """Build the parser of a run's fields; this takes longer than reading a file with it."""
    parser = Parser(prog="birthmark pretrain")
    add_run_fields(parser)
    return parser


# ── what the command line parses itself ──────────────────────────────────────────────────────────────────────────────


def config_of(parsed: Namespace) -> RunConfig:
    """Build the config of a run from the fields that a parser has checked; other options are ignored.

    Raises:
        UsageError: the fields contradict each other.
    """
    return _run_of(parsed.as_dict())


def _run_of(values: Mapping[str, Any]) -> RunConfig:
    found = _instance(RunConfig, values)
    assert isinstance(found, RunConfig)
    return found


def _instance(config: type, values: Mapping[str, Any], group: str = "") -> Any:
    given, types = {}, field_types(config)
    for field in dataclasses.fields(config):
        if field.name not in values:
            continue
        kind, value, name = field.default_factory, values[field.name], f"{group}{field.name}"
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            value = _instance(kind, value, f"{name}.")
        elif (listed := listed_config(types[field.name])) is not None:
            value = [_instance(listed, one, f"{name}[{i}].") for i, one in enumerate(value)]
        elif value is None and type(None) not in get_args(types[field.name]):
            # The parser takes None for any field.
            raise UsageError(f"{name} is null: give a value, or leave it out")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (problem := _text_problem(text)):
                raise UsageError(f"{name} is {quoted(text)}: {problem}")
        given[field.name] = value
    return config(**given)


def _text_problem(text: str) -> str:
    """Say why a text can be neither a name nor a path; "" if it can."""
    if any(ord(char) < 32 or 0xD800 <= ord(char) < 0xE000 for char in text):
        return "leave control characters and what is no Unicode out"
    if len(text) > 4096 or any(len(part.encode()) > 255 for part in text.split("/")):
        return "give at most 255 bytes, of a path between two slashes"
    return ""
