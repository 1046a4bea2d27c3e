"""Output of one snapshot in a terminal or as JSON: a row for every block, then the scalars and the favourite tokens."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from ..files import strict
from ..findings.formatting import format_value
from ..findings.run_history import PROBES, RunHistory
from ..measure.records import Snapshot
from ..messages import printable
from ..metrics.quantities import MEASURED, by_block, is_shown
from ..metrics.quantity import Column, Quantity
from ..models.exchange.gguf_header import kinds_in_words
from .table import Column as TableColumn
from .table import Table
from .terminal import say
from .verdicts import printed, snapshot_verdicts

_ON_TEXT_TOO = ("sink", "gradient")
"""Sections that also show figures of the text probe, beside those of random tokens."""


def layers(snapshot: Snapshot) -> list[dict[str, float]]:
    """Return the figures of the embeddings (layer 0) and of every block, means over heads; missing ones are left out.

    Figures of sinks on the text probe have the prefix ``text_``.
    """
    columns = {
        _key(quantity, column, prefix): quantity.blocks(snapshot.arrays[prefix + quantity.array])
        for quantity, column in by_block(snapshot.quantities.values())
        for prefix in (PROBES if quantity.section in _ON_TEXT_TOO else ("",))
        if prefix + quantity.array in snapshot.arrays
    }
    # Arrays of the residual stream begin with the embeddings: they are the longest.
    n_rows = max(map(len, columns.values()), default=0)
    rows: list[dict[str, float]] = [{"layer": layer} for layer in range(n_rows)]
    for key, values in columns.items():
        for row, value in zip(rows[n_rows - len(values) :], values, strict=True):
            row[key] = float(value)
    return rows


def _key(quantity: Quantity, column: Column, prefix: str) -> str:
    """Return the name of a quantity in a row, on the probe of a prefix."""
    return prefix.replace(".", "_") + (column.key or quantity.name)


def _table(snapshot: Snapshot) -> Table:
    """Build the table of blocks."""
    rows = layers(snapshot)
    columns, measured = [TableColumn("block")], {key for row in rows for key in row}
    for quantity, shown in by_block(snapshot.quantities.values()):
        for prefix in ("text.", ""):
            key, title = _key(quantity, shown, prefix), quantity.heading(shown) + ("\non text" if prefix else "")
            if key in measured and is_shown(key, measured):
                columns.append(TableColumn(title, format=quantity.format, key=key, gives_way=shown.gives_way))
    return Table.of(columns, [{"block": int(row["layer"]) or "embed", **row} for row in rows])


def print_snapshot(snapshot: Snapshot, console: Console) -> None:
    """Print a snapshot, below its sentences; a narrow terminal gets fewer columns."""
    found = snapshot_verdicts(RunHistory.of_snapshot(snapshot))
    console.print(printed(found, ascii_only=console.options.ascii_only))
    console.print()
    probe = snapshot.summary["probe"]
    _table(snapshot).print(console, all_columns="--json prints every column")
    console.print()
    for place in snapshot.summary.get("unseen", ()):
        say(console, f"not seen: {place}")
    for reason in snapshot.summary.get("not_measured", ()):
        say(console, f"not measured: {reason}")
    grid = Grid.grid(padding=(0, 2))
    scalars = [(name, format_value(value, ".4g")) for name, value in snapshot.bias.items()]
    text = snapshot.summary.get("bias_text", {})
    scalars += [
        (f"text {name}", format_value(value, ".4g"))
        for name, value in text.items()
        if name in MEASURED and MEASURED[name].section in _ON_TEXT_TOO
    ]
    columns = 3 if console.width >= 110 else 2 if console.width >= 70 else 1
    for start in range(0, len(scalars), columns):
        grid.add_row(*(Text(printable(part)) for pair in scalars[start : start + columns] for part in pair))
    console.print(grid)
    tokens = "  ".join(token["text"] for token in snapshot.summary["top_tokens"][:10])
    say(console, f"\nfavourite tokens: {tokens}")
    drawn = f" from {probe['n_tokens']:,}" if "n_tokens" in probe else ""
    on_text = f", {snapshot.summary.get('probe_text', probe)['n_sequences']} of text" if text else ""
    if stored := snapshot.summary.get("stored_kinds"):
        say(console, f"weights stored as {kinds_in_words(stored)}")
    say(
        console,
        f"{probe['n_sequences']} sequences of {probe['seq_len']} random tokens{drawn}{on_text}, {probe['dtype']}, "
        f"{snapshot.summary['seconds']:.1f} s",
    )


def figures(snapshot: Snapshot) -> dict[str, object]:
    """Return everything that --json prints of a snapshot."""
    summary = {name: value for name, value in snapshot.summary.items() if name != "bias"}
    return strict(summary | {"scalars": snapshot.bias, "layers": layers(snapshot)})
