"""The picture of an intervention: how much later blocks look at the key, against the dose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files import write_text
from ...measure.interventions import DoseResponse
from ..csv_files import LabelledArray, to_csv
from .panels import block_colours, evenly_spaced
from .saving import save_png
from .style import (
    MUTED,
    REFERENCE,
    add_legend,
    in_our_style,
    legend_line,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(found: DoseResponse, model: str, out: Path) -> None:
    """Write the picture to ``out`` and its numbers beside it, as a CSV of the same name; same input, same bytes."""
    save_png(draw_dose_response(found, model), out)
    write_text(out.with_suffix(".csv"), to_csv(_numbers(found, model)))


def _numbers(found: DoseResponse, model: str) -> list[LabelledArray]:
    later, n_heads = found.importance.shape[1:]
    layers = range(found.layer + 1, found.layer + 1 + later)
    axes: list[dict[str, Sequence[float]]] = [{"lambda": found.lambdas}, {"layer": layers}, {"head": range(n_heads)}]
    at = {"run": model, "position": found.position}
    return [
        LabelledArray("importance", found.importance, axes, at),
        LabelledArray("uniform", np.full(1, found.uniform), [{"lambda": [""]}], at),
    ]


@in_our_style
def draw_dose_response(found: DoseResponse, model: str) -> Figure:
    """Importance of the key in every later block against λ: the mean of the heads on their range; dashed: uniform."""
    figure, axes = new_figure(360, 220)
    n_later, n_heads = found.importance.shape[1:]
    # A mask has no dose: left alone, and masked.
    order = np.argsort(found.lambdas, kind="stable")
    doses = np.asarray(found.lambdas)[order]
    x = np.arange(len(doses)) if found.kind == "mask" else doses
    colours = block_colours(n_later)
    for later, colour in enumerate(colours):
        heads = found.importance[order, later]
        look: dict[str, Any] = {"color": colour, "linewidth": 1.5, "marker": "o", "markersize": 3.5}
        if n_heads > 1:
            axes.fill_between(x, heads.min(1), heads.max(1), color=colour, alpha=0.14, linewidth=0, zorder=1)
        axes.plot(x, heads.mean(1), zorder=3, **look)
    axes.axhline(found.uniform, zorder=2, **REFERENCE)
    # Raw weights of similarities may be negative.
    low, high = min(0.0, float(found.importance.min())), max(float(found.importance.max()), found.uniform)
    axes.set_ylim(low - 0.03 * (high - low), high + 0.07 * (high - low))
    axes.set_ylabel(f"importance of key {found.position}")
    if found.kind == "mask":
        axes.set_xticks(x, labels=["left alone", "masked"])
        axes.set_xlim(-0.4, 1.4)
    else:
        if doses[0] > 0 and doses[-1] > 4 * doses[0]:
            axes.set_xscale("log")
        axes.set_xticks(x, labels=[f"{dose:g}" for dose in doses])
        axes.minorticks_off()
        axes.set_xlabel("λ")
    what = f"{found.kind} at block {found.layer}, position {found.position}: "
    room = 62 - len(what)  # the end of a long name says more
    axes.set_title(what + (model if len(model) <= room else "…" + model[1 - room :]), parse_math=False)
    shown = evenly_spaced(n_later, 4)
    entries = [
        (f"block {found.layer + 1 + i}", legend_line(color=colours[i], marker="o", markersize=3.5)) for i in shown
    ]
    if n_heads > 1:
        entries.append(("range of the heads", legend_line(color=MUTED, alpha=0.3, linewidth=5)))
    add_legend(figure, [*entries, ("uniform attention", legend_line(**REFERENCE))])
    return figure
