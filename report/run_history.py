"""One run over training as pages show it: a row for each snapshot, with the losses of its step, and its arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..files import read_text
from ..findings.history import BIRTH, RunHistory, Start, start_of
from ..measure.records import RunDir, Snapshot, metrics_by_step
from ..metrics.quantities import MEASURED
from ..metrics.quantity import Quantity
from .text import printable

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


def arrays_of(snapshot: Snapshot, prefix: str) -> dict[str, np.ndarray]:
    """Return the arrays of one probe, without its prefix."""
    names = {name: name.removeprefix(prefix) for name in snapshot.arrays if name.startswith(prefix)}
    return {short: snapshot.arrays[name] for name, short in names.items() if "." not in short}


def of_probe(prefix: str, key: str, caption: str) -> tuple[str, str]:
    """Return key and caption for a picture that exists once per probe."""
    return (f"{key}-{PROBES[prefix]}", f"{caption.rstrip('.')}; {PROBES[prefix]} probe.") if prefix else (key, caption)


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
    """Build the rows of snapshots that were read already, of a training from ``start``; see `snapshot_rows`."""
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


def snapshot_rows(run: RunDir) -> list[dict[str, Any]]:
    """Read one row per snapshot of ``run``, in step order.

    A row holds ``step``, ``label`` (``birth``, ``step``, ``end``; ``start`` of a training from another model),
    ``tokens``, the losses of metrics.jsonl at exactly that step (``val_loss``, ``train_loss``, ``val_bits_per_byte``,
    ``val_loss_trigger``; None if that step has none), the figures of the lineage test if it was on (``seedprint_z`` and
    the like) and every scalar of the snapshot under its own name, those of the text probe with ``text_`` before it. If
    training went on after the last snapshot, a last row has the losses of the end.
    """
    birth = {} if run.is_only_measured else run.read_birth()
    return join_rows(run.snapshots(), metrics_by_step(run), start_of(birth))


# ---------------------------------------------------------------- runs

__all__ = ["RunHistory", "read_runs"]


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
