"""The table of snapshots: its columns, and how the terminal prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..measure.records import RunDir
from .rows import snapshot_rows
from .text import MISSING, format_value


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
