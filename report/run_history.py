"""Histories of runs over training for pages, read once and checked before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..files import read_text
from ..findings.history import RunHistory
from ..measure.records import RunDir, metrics_by_step
from .rows import join_rows
from .text import printable

__all__ = ["RunHistory", "read_runs"]


def read_runs(runs: Sequence[RunDir]) -> list[RunHistory]:
    """Read every run; RunError names the file that is damaged."""
    if not runs:
        raise UsageError("a report needs at least one run")
    histories = []
    for index, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
        birth = {} if run.is_foreign else run.read_birth()
        metrics, snapshots = metrics_by_step(run), run.snapshots()
        rows = join_rows(snapshots, metrics)
        config = "" if run.is_foreign else read_text(run.config)
        histories.append(RunHistory(index, name, run, birth, config, metrics, snapshots, rows))
    return histories


def _names(runs: Sequence[RunDir]) -> list[str]:
    """Return the shortest ends of the runs' paths that differ; a run given twice is numbered."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[i] = printable(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names
