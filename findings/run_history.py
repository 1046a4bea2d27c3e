"""One run over training, read once, and the model that it began with: a birth, a pretrained one, or an unknown one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..files import finite_or_nan, read_text
from ..measure.metrics_log import MetricsLog, metrics_by_step
from ..measure.records import RunDir, Snapshot
from ..messages import printable
from ..metrics.quantities import MEASURED, shown_name
from ..metrics.quantity import Quantity


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

    def step_in_words(self, step: int) -> str:
        """Name a snapshot's step in words; "" for a negative one, which means unknown."""
        return self.at if step == 0 else f"step {step:,}" if step > 0 else ""


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
    not_measured: dict[int, str] = field(default_factory=dict)
    """Reasons why steps have no snapshot."""

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

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the frequencies of its corpus's tokens, in nats; NaN if unknown."""
        return unigram_entropy(self.birth.get("data") or {})

    def shown_scalar(self, name: str, group: str = "bias") -> str:
        """Return the scalar that a person reads for ``name`` (`shown_name`), as the newest snapshot has it."""
        newest = self.last or self.first
        return shown_name(name, (newest.summary.get(group) or {}) if newest else ())

    def shown_array(self, name: str, prefix: str = "") -> str:
        """Return the same of an array of the probe with this prefix, without the prefix."""
        newest = self.last or self.first
        return shown_name(name, newest.arrays if newest else (), prefix).removeprefix(prefix)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of a metrics.jsonl key, at the steps with it; values that are not numbers are NaN."""
        logged = self.metrics.series(key)
        return list(logged), [finite_or_nan(value) for value in logged.values()]

    def measured(self, key: str, group: str = "bias") -> tuple[list[int], list[float]]:
        """Return steps and values of a scalar, at the dated snapshots with it; values that are not numbers are NaN."""
        held = [(s.step, scalars[key]) for s in self.dated if key in (scalars := s.summary.get(group) or {})]
        return [step for step, _ in held], [finite_or_nan(value) for _, value in held]


def unigram_entropy(data: Mapping[str, Any]) -> float:
    """Return the loss of knowing token frequencies alone, from a certificate's record of the data; NaN if unknown.

    The validation loss of a mixture is the mean over its sources in their shares, and so is this.
    """
    if sources := data.get("sources"):
        return sum(source["share"] * finite_or_nan(source.get("unigram_entropy")) for source in sources.values())
    return finite_or_nan(data.get("unigram_entropy"))


def _birth_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Read a snapshot's facts about its model's start, in the form of a certificate; empty without any."""
    found = {name: value for name, value in summary.items() if name in ("init_from", "init_seed")}
    if found:
        return found
    # A model that a command loads is compared with nothing but its birth.
    is_compared = "source" in summary and "alignment" in summary["bias"]
    return {"source": summary["source"]} if is_compared else {}


def read_runs(runs: Sequence[RunDir]) -> list[RunHistory]:
    """Read every run; RunError names the file that is damaged."""
    if not runs:
        raise UsageError("a report needs at least one run")
    histories = []
    for index, (run, name) in enumerate(zip(runs, _names(runs), strict=True)):
        birth = {} if run.is_only_measured else run.read_birth()
        metrics, snapshots = metrics_by_step(run), run.snapshots()
        rows = join_rows(snapshots, metrics, start_of(birth))
        config = "" if run.is_only_measured else read_text(run.config)
        not_measured = run.read_not_measured()
        histories.append(RunHistory(index, name, run, birth, config, metrics, snapshots, rows, not_measured))
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


# ---------------------------------------------------------------- rows of snapshots

_LOSSES = ("val/loss", "train/loss", "val/bits_per_byte", "val/loss_trigger")  # in this order in a row
#: Where the lineage test was on.
_LINEAGE = (
    "seedprint/z",
    "seedprint/log10_p",
    "seedprint/z_stranger",
    "seedprint/weights",
    "seedprint/weights_stranger",
)


def row_key(name: str) -> str:
    """Return the name of a quantity in a row."""
    return name.replace("/", "_")


def declared_quantities(snapshots: Iterable[Snapshot]) -> dict[str, Quantity]:
    """Return every quantity that snapshots may hold, by name: built-in ones, and those that users' metrics declared in
    them.
    """
    found = dict(MEASURED)
    for snapshot in snapshots:
        found |= snapshot.quantities
    return found


def join_rows(
    snapshots: Iterable[Snapshot], metrics: Mapping[int, Mapping[str, float]], start: Start = BIRTH
) -> list[dict[str, Any]]:
    """Build one row per snapshot of a training from ``start``, in step order.

    A row holds ``step``, ``label`` (``birth``, ``step``, ``end``; ``start`` of a training from another model),
    ``tokens``, the losses of metrics.jsonl at exactly that step (``val_loss``, ``train_loss``, ``val_bits_per_byte``,
    ``val_loss_trigger``; None if that step has none), the figures of the lineage test if it was on (``seedprint_z`` and
    the like) and every scalar of the snapshot under its own name, those of the text probe with ``text_`` before it. If
    training went on after the last snapshot, a last row has the losses of the end.
    """
    by_step: dict[int, Snapshot | None] = {snapshot.step: snapshot for snapshot in snapshots}
    last = max([*by_step, *metrics], default=0)
    if metrics and last not in by_step:
        by_step[last] = None  # training went on after the last snapshot: its end has losses only
    rows = []
    for step in sorted(by_step):
        snapshot = by_step[step]
        row: dict[str, Any] = {
            "step": step,
            "label": start.label if step == 0 else "end" if step == last else "step",
            "tokens": snapshot.summary.get("tokens") if snapshot else metrics[step].get("train/tokens"),
        }
        row |= {row_key(name): metrics.get(step, {}).get(name) for name in _LOSSES}
        row |= {row_key(name): metrics[step][name] for name in _LINEAGE if name in metrics.get(step, {})}
        row |= snapshot.bias if snapshot else {}
        text = snapshot.summary.get("bias_text", {}) if snapshot else {}
        row |= {f"text_{name}": value for name, value in text.items()}
        rows.append(row)
    return rows


# ---------------------------------------------------------------- arrays of a snapshot by probe

PROBES = {"": "random", "text.": "text"}
"""Prefix of a probe's arrays → the probe's name."""

GROUPS = {"": "bias", "text.": "bias_text"}
"""Prefix of a probe's arrays → the group of its scalars in ``summary.json``."""


def measured_probes(snapshot: Snapshot) -> list[str]:
    """Return the prefixes of the probes on which a snapshot was measured."""
    return [
        prefix
        for prefix in PROBES
        if any(n.startswith(prefix) and "." not in n[len(prefix) :] for n in snapshot.arrays)
    ]


class _ArraysOfProbe(Mapping[str, np.ndarray]):
    """Arrays of one probe, each read when it is asked for."""

    def __init__(self, arrays: Mapping[str, np.ndarray], prefix: str) -> None:
        self._arrays, self._prefix = arrays, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self:
            raise KeyError(name)
        return self._arrays[self._prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and "." not in name and self._prefix + name in self._arrays

    def __iter__(self) -> Iterator[str]:
        names = (name.removeprefix(self._prefix) for name in self._arrays if name.startswith(self._prefix))
        return (name for name in names if "." not in name)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def arrays_of(snapshot: Snapshot, prefix: str) -> Mapping[str, np.ndarray]:
    """Return the arrays of one probe, without its prefix."""
    return _ArraysOfProbe(snapshot.arrays, prefix)


def of_probe(prefix: str, key: str, caption: str) -> tuple[str, str]:
    """Return key and caption for a picture that exists once per probe."""
    return (f"{key}-{PROBES[prefix]}", f"{caption.rstrip('.')}; {PROBES[prefix]} probe.") if prefix else (key, caption)
