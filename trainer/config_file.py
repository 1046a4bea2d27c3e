"""Config files: read, checked, and made into the config of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace

from ..errors import UsageError
from ..models.dotted import dotted, nested
from .config import RunConfig
from .config_parser import Parser, add_run_fields, unknown_fields


def read_config(path: Path | str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The run that a YAML file describes.

    Args:
        path: the file; what it leaves out has its default.
        overrides: fields that replace the file's, by dotted names or nested: ``{"trainer.max_steps": 3}``. A string is
            read as on the command line: ``"3"`` is a number where the field is one.

    Raises:
        UsageError: no such file, field or value, or an impossible config; the message names the field, and the file if
            the mistake is there.
    """
    file = Path(path)
    fields = _dotted_fields(_load(file), f"{file}: ")
    changes = _dotted_fields(overrides or {})
    try:
        return _build(fields | changes)
    except UsageError:
        _build_or_blame(fields, file)  # raises if the file is wrong by itself
        raise


def build_config(fields: Mapping[str, Any]) -> RunConfig:
    """The run of these fields alone, by dotted names or nested, over the defaults; as `read_config`."""
    return _build(_dotted_fields(fields))


def _load(file: Path) -> Any:
    try:
        # YAML reads 1e-3 as text; the parser makes it the number that the field wants.
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: not YAML ({' '.join(str(error).split())})") from None
    return content


def _dotted_fields(tree: Any, where: str = "") -> dict[str, Any]:
    """Dotted names and values of ``tree``, all of which are fields of a run; UsageError begins with ``where``."""
    tree = nested(dotted(tree)) if isinstance(tree, Mapping) else tree
    _check_groups(where, tree, RunConfig, "")
    fields = dotted(tree)
    if unknown := unknown_fields(fields):
        raise UsageError(where + "; ".join(unknown))
    return fields


def _build(fields: Mapping[str, Any]) -> RunConfig:
    # Defaults are left to the dataclasses: the parser would take six times as long to check them.
    return config_of(_run_parser().parse_object(nested(fields), defaults=False))


def _build_or_blame(fields: Mapping[str, Any], file: Path) -> None:
    try:
        _build(fields)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


@cache
def _run_parser() -> Parser:
    """The parser of a run's fields; building it takes longer than reading a file with it."""
    parser = Parser(prog="birthmark pretrain")
    add_run_fields(parser)
    return parser


# ── what the command line parses itself ──────────────────────────────────────────────────────────────────────────────


def check_config_files(arguments: Sequence[str]) -> None:
    """Refuse config files that the parser would misread: it takes a list or a word in place of a group for nothing."""
    names = [b for a, b in pairwise(arguments) if a == "--config"]
    names += [a.partition("=")[2] for a in arguments if a.startswith("--config=")]
    for name in names:
        try:
            content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--config {name}: cannot be read ({error.strerror})") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {name}: not YAML ({' '.join(str(error).split())})") from None
        _check_groups(f"--config {name}: ", content, RunConfig, "")


def _check_groups(where: str, content: Any, config: type, group: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(f"{where}{group or 'the file'} is {content!r}; write fields as `name: value` under it")
    for field in dataclasses.fields(config):
        kind = field.default_factory
        if field.name in content and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _check_groups(where, content[field.name], kind, f"{group}.{field.name}".lstrip("."))


def config_of(parsed: Namespace) -> RunConfig:
    """The run of the fields that a parser has checked; options beside them are left alone.

    Raises:
        UsageError: the fields contradict each other.
    """
    found = _instance(RunConfig, parsed.as_dict())
    assert isinstance(found, RunConfig)
    return found


def _instance(config: type, values: Mapping[str, Any]) -> Any:
    given = {}
    for field in dataclasses.fields(config):
        if field.name in values:
            kind, value = field.default_factory, values[field.name]
            group = isinstance(kind, type) and dataclasses.is_dataclass(kind)
            given[field.name] = _instance(kind, value) if group else value  # type: ignore[arg-type]
    return config(**given)


def resolve(file: Path, flags: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file and flags ``--field=value`` describe: the bridge for callers that still make flags."""
    check_config_files(["--config", str(file)])
    parser = _run_parser()
    return config_of(parser.parse_args([f"--config={file}", *flags]))
