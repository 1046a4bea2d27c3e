"""One snapshot in a terminal or as JSON: a row for every block, then the scalars and the favourite tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ..files import strict
from ..measure.records import Snapshot
from ..metrics.quantities import by_block
from ..metrics.quantity import Column, Quantity
from .text import format_value


def layers(snapshot: Snapshot) -> list[dict[str, float]]:
    """Figures of the embeddings (layer 0) and of every block, means over heads; what a row has not is left out."""
    rows: list[dict[str, float]] = [{"layer": layer} for layer in range(snapshot.summary["n_layers"] + 1)]
    for quantity, column in by_block(snapshot.quantities.values()):
        if (array := snapshot.arrays.get(quantity.array)) is not None:
            values = quantity.blocks(array)
            # Arrays of the residual stream begin with the embeddings.
            for row, value in zip(rows[len(rows) - len(values) :], values, strict=True):
                row[column.key or quantity.name] = float(value)
    return rows


def _table(shown: Sequence[tuple[Quantity, Column]], rows: list[dict[str, float]], given_way: int) -> Table:
    """The table of blocks, without the columns that give way first."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("block", justify="right", no_wrap=True)
    kept = [(column.key or q.name, q, column) for q, column in shown if not 0 < column.gives_way <= given_way]
    kept = [(key, q, column) for key, q, column in kept if any(key in row for row in rows)]
    for _, quantity, column in kept:
        table.add_column(quantity.heading(column), justify="right", no_wrap=True)
    for row in rows:
        cells = [format_value(row.get(key), quantity.format) for key, quantity, _ in kept]
        table.add_row(str(int(row["layer"]) or "embed"), *cells)
    return table


def print_snapshot(snapshot: Snapshot, console: Console) -> None:
    """Print a snapshot; columns give way where the terminal is narrow."""
    probe, rows = snapshot.summary["probe"], layers(snapshot)
    shown = by_block(snapshot.quantities.values())
    for given_way in sorted({0, *(column.gives_way for _, column in shown)}):
        table = _table(shown, rows, given_way)
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width:
            break
    console.print(table)
    console.print()
    grid = Table.grid(padding=(0, 2))
    scalars = [(name, f"{value:.4g}") for name, value in snapshot.bias.items()]
    columns = 3 if console.width >= 110 else 2 if console.width >= 70 else 1
    for start in range(0, len(scalars), columns):
        grid.add_row(*(part for pair in scalars[start : start + columns] for part in pair))
    console.print(grid)
    tokens = "  ".join(token["text"] for token in snapshot.summary["top_tokens"][:10])
    console.print(f"\nfavourite tokens: {tokens}", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{probe['n_sequences']} sequences of {probe['seq_len']} random tokens, {probe['dtype']}, "
        f"{snapshot.summary['seconds']:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def figures(snapshot: Snapshot) -> dict[str, object]:
    """Everything that --json prints of a snapshot."""
    summary = {name: value for name, value in snapshot.summary.items() if name != "bias"}
    return strict(summary | {"scalars": snapshot.bias, "layers": layers(snapshot)})
