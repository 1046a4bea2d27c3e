"""Config files: read, checked, and turned into the config of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from ..errors import UsageError
from ..models.config import ModelConfig, nested
from ..models.user_classes import name_user_code
from ..schema import quoted
from .by_name.shipped_configs import find_config
from .config import RunConfig
from .config_parser import field_types, field_value, known_fields, listed_config
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
    fields = known_fields(f"{file}: ", read_config_yaml(file))
    changes = known_fields("", overrides or {})
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
    asked = known_fields("", fields) | known_fields("", overrides or {})
    name_user_code(asked)
    return _build(asked)


def build_model(fields: Mapping[str, Any]) -> ModelConfig:
    """Build the config of a model from these fields alone, nested and without ``model.``; checks that concern a whole
    run are skipped.

    Raises:
        UsageError: an unknown field, an impossible value; the message names the field.
    """
    tree = nested(known_fields("", {"model": fields}))
    found = build_group(ModelConfig, tree.get("model", {}), "model.")
    assert isinstance(found, ModelConfig)
    return found


def _build(fields: Mapping[str, Any]) -> RunConfig:
    return _run_of(nested(fields))


def _build_or_blame(fields: Mapping[str, Any], file: Path) -> None:
    try:
        _build(fields)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


# ── what the command line parses itself ──────────────────────────────────────────────────────────────────────────────


def config_of(parsed: Namespace) -> RunConfig:
    """Build the config of a run from the fields that a parser has checked; other options are ignored.

    Raises:
        UsageError: the fields contradict each other.
    """
    return _run_of(parsed.as_dict())


def _run_of(values: Mapping[str, Any]) -> RunConfig:
    found = build_group(RunConfig, values)
    assert isinstance(found, RunConfig)
    return found


def build_group(config: type, values: Mapping[str, Any], group: str = "") -> Any:
    """Build a dataclass of config fields from their values, which are read as in a file.

    Args:
        config: the dataclass; fields may be dataclasses themselves, or lists of them.
        values: values by field; others are ignored, and missing ones have their defaults.
        group: the beginning of the fields' names in messages.

    Raises:
        UsageError: a value of another type; names the field.
    """
    given, types = {}, field_types(config)
    for field in dataclasses.fields(config):
        if field.name not in values:
            continue
        kind, value, name = field.default_factory, values[field.name], f"{group}{field.name}"
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            value = build_group(kind, value, f"{name}.")
        elif (listed := listed_config(types[field.name])) is not None:
            entries = field_value(name, value, list[dict[str, Any]])
            value = [build_group(listed, one, f"{name}[{i}].") for i, one in enumerate(entries)]
        else:
            value = field_value(name, value, types[field.name])
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and (problem := text_problem(text)):
                raise UsageError(f"{name} is {quoted(text)}: {problem}")
        given[field.name] = value
    return config(**given)


def text_problem(text: str) -> str:
    """Say why a text can be neither a name nor a path; "" if it can."""
    if any(ord(char) < 32 or 0xD800 <= ord(char) < 0xE000 for char in text):
        return "leave control characters and what is no Unicode out"
    if len(text) > 4096 or any(len(part.encode()) > 255 for part in text.split("/")):
        return "give at most 255 bytes, of a path between two slashes"
    return ""
