"""Rows of snapshots, one each, joined with the losses of their step, read and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..measure.records import RunDir, Snapshot, metrics_by_step
from ..metrics.quantities import MEASURED
from ..metrics.quantity import Quantity

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


def join_rows(snapshots: Iterable[Snapshot], metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Build the rows of snapshots that were read already; see `snapshot_rows`."""
    by_step: dict[int, Snapshot | None] = {snapshot.step: snapshot for snapshot in snapshots}
    last = max([*by_step, *metrics], default=0)
    if metrics and last not in by_step:
        by_step[last] = None  # training went on after the last snapshot: its end has losses only
    rows = []
    for step in sorted(by_step):
        snapshot = by_step[step]
        row: dict[str, Any] = {
            "step": step,
            "label": "birth" if step == 0 else "end" if step == last else "step",
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

    A row holds ``step``, ``label`` (``birth``, ``step``, ``end``), ``tokens``, the losses of metrics.jsonl at exactly
    that step (``val_loss``, ``train_loss``, ``val_bits_per_byte``, ``val_loss_trigger``; None if that step has none),
    the figures of the lineage test if it was on (``seedprint_z`` and the like) and
    every scalar of the snapshot under its own name, those of the text probe with ``text_`` before it. If training went
    on after the last snapshot, a last row has the losses of the end.
    """
    return join_rows(run.snapshots(), metrics_by_step(run))
