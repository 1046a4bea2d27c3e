"""The file of a study of lineage: births, runs, continued runs and how they are compared (docs/studies.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ..reading import Reader, read_fields
from .comparison import Comparison
from .comparison_fields import read_tests

#: Folder of the runs that continued runs start from.
BASE = "base"
_SCALED = ("base", "init_seeds", "steps", "continue", "test", "tests")
_FIELDS = ("kind", "name", *_SCALED, "scales")
_DEFAULT_TESTS: dict[str, Any] = {"dimensions": {}, "published": {"null": "analytic"}}


@dataclass(frozen=True)
class LineageStudy:
    """A study file of the kind ``lineage``, checked and with its paths resolved."""

    file: Path
    name: str
    base: Path
    """Run config of all births."""
    init_seeds: tuple[int, ...]
    """Their seeds."""
    steps: tuple[int, ...]
    """Checkpoints of the base that are compared; none: all."""
    continuations: dict[str, dict[str, Any]]
    """Name → dotted fields in which the continued run differs from the base."""
    tests: dict[str, Comparison]
    """By name; the first is drawn as a matrix."""
    scales: dict[str, LineageStudy]
    """The same at other sizes."""

    def at(self, scale: str | None) -> LineageStudy:
        """The study at one of its scales; UsageError if the file has none of that name."""
        if scale is None:
            return self
        if scale not in self.scales:
            raise UsageError(f"--scale {scale}: {self.file} has {', '.join(self.scales) or 'none'}")
        return self.scales[scale]


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_lineage_study(file: Path) -> LineageStudy:
    """Read and check a study file of the kind ``lineage``; UsageError names the file and the field."""
    content, reader = read_fields(file), Reader(file)
    reader.known(content, _FIELDS, "")
    name = content.get("name", file.stem)
    reader.name(name, "name")
    scales = {}
    for scale, fields in reader.named(content.get("scales", {}), "scales").items():
        where = f"scales.{scale}."
        reader.known(reader.group(fields, where.rstrip(".")), _SCALED, where)
        scales[scale] = _at_one_scale(reader, f"{name}-{scale}", content | fields, dict.fromkeys(fields, where))
    return dataclasses.replace(_at_one_scale(reader, name, content, {}), scales=scales)


def _at_one_scale(reader: Reader, name: str, content: Mapping[str, Any], prefixes: Mapping[str, str]) -> LineageStudy:
    """The study at one scale; ``prefixes`` say where fields stand that are not at the top of the file."""

    def where(field: str) -> str:
        return prefixes.get(field, "") + field

    if "base" not in content:
        raise UsageError(f"{reader.file}: base is missing")
    seeds = reader.seeds(content.get("init_seeds", [0, 1]), where("init_seeds"))
    if len(seeds) < 2:
        raise reader.wrong(where("init_seeds"), list(seeds), "give at least two: strangers are the control")
    continuations = reader.changes(content.get("continue", {}), where("continue"))
    for continuation, fields in continuations.items():
        if continuation == BASE:
            raise reader.wrong(f"a name in {where('continue')}", BASE, "the runs that it continues have this name")
        if "init_from" in fields:
            field = f"{where('continue')}.{continuation}.init_from"
            raise reader.wrong(field, fields["init_from"], "the study sets it, leave it out")
    return LineageStudy(
        file=reader.file,
        name=name,
        base=reader.path(content["base"], where("base")),
        init_seeds=seeds,
        steps=_steps(reader, content.get("steps", []), where("steps")),
        continuations=continuations,
        tests=read_tests(reader, content, prefixes, _DEFAULT_TESTS),
        scales={},
    )


def _steps(reader: Reader, value: Any, field: str) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(type(step) is int and step > 0 for step in value)
    if not whole or len(set(value)) < len(value):
        raise reader.wrong(field, value, "give a list of different steps from 1, or leave it out for all checkpoints")
    return tuple(sorted(value))
