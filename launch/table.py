"""One row per snapshot, joined with the losses of its step: what the terminal, the JSON and the page all show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..callbacks.records import RunDir, Snapshot, read_metrics
from ..errors import RunError

MISSING = "–"

# Losses of metrics.jsonl that stand in a row, under the names of the row.
_LOSSES = {
    "val_loss": "val/loss",
    "train_loss": "train/loss",
    "val_bits_per_byte": "val/bits_per_byte",
    "val_loss_trigger": "val/loss_trigger",
}

# Dimensions of the arrays that reports draw (docs/run-directory.md): a picture of an array of another shape would
# either crash far from the file that is to blame or, worse, show something.
_N_DIMENSIONS = {
    **dict.fromkeys(("mean_prob", "argmax_share", "alignment", "drift", "energy_share", "effective_rank"), 1),
    **dict.fromkeys(("inter_mlp", "intra_mlp", "inter_attention", "intra_attention", "sink_epsilons"), 1),
    **dict.fromkeys(("variance_discrepancy", "variance_discrepancy_out", "super_neurons"), 1),
    **dict.fromkeys(("sink_mass", "sink_mass_normalised", "sink_rate", "sink_position", "qk_cosine", "qk_positive"), 2),
    **dict.fromkeys(("alignment_stranger", "activation_first", "activation_others", "neuron_index", "neuron_z"), 2),
    **dict.fromkeys(("dominance", "massive_value", "massive_position", "massive_channel", "singular_values"), 2),
    **dict.fromkeys(("importance", "positional_variance", "n_eff", "sink_rate_grid"), 3),
}


@dataclass(frozen=True)
class Column:
    """A column of the table: a scalar by its name in a row, and the scalar of its control beside it."""

    key: str
    """Name of the scalar in a row."""
    title: str
    """Heading."""
    spec: str
    """How it is printed: a format specification, ``percent`` or ``ratio``."""
    control: str = ""
    """Name of the control that stands in brackets behind it."""
    control_title: str = ""
    """What the control is."""
    extra: bool = False
    """Only some runs measure it: the terminal's short table has it, too, where it was."""

    def cell(self, row: Mapping[str, Any]) -> str:
        """The value of ``row``, without its control."""
        return format_value(row.get(self.key), self.spec)

    def control_cell(self, row: Mapping[str, Any]) -> str:
        """The control of ``row``; empty if the column has none."""
        return format_value(row.get(self.control), self.spec) if self.control else ""


COLUMNS = (
    Column("step", "step", ",d"),
    Column("val_loss", "val loss", ".3f"),
    Column("train_loss", "train loss", ".3f"),
    Column("val_loss_trigger", "trigger loss", ".3f", extra=True),
    Column("alignment", "alignment", ".3f", "alignment_stranger", "stranger"),
    Column("drift", "drift", ".3f"),
    Column("preference_ratio", "preference ratio", "ratio"),
    Column("top1_share", "top-1 share", "percent"),
    Column("rank_persistence", "rank persistence", ".3f", "rank_persistence_stranger", "stranger"),
    Column("kendall_tau", "Kendall τ", ".3f"),
    Column("overlap_100", "overlap@100", ".2f"),
    Column("sink_mass", "sink mass", ".3f", "sink_uniform", "uniform"),
    Column("sink_rate", "sink rate %", ".1f"),
    Column("text_sink_mass", "sink mass on text", ".3f", extra=True),
)


def shown_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that ``rows`` have something for."""
    return [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows)]


_BY_KEY = {column.key: column for column in COLUMNS}


def format_value(value: float | None, spec: str) -> str:
    """A number as the table prints it; "–" where there is none or where it is not a number."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if spec == "percent":
        return f"{100 * value:.1f} %"
    if spec == "ratio":
        decimals = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
        return f"{value:,.{decimals}f}"
    # A small negative number rounds to -0.000, which says nothing that 0.000 does not.
    return re.sub(r"^-(0\.?0*)$", r"\1", format(int(value) if spec.endswith("d") else value, spec))


def check_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Refuse scalars that are no numbers and arrays of another shape than they should have.

    Raises:
        RunError: the file and the name.
    """
    for name, value in snapshot.bias.items():
        if value is not None and not isinstance(value, (int, float)):
            raise RunError(f"{folder / 'summary.json'}: damaged (bias.{name} is {value!r}, not a number)")
    for name, array in snapshot.arrays.items():
        wanted = _N_DIMENSIONS.get(name.rpartition(".")[2], array.ndim)
        if array.ndim != wanted:
            file = folder / "arrays.safetensors"
            raise RunError(f"{file}: damaged ({name} has {array.ndim} dimensions instead of {wanted})")


def read_snapshots(run: RunDir) -> list[Snapshot]:
    """All snapshots of ``run``, birth first; RunError names the file that is damaged or holds something else."""
    snapshots = run.snapshots()
    for folder, snapshot in zip(run.snapshot_folders(), snapshots, strict=True):
        check_snapshot(snapshot, folder)
    return snapshots


def metrics_by_step(run: RunDir) -> dict[int, dict[str, float]]:
    """The lines of ``metrics.jsonl`` by step, in step order; where a step is told twice, the later line holds."""
    merged: dict[int, dict[str, float]] = {}
    for number, record in enumerate(read_metrics(run.metrics), start=1):
        if not isinstance(record, dict) or "step" not in record:
            raise RunError(f"{run.metrics}: line {number} has no step; remove it to go on")
        merged.setdefault(int(record["step"]), {}).update(record)
    return dict(sorted(merged.items()))


def join_rows(snapshots: Iterable[Snapshot], metrics: Mapping[int, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Rows of snapshots that were read already; see `snapshot_rows`."""
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
        row |= {name: metrics.get(step, {}).get(key) for name, key in _LOSSES.items()}
        row |= snapshot.bias if snapshot else {}
        text = snapshot.summary.get("bias_text", {}) if snapshot else {}
        row |= {f"text_{name}": value for name, value in text.items()}
        rows.append(row)
    return rows


def snapshot_rows(run: RunDir) -> list[dict[str, Any]]:
    """One row per snapshot of ``run``, in step order.

    A row holds ``step``, ``label`` (``birth``, ``step``, ``end``), ``tokens``, the losses of metrics.jsonl at exactly
    that step (``val_loss``, ``train_loss``, ``val_bits_per_byte``, ``val_loss_trigger``; None where that step has
    none) and every scalar of the snapshot under its own name, those of the text probe with ``text_`` before it.
    If training went on after the last snapshot, a last row tells the losses of the end.
    """
    return join_rows(read_snapshots(run), metrics_by_step(run))


def print_table(run: RunDir, console: Console) -> None:
    """Print the rows of ``run``; controls, then whole columns give way where the console is narrow."""
    rows = snapshot_rows(run)
    if not rows:
        console.print(Text(f"{run.path}: no snapshots yet"))
        return
    loss = "val_loss" if any(row["val_loss"] is not None for row in rows) else "train_loss"
    full = ["step", loss, "alignment", "preference_ratio", "rank_persistence", "sink_mass"]
    measured = [column.key for column in shown_columns(rows) if column.extra]
    full += measured
    table = _table(rows, full, console, controls=True)
    for columns in (full, ["step", loss, "alignment", "sink_mass", *measured], ["step", loss]):
        if Measurement.get(console, console.options, table).maximum < console.width:
            break
        table = _table(rows, columns, console, controls=False)
    console.print(table)


def _table(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], console: Console, *, controls: bool) -> Table:
    """The rich table of some columns. It is measured unwrapped, so that the caller sees whether it fits."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in (_BY_KEY[key] for key in keys):
        first, _, second = column.title.rpartition(" ")
        title = f"{first}\n{second}" if first else second
        if controls and column.control:
            title = f"{column.title}\n({column.control_title})"
        table.add_column(title, justify="right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = []
        for column in (_BY_KEY[key] for key in keys):
            text = Text(column.cell(row))
            if controls and column.control:
                text.append(f" ({column.control_cell(row)})", style="dim")
            if console.options.ascii_only:
                text = Text(text.plain.replace(MISSING, "-").replace("∞", "inf"))
            cells.append(text)
        table.add_row(*cells)
    return table
