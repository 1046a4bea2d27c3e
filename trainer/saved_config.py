"""Configs on disk: writing a whole one, and where a config departs from the one that a run was made with."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ..files import write_text
from ..measure.records import RunDir
from ..models.dotted import dotted
from .config import RunConfig


def write_config(config: RunConfig, file: Path) -> None:
    """Write every field of ``config`` as YAML, which `read_config` reads."""
    write_text(file, yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))


def read_saved_fields(run: RunDir) -> dict[str, Any]:
    """Every field of a run's ``config.yaml`` by dotted name."""
    # A field that came after the run was made has its default in it.
    return dotted(asdict(RunConfig())) | dotted(yaml.safe_load(run.config.read_text(encoding="utf-8")))


def config_differences(config: RunConfig, run: RunDir) -> dict[str, tuple[Any, Any]]:
    """Fields in which ``config`` is not the run's own, by dotted name and sorted: (the run's value, ``config``'s)."""
    had, now = read_saved_fields(run), dotted(asdict(config))
    values = {name: (had.get(name), now.get(name)) for name in sorted({*had, *now})}
    return {name: (there, here) for name, (there, here) in values.items() if there != here}
