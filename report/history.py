"""What a report tells about one run, read once and checked, before anything is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import RunError, UsageError
from ..files import read_json
from ..measure.records import RunDir, Snapshot
from ..metrics.rankings import places
from .rows import join_rows, metrics_by_step, read_snapshots


@dataclass(frozen=True)
class Story:
    """Everything a page says about one run, read once."""

    index: int
    """Place among the runs of the page: decides the colour."""
    name: str
    run: RunDir
    birth: dict[str, Any]
    """The certificate; empty where the snapshots are of somebody else's training."""
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
        told = [(step, number(record[key])) for step, record in self.metrics.items() if key in record]
        return [step for step, _ in told], [value for _, value in told]


def read_stories(runs: Sequence[RunDir]) -> list[Story]:
    """Read every run; RunError names the file that is damaged."""
    if not runs:
        raise UsageError("a report needs at least one run")
    stories = []
    for index, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
        birth = {} if run.is_foreign else read_json(run.birth)
        if not isinstance(birth, dict):
            raise RunError(f"{run.birth}: damaged (not an object)")
        metrics, snapshots = metrics_by_step(run), read_snapshots(run)
        rows = join_rows(snapshots, metrics)
        config = "" if run.is_foreign else run.config.read_text(encoding="utf-8", errors="backslashreplace")
        stories.append(Story(index, name, run, birth, config, metrics, snapshots, rows))
    return stories


def when(snapshot: Snapshot) -> str:
    """A snapshot's step in words."""
    return "at birth" if snapshot.step == 0 else f"step {snapshot.step:,}" if snapshot.step > 0 else "step unknown"


#: Prefix of a probe's arrays → the probe's name.
PROBES = {"": "random", "text.": "text"}


def of_probe(prefix: str, key: str, caption: str) -> tuple[str, str]:
    """Key and caption of a picture that every probe has one of."""
    return (f"{key}-{PROBES[prefix]}", f"{caption.rstrip('.')}; {PROBES[prefix]} probe.") if prefix else (key, caption)


def probes(snapshot: Snapshot) -> list[str]:
    """Prefixes of the probes that a snapshot was measured on."""
    return [
        prefix
        for prefix in PROBES
        if any(n.startswith(prefix) and "." not in n[len(prefix) :] for n in snapshot.arrays)
    ]


def arrays_of(snapshot: Snapshot, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of one probe, without its prefix."""
    names = {name: name.removeprefix(prefix) for name in snapshot.arrays if name.startswith(prefix)}
    return {short: snapshot.arrays[name] for name, short in names.items() if "." not in short}


def _names(runs: Sequence[RunDir]) -> list[str]:
    """The shortest ends of the runs' paths that tell them apart; a run given twice is numbered."""
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


def number(value: Any) -> float:
    """A logged value as a finite float, or NaN."""
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if finite else math.nan


def printable(text: Any) -> str:
    """Text with everything that does not print written out: token texts and file names may hold anything."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


def ranks(mean_prob: np.ndarray) -> np.ndarray:
    """Rank of every token in p̄, from 1; NaN everywhere if p̄ is not finite."""
    if not np.isfinite(mean_prob).all():
        return np.full(len(mean_prob), np.nan)
    return places(mean_prob) + 1.0
