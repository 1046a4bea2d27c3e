"""Form of a snapshot for loggers with pictures: scalars in groups, curves of blocks, tables, a map of the heads."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..measure.records import Snapshot
from ..metrics.quantities import by_block
from ..metrics.quantity import AXES
from ..report.probe_arrays import PROBES, arrays_of, measured_probes

#: Resolution of pictures: 1,000 pixels across.
_DPI = 200
#: Ends of the colour scale: the first that no head exceeds, so that a model without a sink is not all dark.
_TOPS = (0.1, 0.2, 0.5, 1.0)

TOKEN_COLUMNS = ("step", "rank", "id", "text", "p", "argmax_share", "rank_at_birth")
"""Columns of the table of preferred tokens."""


def chart_groups(snapshot: Snapshot) -> dict[str, float]:
    """Return the scalars under names that loggers group into charts: ``SECTION/NAME``, beside it ``SECTION/NAME
    (CONTROL)``.

    Loggers group by the part before the slash and sort by name. Scalars of the text probe are called ``NAME on text``.
    """
    found: dict[str, float] = {}
    for group, suffix in (("bias", ""), ("bias_text", " on text")):
        scalars = snapshot.summary.get(group) or {}
        for name, quantity in snapshot.quantities.items():
            if quantity.section and (value := scalars.get(name)) is not None:
                key = f"{quantity.section}/{name}{suffix}"
                found[key] = value
                if math.isfinite(level := quantity.level(snapshot.summary, group)):
                    found[f"{key} ({quantity.control_label or 'control'})"] = level
    return found


def block_curves(snapshot: Snapshot) -> dict[str, float]:
    """Return ``by block NAME/LAYER`` for every probe: a group of charts for each quantity, a curve for each block.

    Layer 0 is the embeddings.
    """
    found: dict[str, float] = {}
    for prefix in measured_probes(snapshot):
        arrays, suffix = arrays_of(snapshot, prefix), f" on {PROBES[prefix]}" if prefix else ""
        for quantity, column in by_block(snapshot.quantities.values()):
            if (array := arrays.get(quantity.array)) is None:
                continue
            name = f"by block {column.key or quantity.name}{suffix}"
            first = snapshot.quantities[quantity.array].axes[0]
            values = enumerate(quantity.blocks(array), AXES[first].first)
            found |= {f"{name}/{layer:02}": float(value) for layer, value in values if math.isfinite(value)}
    return found


def token_rows(snapshots: Sequence[Snapshot]) -> list[list[Any]]:
    """List the rows of `TOKEN_COLUMNS`: the preferred tokens of every snapshot, step by step."""
    return [
        [snapshot.step, *(token.get(name) for name in TOKEN_COLUMNS[1:])]
        for snapshot in snapshots
        for token in snapshot.summary.get("top_tokens") or []
    ]


def head_tables(snapshot: Snapshot) -> dict[str, list[list[Any]]]:
    """Return, for each quantity with a number for every head and a scalar, rows of (layer, head, value)."""
    found = {}
    for name, quantity in snapshot.quantities.items():
        array_LH, column = snapshot.arrays.get(name), quantity.over_training
        of_heads = quantity.axes == ("layer", "head") and quantity.scalar
        if array_LH is not None and of_heads and column is not None and not column.page_only:
            found[name] = [[layer, h, float(x)] for layer, row in enumerate(array_LH, 1) for h, x in enumerate(row)]
    return found


def sink_map(snapshot: Snapshot) -> np.ndarray | None:
    """Draw sink mass by block and head, a panel for each probe, as a picture: bytes ``[height, width, 3]``.

    None without heads, or without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from ..report.pictures.heads import draw_head_maps
    from ..report.pictures.style import our_style

    masses = {PROBES[prefix]: arrays_of(snapshot, prefix).get("sink_mass") for prefix in measured_probes(snapshot)}
    panels = [(f"{name} probe, step {snapshot.step:,}", mass) for name, mass in masses.items() if mass is not None]
    if not panels:
        return None
    most = max(float(np.nanmax(mass_LH, initial=0)) for _, mass_LH in panels)
    figure = draw_head_maps(panels, "sink mass", (0, next((top for top in _TOPS if most <= top), 1.0)))
    with our_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure.set_dpi(_DPI)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
