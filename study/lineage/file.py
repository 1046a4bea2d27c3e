"""File of a study of lineage: births, runs, continued runs and their comparison (docs/studies.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..reading import Reader, where
from ..scaled_study import ScaledStudy, read_scaled_study
from .comparison import Comparison
from .comparison_fields import read_tests

#: Folder of the runs that continued runs start from.
BASE = "base"
_FIELDS = ("base", "init_seeds", "steps", "continue", "test", "tests")
_DEFAULT_TESTS: dict[str, Any] = {"dimensions": {}, "published": {"null": "analytic"}}


@dataclass(frozen=True, kw_only=True)
class LineageStudy(ScaledStudy):
    """A study file of the kind ``lineage``, checked and with its paths resolved."""

    steps: tuple[int, ...]
    """Checkpoints of the base that are compared; none: all."""
    continuations: dict[str, dict[str, Any]]
    """Name → dotted fields in which the continued run differs from the base."""
    tests: dict[str, Comparison]
    """Tests by name; the first is drawn as a matrix."""


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_lineage_study(file: Path) -> LineageStudy:
    """Read and check a study file of the kind ``lineage``; UsageError names the file and the field."""
    return read_scaled_study(file, _FIELDS, _at_one_scale)


def _at_one_scale(reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]) -> LineageStudy:
    """Return the study at one scale; ``prefixes`` give the places of fields that are not at the top of the file."""

    if "base" not in content:
        raise UsageError(f"{reader.file}: base is missing")
    seeds = reader.seeds(content.get("init_seeds", [0, 1]), where(prefixes, "init_seeds"))
    if len(seeds) < 2:
        raise reader.wrong(where(prefixes, "init_seeds"), list(seeds), "give at least two: strangers are the control")
    continuations = reader.changes(content.get("continue", {}), where(prefixes, "continue"))
    for continuation, fields in continuations.items():
        if continuation == BASE:
            raise reader.wrong(
                f"a name in {where(prefixes, 'continue')}", BASE, "the runs that it continues have this name"
            )
        if "init_from" in fields:
            field = f"{where(prefixes, 'continue')}.{continuation}.init_from"
            raise reader.wrong(field, fields["init_from"], "the study sets it, leave it out")
    return LineageStudy(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where(prefixes, "base")),
        init_seeds=seeds,
        steps=_steps(reader, content.get("steps", []), where(prefixes, "steps")),
        continuations=continuations,
        tests=read_tests(reader, content, prefixes, _DEFAULT_TESTS),
    )


def _steps(reader: Reader, value: Any, field: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(step) is int and step > 0 for step in value)
    if not whole or len(set(value)) < len(value):
        raise reader.wrong(field, value, "give a list of different steps from 1, or leave it out for all checkpoints")
    return tuple(sorted(value))
