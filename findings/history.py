"""History of one run over training, read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import finite_or_nan
from ..measure.records import RunDir, Snapshot
from .start import Start, start_of


@dataclass(frozen=True)
class RunHistory:
    """All data of one run for sentences and pictures, read once."""

    index: int
    """Place among the runs of a page: decides the colour."""
    name: str
    folder: RunDir
    birth: dict[str, Any]
    """The certificate; empty where only snapshots were taken here."""
    config: str
    """YAML; empty there."""
    metrics: dict[int, dict[str, float]]
    snapshots: list[Snapshot]
    rows: list[dict[str, Any]]

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, name: str = "") -> RunHistory:
        """Build the history of a run from a single snapshot."""
        return cls(0, name, RunDir(Path()), _birth_of(snapshot.summary), "", {}, [snapshot], [])

    @property
    def start(self) -> Start:
        """Model of step 0, in words."""
        return start_of(self.birth)

    @property
    def first(self) -> Snapshot | None:
        """The snapshot at birth."""
        return next((snapshot for snapshot in self.snapshots if snapshot.step == 0), None)

    @property
    def last(self) -> Snapshot | None:
        """The latest snapshot after birth; the one of an unknown step, if there is no other."""
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
        """Return steps and values of a metrics.jsonl key, at the steps with it; values that are not numbers are NaN."""
        logged = [(step, finite_or_nan(record[key])) for step, record in self.metrics.items() if key in record]
        return [step for step, _ in logged], [value for _, value in logged]


def _birth_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Read a snapshot's facts about its model's start, in the form of a certificate; empty without any."""
    found = {name: value for name, value in summary.items() if name in ("init_from", "init_seed")}
    if found:
        return found
    # A model that a command loads is compared with nothing but its birth.
    is_compared = "source" in summary and "alignment" in summary["bias"]
    return {"source": summary["source"]} if is_compared else {}
