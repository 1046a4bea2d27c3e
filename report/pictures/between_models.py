"""Pictures of compared models: matrices of models and of layers, predictions by position, straight lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..text import format_value, shorten
from .axes import turned_names, whole_ticks
from .colour_bar import add_colour_bar
from .panels import MAX_PANELS
from .style import (
    INK,
    PAPER,
    REFERENCE,
    add_legend,
    in_our_style,
    legend_line,
    new_figure,
    pale_to_full,
    run_colour,
    run_marker,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Models whose matrix has room for numbers, and layers.
_MOST_NUMBERED = 10


@in_our_style
def draw_model_matrices(names: Sequence[str], cka_AA: np.ndarray, kl_AA: np.ndarray) -> Figure:
    """Draw every pair of models: CKA of the last states, and the divergence of row ‖ column of the predictions.

    Args:
        names: names of the models.
        cka_AA: CKA, symmetric.
        kl_AA: divergence in nats.
    """
    labels = [shorten(name, 24) for name in names]
    n, margin = len(names), 5 * max(map(len, labels))
    side = max(110, 30 * n)
    figure, (left, right) = new_figure(2 * (side + 70) + margin, side + margin + 64, 1, 2)
    off = ~np.eye(n, dtype=bool)
    # A diagonal of ones and zeros is known beforehand, and would take the colours of the rest.
    largest = float(np.nanmax(kl_AA[off], initial=0.0)) or 1.0
    _matrix(left, np.where(off, cka_AA, np.nan), (0.0, 1.0), "CKA of the last states")
    _matrix(right, np.where(off, kl_AA, np.nan), (0.0, largest), "KL(row ‖ column), nats")
    for axes, rows in ((left, labels), (right, [""] * n)):
        turned_names(axes, labels, 60)
        axes.set_yticks(range(n), labels=rows, parse_math=False)
        axes.tick_params(length=0)
    return figure


def _matrix(axes: Axes, values: np.ndarray, ends: tuple[float, float], title: str, *, bar: bool = True) -> Any:
    """Draw a map, with numbers in it if there is room; cells that are not numbers stay empty."""
    axes.grid(visible=False)
    image = axes.imshow(np.ma.masked_invalid(values), cmap=pale_to_full(), vmin=ends[0], vmax=ends[1])
    if max(values.shape) <= _MOST_NUMBERED:
        for row, column in np.argwhere(np.isfinite(values)):
            value = values[row, column]
            dark = (value - ends[0]) / (ends[1] - ends[0]) > 0.6
            text = format_value(float(value), ".2f" if ends[1] >= 1 else ".2g")
            axes.text(column, row, text, ha="center", va="center", color=PAPER if dark else INK, fontsize=6)
    if title:
        axes.set_title(title, parse_math=False)
    if bar:
        ticks = np.linspace(*ends, 5).tolist()
        add_colour_bar([axes], image.get_cmap(), ticks, limits=ends, share=0.7)
    return image


@in_our_style
def draw_layer_matrices(pairs: Sequence[tuple[str, str, np.ndarray]]) -> Figure:
    """Draw CKA of every layer of one model with every layer of another, a panel for each pair, at most `MAX_PANELS`.

    Args:
        pairs: names of two models, and CKA ``[L_a + 1, L_b + 1]``.
    """
    shown = pairs[:MAX_PANELS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure, grid = new_figure(40 + 170 * columns, 10 + 152 * rows, rows, columns, squeeze=False)
    image: Any = None
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (a, b, cka_PQ) in zip(grid.flat, shown, strict=False):
        image = _matrix(axes, cka_PQ, (0.0, 1.0), "", bar=False)
        axes.invert_yaxis()
        axes.set_xlabel(f"layer of {shorten(b, 20)}", parse_math=False)
        axes.set_ylabel(f"layer of {shorten(a, 20)}", parse_math=False)
        whole_ticks(axes.xaxis)
        whole_ticks(axes.yaxis)
    ticks = [0, 0.2, 0.4, 0.6, 0.8, 1]
    add_colour_bar(grid.ravel(), image.get_cmap(), ticks, label="CKA (layer 0: embeddings)", share=0.6)
    return figure


@in_our_style
def draw_lines(lines: Sequence[tuple[str, Sequence[float], Sequence[float]]]) -> Figure:
    """Draw the loss on the straight line between two models and, dashed, the line between the ends' losses.

    Args:
        lines: name of the pair, points α, losses in nats.
    """
    figure, axes = new_figure(360, 200)
    entries = []
    for i, (name, alphas, losses) in enumerate(lines):
        look = {"color": run_colour(i), "marker": run_marker(i)}
        axes.plot(alphas, losses, zorder=3, **look)
        axes.plot([0, 1], [losses[0], losses[-1]], zorder=2, **{**REFERENCE, "color": run_colour(i)})
        entries.append((name, legend_line(**look)))
    axes.set_xlabel("α: from the first model to the second")
    axes.set_ylabel("loss, nats per token")
    add_legend(figure, [*entries, ("between the ends", legend_line(**REFERENCE))])
    return figure
