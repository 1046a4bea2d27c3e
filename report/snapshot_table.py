"""The table of snapshots: its columns, from the declarations of the quantities; on the terminal, below the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup
from rich.console import Console

from ..findings.formatting import format_value, in_prose
from ..findings.run_history import RunHistory, declared_quantities, read_runs, row_key
from ..measure.records import RunDir
from ..metrics.quantities import LOGGED, MEASURED, is_shown, over_training
from ..metrics.quantity import Quantity
from .pictures.panels import evenly_spaced
from .table import Cell, Column, Table, broken
from .terminal import say
from .verdicts import printed, verdicts

_LINEAGE = ("seedprint_z", "seedprint_log10_p")
#: Rows that the terminal shows at most, and runs whose tables it shows.
_MOST_ROWS, _MOST_TABLES = 30, 6
_LOSSES = ("val_loss", "train_loss")  # the terminal shows the first of them that was logged


@dataclass(frozen=True)
class ScalarColumn(Column):
    """A column of a scalar, and of its control in brackets behind it."""

    control: str = ""
    """Name of the control in a row."""
    page_only: bool = False
    """True if the terminal never shows it."""


_STEP = ScalarColumn("step", format=",d")


def _column(quantity: Quantity, known: Mapping[str, Quantity]) -> ScalarColumn:
    shown = quantity.over_training
    assert shown is not None
    control = quantity.control if isinstance(quantity.control, str) and quantity.control in known else ""
    return ScalarColumn(
        broken(quantity.heading(shown)),
        format=quantity.format,
        key=row_key(quantity.name),
        gives_way=shown.gives_way,
        beside=quantity.control_label if control else "",
        control=row_key(control),
        page_only=shown.page_only,
    )


def columns_of(quantities: Mapping[str, Quantity]) -> list[ScalarColumn]:
    """Return all columns in the order of the page: losses, then scalars, on the text probe before the random one."""
    known = {**LOGGED, **quantities}
    columns = [_STEP]
    for quantity, _ in over_training(known.values()):
        # On text first: that is the number to read, where there is one.
        if (on_text := _on_text(quantity)) is not None:
            columns.append(on_text)
        columns.append(_column(quantity, known))
    return columns


def _on_text(quantity: Quantity) -> ScalarColumn | None:
    """Return the column of a quantity on the text probe, or None if it has none."""
    shown = quantity.over_training
    if shown is None or not shown.text_heading:
        return None
    return ScalarColumn(broken(shown.text_heading), format=quantity.format, key=f"text_{quantity.name}")


def table_columns(
    rows: Sequence[Mapping[str, Any]], quantities: Mapping[str, Quantity] = MEASURED
) -> list[ScalarColumn]:
    """Return the columns that have a value in at least one of ``rows``."""
    return [column for column in columns_of(quantities) if any(row.get(column.key) is not None for row in rows)]


def table_of_snapshots(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[ScalarColumn], *, labelled: bool = False
) -> Table:
    """Build the table of a run's rows, for a page with their labels; a step below 0 is unknown."""

    def cell(row: Mapping[str, Any], column: ScalarColumn) -> Cell:
        value = row.get(column.key)
        if column is _STEP and row[_STEP.key] < 0:
            value = "unknown"
        elif column is _STEP and labelled and row["label"] != "step":
            value = Markup('<span class="kind">{}</span>{}').format(row["label"], format_value(value, column.format))
        return Cell(value, format_value(row.get(column.control), column.format) if column.control else "")

    return Table(columns, [[cell(row, column) for column in columns] for row in rows])


def tables_of_runs(runs: Sequence[RunHistory], quantities: Mapping[str, Quantity]) -> list[Table]:
    """Build the tables of the runs of a page, with the same columns."""
    columns = table_columns([row for run in runs for row in run.rows], quantities)
    return [table_of_snapshots(run.rows, columns, labelled=True) for run in runs]


def print_table(run: RunDir, console: Console, history: RunHistory | None = None) -> None:
    """Print the verdicts on a run, and its rows below; on a narrow console controls give way, then whole columns.

    A run whose ``history`` was read already is not read again.
    """
    if history is None:
        (history,) = read_runs([run])
    rows = history.rows
    if not rows:
        say(console, f"{run.path}: no snapshots yet")
        return
    found = [verdict for verdict in verdicts(history) if verdict.headline]
    console.print(printed(found, ascii_only=console.options.ascii_only))
    console.print()
    columns = _terminal_columns(rows, declared_quantities(history.snapshots))
    shown = [rows[i] for i in evenly_spaced(len(rows), _MOST_ROWS)]
    table_of_snapshots(shown, columns).print(console, all_columns="--json prints every column")
    if len(shown) < len(rows):
        say(console, f"{len(shown)} of {len(rows):,} steps: --json prints all", wrapped=True)


def print_runs(histories: Sequence[RunHistory], console: Console) -> None:
    """Print the verdicts and the rows of each run; of more than six runs a line each."""
    for history in histories:
        if len(histories) > _MOST_TABLES:
            say(console, _in_a_line(history))
            continue
        if len(histories) > 1:
            say(console, f"{history.folder.path}", style="bold")
        print_table(history.folder, console, history)
    if len(histories) > _MOST_TABLES:
        say(console, "a line for each run: --json prints all", wrapped=True)


def _in_a_line(history: RunHistory) -> str:
    """Say how far a run is, with its newest loss."""
    if not history.rows:
        return f"{history.folder.path}: no snapshots yet"
    n, step = len(history.snapshots), history.rows[-1]["step"]
    said = f"{history.folder.path}: {n:,} snapshot{'s' * (n != 1)}, step {step:,}"
    for name in ("val/loss", "train/loss"):
        steps, values = history.series(name)
        if steps:
            at = f" at step {steps[-1]:,}" if steps[-1] != step else ""
            return f"{said}, {name.replace('/', ' ')} {in_prose(values[-1])}{at}"
    return said


def _terminal_columns(rows: Sequence[Mapping[str, Any]], quantities: Mapping[str, Quantity]) -> list[ScalarColumn]:
    """Order the columns for the terminal: step and loss, lineage test and snapshots, then other losses."""
    measured = {column.key: column for column in table_columns(rows, quantities) if not column.page_only}
    measured = {key: column for key, column in measured.items() if is_shown(key, measured)}
    losses = [column for key in _LOSSES if (column := measured.pop(key, None)) is not None]
    first = [measured.pop(_STEP.key), *(replace(loss, gives_way=0) for loss in losses[:1])]
    found = {key for key in measured if key.removeprefix("text_") in quantities or key in _LINEAGE}
    scalars = [column for key, column in measured.items() if key in found]
    return [*first, *scalars, *(column for key, column in measured.items() if key not in found)]
