"""One run over training, read once, and the model that it began with: a birth, a pretrained one, or an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from ..files import finite_or_nan
from ..measure.records import MetricsLog, RunDir, Snapshot


@dataclass(frozen=True)
class Start:
    """Words for the model of step 0."""

    is_birth: bool
    """True if a seed drew it."""
    noun: str
    """The model itself."""
    label: str
    """Label in a word, for tables."""
    at: str
    """Words for the time of its measurement."""
    whose: str
    """Name the owner of the direction that the model began with."""

    def says(self, text: str) -> str:
        """Adapt ``text``, written for a birth, to this start."""
        if self.is_birth:
            return text
        return reduce(lambda found, pair: re.sub(pair[0], pair[1], found), _OF_NO_BIRTH, text)


#: Words of births, and those of a start that is none. The longer phrase comes first.
_OF_NO_BIRTH = (
    (r"\bbirths of the same config from other seeds\b", "models that other seeds draw from its config"),
    (r"\bthe newborn model\b", "the starting model"),
    (r"\bThe seed direction\b", "The starting direction"),
    (r"\bseed direction\b", "starting direction"),
    (r"\bSeed direction\b", "Starting direction"),
    (r"\bseed directions of other seeds\b", "directions of strangers"),
    (r"\bbirth's\b", "the start's"),
    (r"\b[Ii]ts own birth\b", "its own start"),
    (r"\bown birth\b", "own start"),
    (r"\bother births\b", "strangers"),
    (r"\bAt birth\b", "At the start"),
    (r"\b(?<!the )birth\b", "the start"),
)

BIRTH = Start(True, "birth", "birth", "at birth", "The seed's")
PRETRAINED = Start(False, "the model it started from", "start", "at the start", "The starting model's")
UNKNOWN = Start(False, "the start", "start", "at the start", "The starting model's")


def start_of(birth: Mapping[str, Any]) -> Start:
    """Return the start of a training from its certificate, which is empty if there is none."""
    return PRETRAINED if birth.get("init_from") else BIRTH if birth else UNKNOWN


def start_of_all(starts: Iterable[Start]) -> Start:
    """Return the words for several trainings together: those of a birth if one of them began with one."""
    found = list(starts)
    return next((start for start in found if start.is_birth), found[0] if found else BIRTH)


# ---------------------------------------------------------------- history of one run over training, read once


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
    metrics: MetricsLog
    snapshots: list[Snapshot]
    rows: list[dict[str, Any]]

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, name: str = "") -> RunHistory:
        """Build the history of a run from a single snapshot."""
        return cls(0, name, RunDir(Path()), _birth_of(snapshot.summary), "", MetricsLog(), [snapshot], [])

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
        logged = self.metrics.series(key)
        return list(logged), [finite_or_nan(value) for value in logged.values()]


def _birth_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Read a snapshot's facts about its model's start, in the form of a certificate; empty without any."""
    found = {name: value for name, value in summary.items() if name in ("init_from", "init_seed")}
    if found:
        return found
    # A model that a command loads is compared with nothing but its birth.
    is_compared = "source" in summary and "alignment" in summary["bias"]
    return {"source": summary["source"]} if is_compared else {}
