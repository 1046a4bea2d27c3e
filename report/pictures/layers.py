"""Pictures of layers and heads: small multiples, lines coloured by depth, maps of heads; arrays in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .axes import block_axis
from .panels import (
    Heights,
    Panel,
    block_colours,
    draw_references,
    drawable,
    fit_heights,
    heights_for,
    least_and_greatest,
    most_points,
    name_blocks,
)
from .style import (
    INK,
    MUTED,
    PAPER,
    add_legend,
    in_our_style,
    legend_line,
    new_figure,
    run_colour,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@in_our_style
def draw_blocks(
    panels: Sequence[Panel],
    *,
    heights: Heights,
    x_axis: Callable[[Axes], None],
    embeddings: bool = False,
    markers: bool = False,
) -> Figure:
    """Draw a line per block, coloured by depth; several panels are side by side on one scale.

    Args:
        panels: lines of the blocks in order, preceded by that of the embeddings if ``embeddings``.
        heights: the y axis, common to all panels.
        x_axis: function that sets scale, ticks and label of x.
        embeddings: the first line is that of the embeddings, which is grey.
        markers: mark every point.
    """
    figure, grid = new_figure(360, 200, columns=len(panels), squeeze=False, sharey=True)
    heights = heights_for(heights, panels)
    n_blocks = len(panels[0].lines) - embeddings
    colours = [MUTED] * embeddings + block_colours(n_blocks)
    entries: dict[str, Any] = {"embeddings": legend_line(color=MUTED)} if embeddings else {}
    for axes, panel in zip(grid[0], panels, strict=True):
        for colour, values in zip(colours, panel.lines, strict=True):
            look: dict[str, Any] = {
                "color": colour,
                "linewidth": 1.2,
                "marker": "o" if markers else "",
                "markersize": 2.5,
            }
            at = least_and_greatest(values, most_points(len(panel.lines)))
            axes.plot(panel.x[at], drawable(values[at], heights), zorder=2, **look)
        draw_references(axes, panel, entries)
        if panel.title:
            axes.set_title(panel.title)
        x_axis(axes)
    fit_heights(grid[0][0], heights, panels)
    grid[0][0].set_ylabel(heights.label)
    name_blocks(figure, grid[0], n_blocks, entries)
    return figure


@in_our_style
def draw_contraction(profiles: Sequence[tuple[str, np.ndarray, np.ndarray]], *, run: int) -> Figure:
    """Draw contraction of the residual stream along depth; the first of two is dashed and hollow.

    Args:
        profiles: (when, after attention ``[L]``, after the MLP ``[L+1]``, where 0 is the embeddings) of a snapshot.
        run: index of the run on the page.
    """
    figure, axes = new_figure(360, 200)
    colour = run_colour(run)
    size = 2.4 if max(len(mlp) for _, _, mlp in profiles) > 16 else 3.8
    entries = []
    for place, (when, attention, mlp) in enumerate(profiles):
        last = place == len(profiles) - 1
        blocks = np.arange(len(mlp))
        x, y = np.concatenate([blocks, blocks[1:] - 0.5]), np.concatenate([mlp, attention])
        order = np.argsort(x)
        look: dict[str, Any] = {"color": colour, "linestyle": "-" if last else (0, (3, 1.5)), "linewidth": 1.1}
        axes.plot(x[order], y[order], **look)
        dots: dict[str, Any] = {"color": colour, "markerfacecolor": colour if last else PAPER, "markeredgewidth": 0.8}
        axes.plot(blocks[1:] - 0.5, attention, "^", markersize=size, zorder=3, **dots)
        axes.plot(blocks, mlp, "o", markersize=size, zorder=3, **dots)
        if when:
            entries.append((when, legend_line(**look)))
    axes.set_ylim(min(axes.get_ylim()[0], -0.03), 1.03)  # one range for all runs that stand side by side
    axes.set_ylabel("mean cosine")
    block_axis(axes)
    for label, marker in (("after attention", "^"), ("after MLP", "o")):
        entries.append((label, legend_line(color=INK, linestyle="", marker=marker, markersize=3.8)))
    add_legend(figure, entries)
    return figure


def block_titles(blocks: Iterable[int]) -> list[tuple[int, str]]:
    """Return (index, title) of the blocks that small multiples show."""
    return [(block, f"block {block + 1}") for block in blocks]
