"""One snapshot in a terminal or as JSON: a row for every block, then the scalars and the favourite tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ..files import strict
from ..measure.records import Snapshot
from .text import format_value

#: Columns of the table of blocks: name in JSON, heading, from the arrays, format. Those of L + 1 rows begin with the
#: embeddings.
_COLUMNS: Sequence[tuple[str, str, Callable[[dict[str, np.ndarray]], np.ndarray], str]] = (
    ("inter", "inter", lambda a: a["inter_mlp"], ".3f"),
    ("intra", "intra", lambda a: a["intra_mlp"], ".3f"),
    ("alignment", "align-\nment", lambda a: a["alignment"], ".3f"),
    ("sink_mass", "sink\nmass", lambda a: a["sink_mass"].mean(1), ".3f"),
    ("sink_mass_max", "most in\na head", lambda a: a["sink_mass"].max(1), ".3f"),
    ("sink_rate", "sink\nrate %", lambda a: a["sink_rate"].mean(1), ".1f"),
    ("n_eff", "n_eff\nat T", lambda a: a["n_eff"][..., -1].mean(1), "ratio"),
    ("variance_discrepancy", "variance\ndiscr.", lambda a: a["variance_discrepancy"], "ratio"),
    ("super_neurons", "super\nneurons", lambda a: a["super_neurons"], ",d"),
    ("dominance_first", "domi-\nnance", lambda a: a["dominance"][:, 0], "ratio"),
    ("massive", "largest\n|h|", lambda a: a["massive_value"][:, 0], "ratio"),
    ("effective_rank", "eff.\nrank", lambda a: a["effective_rank"], "ratio"),
    ("qk_cosine", "QK\nlock", lambda a: a["qk_cosine"].mean(1), ".3f"),
)


def layers(snapshot: Snapshot) -> list[dict[str, float]]:
    """Figures of the embeddings (layer 0) and of every block, means over heads; what a row has not is left out."""
    rows: list[dict[str, float]] = [{"layer": layer} for layer in range(snapshot.summary["n_layers"] + 1)]
    for name, _, values_of, _ in _COLUMNS:
        if name == "alignment" and name not in snapshot.arrays:
            continue
        values = values_of(snapshot.arrays)
        for row, value in zip(rows[len(rows) - len(values) :], values, strict=True):
            row[name] = float(value)
    return rows


#: Columns that give way where the terminal is narrow, first to last.
_GIVE_WAY = ("sink_mass_max", "variance_discrepancy", "qk_cosine", "dominance_first", "effective_rank", "sink_rate")


def _table(rows: list[dict[str, float]], left_out: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("block", justify="right", no_wrap=True)
    shown = [column for column in _COLUMNS if column[0] not in left_out and any(column[0] in row for row in rows)]
    for _, title, _, _ in shown:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        cells = [format_value(row.get(name), spec) for name, _, _, spec in shown]
        table.add_row(str(int(row["layer"]) or "embed"), *cells)
    return table


def print_snapshot(snapshot: Snapshot, console: Console) -> None:
    """Print a snapshot; columns give way where the terminal is narrow."""
    probe, rows = snapshot.summary["probe"], layers(snapshot)
    for n in range(len(_GIVE_WAY) + 1):
        table = _table(rows, _GIVE_WAY[:n])
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
