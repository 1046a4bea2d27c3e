"""The table of snapshots: its columns, from the declarations of the quantities; on the terminal, below the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from ..findings.numbers import in_ascii
from ..measure.records import RunDir
from ..metrics.quantities import LOGGED, MEASURED, over_training
from ..metrics.quantity import Quantity
from .run_history import RunHistory, declared_quantities, read_runs, row_key
from .terminal import Heading, print_left_out, table_width
from .terminal import print_table as print_cells
from .text import format_value
from .verdicts import printed, verdicts

_LINEAGE = ("seedprint_z", "seedprint_log10_p")
_LOSSES = ("val_loss", "train_loss")  # the terminal shows the first of them that was logged


@dataclass(frozen=True)
class Column:
    """A column of the table: a scalar by its name in a row, and the scalar of its control beside it."""

    key: str
    """Name of the scalar in a row."""
    title: str
    """Heading."""
    spec: str
    """Format of its numbers: a format specification, ``percent`` or ``ratio``."""
    control: str = ""
    """Name of the control that stands in brackets behind it."""
    control_title: str = ""
    """Title of the control."""
    gives_way: int = 0
    """Order in which columns give way where a terminal is narrow, from 1; 0: never."""
    page_only: bool = False
    """The terminal never shows it."""

    def cell(self, row: Mapping[str, Any]) -> str:
        """Format the value in ``row``, without its control."""
        return format_value(row.get(self.key), self.spec)

    def control_cell(self, row: Mapping[str, Any]) -> str:
        """Format the control in ``row``; empty if the column has none."""
        return format_value(row.get(self.control), self.spec) if self.control else ""


_STEP = Column("step", "step", ",d")


def _column(quantity: Quantity, known: Mapping[str, Quantity]) -> Column:
    shown = quantity.over_training
    assert shown is not None
    measured = isinstance(quantity.control, str) and quantity.control in known
    return Column(
        row_key(quantity.name),
        " ".join(quantity.heading(shown).split("\n")),
        quantity.format,
        row_key(str(quantity.control)) if measured else "",
        quantity.control_label if measured else "",
        shown.gives_way,
        shown.page_only,
    )


def columns_of(quantities: Mapping[str, Quantity]) -> list[Column]:
    """Return all columns in the order of the page: losses, then scalars, on the text probe before the random one."""
    known = {**LOGGED, **quantities}
    columns = [_STEP]
    for quantity, _ in over_training(known.values()):
        # On text first: that is the number to read, where there is one.
        if (on_text := _on_text(quantity)) is not None:
            columns.append(on_text)
        columns.append(_column(quantity, known))
    return columns


def _on_text(quantity: Quantity) -> Column | None:
    """Return the column of a quantity on the text probe, or None if it has none."""
    shown = quantity.over_training
    if shown is None or not shown.text_heading:
        return None
    return Column(f"text_{quantity.name}", shown.text_heading, quantity.format)


def table_columns(rows: Sequence[Mapping[str, Any]], quantities: Mapping[str, Quantity] = MEASURED) -> list[Column]:
    """Return the columns that have a value in at least one of ``rows``."""
    return [column for column in columns_of(quantities) if any(row.get(column.key) is not None for row in rows)]


def print_table(run: RunDir, console: Console, history: RunHistory | None = None) -> None:
    """Print the verdicts on a run, and its rows below; on a narrow console controls give way, then whole columns.

    A run whose ``history`` was read already is not read again.
    """
    if history is None:
        (history,) = read_runs([run])
    rows = history.rows
    if not rows:
        console.print(Text(f"{run.path}: no snapshots yet"))
        return
    found = [verdict for verdict in verdicts(history) if verdict.headline]
    console.print(printed(found, ascii_only=console.options.ascii_only))
    console.print()
    full = _terminal_columns(rows, declared_quantities(history.snapshots))
    kept, table = full, _table(rows, full, console, controls=True)
    left_out: list[str] = []
    for least in (1, 2, 3):
        if table_width(*table) < console.width:
            break
        left_out = ["controls"] if any(column.control for column in full) else []
        kept = [column for column in full if not 0 < column.gives_way < least]
        table = _table(rows, kept, console, controls=False)
    print_cells(console, *table, n_leading=1)
    left_out += [column.title for column in full if column not in kept]
    print_left_out(console, left_out, "--json prints every column")


def _terminal_columns(rows: Sequence[Mapping[str, Any]], quantities: Mapping[str, Quantity]) -> list[Column]:
    """Order the columns for the terminal: step and loss, lineage test and snapshots, then other losses."""
    measured = {column.key: column for column in table_columns(rows, quantities) if not column.page_only}
    losses = [column for key in _LOSSES if (column := measured.pop(key, None)) is not None]
    first = [measured.pop(_STEP.key), *(replace(loss, gives_way=0) for loss in losses[:1])]
    found = {key for key in measured if key.removeprefix("text_") in quantities or key in _LINEAGE}
    scalars = [column for key, column in measured.items() if key in found]
    return [*first, *scalars, *(column for key, column in measured.items() if key not in found)]


def _table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], console: Console, *, controls: bool
) -> tuple[list[Heading], list[list[Text]]]:
    """Build headings and cells of some columns."""
    headings = []
    for column in columns:
        first, _, second = column.title.rpartition(" ")
        title = f"{first}\n{second}" if first else second
        if controls and column.control:
            title = f"{column.title}\n({column.control_title})"
        headings.append(Heading(title))
    found = []
    for row in rows:
        cells = []
        for column in columns:
            text = Text(column.cell(row))
            if controls and column.control:
                text.append(f" ({column.control_cell(row)})", style="dim")
            if console.options.ascii_only:
                text = Text(in_ascii(text.plain))
            cells.append(text)
        found.append(cells)
    return headings, found
