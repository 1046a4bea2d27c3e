"""Pictures of single hidden units and of single values of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .axes import block_axis, log_heights, log_ticks
from .panels import PREDICTION, label_outer_panels, small_multiples
from .style import MUTED, REFERENCE, add_legend, in_figure_style, legend_line, new_figure, run_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Units:
    """The hidden units of one block's MLP."""

    title: str
    first: np.ndarray
    """``[F]`` mean |activation| at position 0."""
    others: np.ndarray
    """``[F]`` at the others."""
    is_super: np.ndarray
    """``[F]`` bool."""
    silent: float
    """Activations below it are drawn there: a logarithmic axis has no 0."""

    def drawn(self, cells: float = 30) -> np.ndarray:
        """Return the indices of units that no other hides: one per cell of a grid of so many cells per decade."""
        places = np.round(cells * np.log10(np.maximum([self.others, self.first], self.silent)), 0)
        # Super neurons first, so that none of them is the one that is left out.
        order = np.argsort(~self.is_super, kind="stable")
        _, kept = np.unique(places[:, order], axis=1, return_index=True)
        return np.sort(order[kept])


@in_figure_style
def draw_units(panels: Sequence[Units], *, run: int, ratio: float) -> Figure:
    """Draw every hidden unit at position 0 against the others, one panel per block; super neurons stand out.

    Args:
        panels: units of the blocks.
        run: index of the run on the page.
        ratio: least ratio of a super neuron's activation to the others'.
    """
    figure, grid = small_multiples(len(panels), (250, 165, 115))
    plain: dict[str, Any] = {"color": MUTED, "marker": "o", "linestyle": "", "markersize": 1.4}
    strong: dict[str, Any] = {"color": run_colour(run), "marker": "D", "linestyle": "", "markersize": 3.4}
    low = min(panel.silent for panel in panels) / 1.3
    high = max(max(panel.first.max(), panel.others.max()) for panel in panels) * 1.5
    for axes, panel in zip(grid, panels, strict=True):
        shown, silent = panel.drawn(), panel.silent
        x, y = np.maximum(panel.others, silent), np.maximum(panel.first, silent)
        of_plain, of_super = (shown[panel.is_super[shown] == kind] for kind in (False, True))
        axes.plot(x[of_plain], y[of_plain], **plain, zorder=2)
        axes.plot(x[of_super], y[of_super], **strong, zorder=3)
        axes.axline((1, 1), (10, 10), zorder=1, **REFERENCE)
        axes.axline((1, ratio), (10, 10 * ratio), zorder=1, **PREDICTION)
        axes.set_title(panel.title)
    axes = grid[0]
    log_heights(axes, [np.array([low, high])])
    bottom, top = axes.get_ylim()
    axes.set_xscale("log")
    axes.set_xlim(bottom, top)
    log_ticks(axes.xaxis, bottom, top)
    label_outer_panels(grid, "elsewhere", "at position 0")
    marks = [("unit", legend_line(**plain)), ("super neuron", legend_line(**strong))]
    guides = [("equal", legend_line(**REFERENCE)), (f"{ratio:g} times", legend_line(**PREDICTION))]
    add_legend(figure, marks + guides)
    return figure


@in_figure_style
def draw_massive(value: np.ndarray, position: np.ndarray, *, run: int) -> Figure:
    """Draw the largest absolute values of the residual stream at every depth, those at position 0 full, others hollow.

    Args:
        value: ``[L+1, K]``, the values.
        position: ``[L+1, K]``, position of each.
        run: index of the run on the page.
    """
    figure, axes = new_figure(360, 200)
    size = 3.6 if len(value) <= 50 else 2.0
    looks: dict[str, dict[str, Any]] = {
        "at position 0": {"color": run_colour(run), "marker": "D", "markersize": size},
        "elsewhere": {
            "color": MUTED,
            "marker": "o",
            "markersize": size,
            "markerfacecolor": "none",
            "markeredgewidth": size / 3.6,
        },
    }
    blocks = np.broadcast_to(np.arange(len(value))[:, None], value.shape)
    for at_first, look, offset in zip((True, False), looks.values(), (-0.12, 0.12), strict=True):
        shown = (position == 0) == at_first
        axes.plot(blocks[shown] + offset, value[shown], linestyle="", **look)
    log_heights(axes, [value])
    axes.set_ylabel("|h|, the ten largest")
    block_axis(axes)
    axes.set_xlim(-0.5, len(value) - 0.5)
    add_legend(figure, [(label, legend_line(linestyle="", **look)) for label, look in looks.items()])
    return figure
