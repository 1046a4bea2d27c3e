"""One run over training as pages show it, read once and checked before anything is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..files import read_text
from ..measure.records import RunDir, Snapshot, metrics_by_step
from .rows import join_rows
from .text import finite_or_nan, printable


@dataclass(frozen=True)
class RunHistory:
    """Everything that a page shows of one run, read once."""

    index: int
    """Place among the runs of the page: decides the colour."""
    name: str
    folder: RunDir
    birth: dict[str, Any]
    """The certificate; empty where only snapshots were taken here."""
    config: str
    """YAML; empty there."""
    metrics: dict[int, dict[str, float]]
    snapshots: list[Snapshot]
    rows: list[dict[str, Any]]

    @property
    def first(self) -> Snapshot | None:
        """The snapshot at birth."""
        return next((snapshot for snapshot in self.snapshots if snapshot.step == 0), None)

    @property
    def last(self) -> Snapshot | None:
        """The latest snapshot after birth; the one of an unknown step, where there is no other."""
        later = [snapshot for snapshot in self.snapshots if snapshot.step != 0]
        return max(later, key=lambda snapshot: snapshot.step, default=None)

    @property
    def dated(self) -> list[Snapshot]:
        """The snapshots whose step is known, birth first."""
        return [snapshot for snapshot in self.snapshots if snapshot.step >= 0]

    @property
    def moments(self) -> list[tuple[bool, Snapshot]]:
        """(now?, snapshot) of birth and of now, as far as they exist."""
        return [(now, s) for now, s in ((False, self.first), (True, self.last)) if s is not None]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metrics.jsonl key, where it was logged; what is not a number is NaN."""
        logged = [(step, finite_or_nan(record[key])) for step, record in self.metrics.items() if key in record]
        return [step for step, _ in logged], [value for _, value in logged]


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
    """The shortest ends of the runs' paths that differ; a run given twice is numbered."""
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
