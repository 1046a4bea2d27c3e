"""Config files: read, checked, and resolved to a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from ..errors import UsageError
from .config import RunConfig
from .config_parser import Parser, add_run_fields


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
        _check_groups(name, content, RunConfig, "")


def _check_groups(file: str, content: Any, config: type, group: str) -> None:
    if not isinstance(content, dict):
        raise UsageError(
            f"--config {file}: {group or 'the file'} is {content!r}; write fields as `name: value` under it"
        )
    for field in dataclasses.fields(config):
        kind = field.default_factory
        if field.name in content and isinstance(kind, type) and dataclasses.is_dataclass(kind):
            _check_groups(file, content[field.name], kind, f"{group}.{field.name}".lstrip("."))


def run_config(parser: ArgumentParser, parsed: Namespace) -> RunConfig:
    """The run that was parsed."""
    built = parser.instantiate(parsed)
    return RunConfig(**{f.name: built[f.name] for f in dataclasses.fields(RunConfig)})


def resolve(file: Path, flags: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file and flags ``--field=value`` describe; what they leave out has its default."""
    check_config_files(["--config", str(file)])
    parser = Parser()
    add_run_fields(parser)
    return run_config(parser, parser.parse_args([f"--config={file}", *flags]))
