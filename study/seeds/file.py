"""File of a study of seeds: the number of births, and of orders of the data (docs/studies.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..reading import Reader, where
from ..scaled_study import ScaledStudy, read_scaled_study

_FIELDS = ("base", "init_seeds", "data_seeds")


@dataclass(frozen=True, kw_only=True)
class SeedsStudy(ScaledStudy):
    """A study file of the kind ``seeds``, checked and with its paths resolved."""

    data_seeds: tuple[int, ...]
    """Data seeds with each of which every birth is trained."""


def read_seeds_study(file: Path) -> SeedsStudy:
    """Read and check a study file of the kind ``seeds``; UsageError names the file and the field."""
    return read_scaled_study(file, _FIELDS, _at_one_scale)


def _at_one_scale(reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]) -> SeedsStudy:
    """Return the study at one scale; ``prefixes`` give the places of fields that are not at the top of the file."""

    if "base" not in content:
        raise UsageError(f"{reader.file}: base is missing")
    return SeedsStudy(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where(prefixes, "base")),
        init_seeds=_seeds(reader, content.get("init_seeds", 3), where(prefixes, "init_seeds")),
        data_seeds=_seeds(reader, content.get("data_seeds", 3), where(prefixes, "data_seeds")),
    )


def _seeds(reader: Reader, value: Any, field: str) -> tuple[int, ...]:
    """Read a number of seeds, from 0 on, or the seeds themselves; at least two."""
    seeds = tuple(range(value)) if type(value) is int and value > 0 else reader.seeds(value, field)
    if len(seeds) < 2:
        raise reader.wrong(field, value, "give at least 2: one seed has no variance")
    return seeds
