"""Pictures of layers and heads: small multiples, lines coloured by depth, maps; arrays in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...findings.numbers import format_value
from .axes import add_colour_bar, block_axis, log_axis
from .panels import (
    Heights,
    Panel,
    block_colours,
    draw_references,
    drawable,
    fit_heights,
    heights_for,
    label_outer_panels,
    least_and_greatest,
    most_points,
    name_blocks,
    small_multiples,
)
from .style import INK, MUTED, PAPER, REFERENCE, add_legend, in_figure_style, legend_line, new_figure, run_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@in_figure_style
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


@in_figure_style
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


# ---------------------------------------------------------------- pictures of heads
# Small multiples with a line per head, maps by block and head, importance over key positions.

_MAX_HEAD_LINES = 16  # more heads than that are a band


@in_figure_style
def draw_heads(
    panels: Sequence[Panel], *, run: int, heights: Heights, x_axis: Callable[[Axes], None], markers: bool = False
) -> Figure:
    """Draw small multiples, one panel per block: a thin line per head, their mean bold; many heads are a band.

    Args:
        panels: panels of the blocks.
        run: index of the run on the page, which decides the colour.
        heights: the y axis, common to all panels.
        x_axis: function that sets scale, ticks and label of x.
        markers: mark every point of the mean.
    """
    figure, grid = small_multiples(len(panels))
    heights = heights_for(heights, panels)
    fit_heights(grid[0], heights, panels)
    bottom = grid[0].get_ylim()[0]
    limit = most_points(sum(min(len(panel.lines), _MAX_HEAD_LINES) for panel in panels))
    colour = run_colour(run)
    faint: dict[str, Any] = {"color": colour, "alpha": 0.5, "linewidth": 0.8}
    entries: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        # Statistics of the numbers themselves: values that a logarithmic axis cannot show count too.
        mean, least, most = (drawable(of(panel.lines, axis=0), heights) for of in (np.mean, np.min, np.max))
        n_heads = len(panel.lines)
        if n_heads > _MAX_HEAD_LINES:
            band: dict[str, Any] = {"color": colour, "alpha": 0.2, "linewidth": 0}
            low = np.where(np.isnan(least), bottom, least)  # where the least is 0 it reaches the axis
            at = np.union1d(least_and_greatest(low, limit), least_and_greatest(most, limit))
            entries["range of the heads"] = axes.fill_between(panel.x[at], low[at], most[at], zorder=2, **band)
        elif n_heads > 1:
            for of_head in drawable(panel.lines, heights):
                at = least_and_greatest(of_head, limit)
                axes.plot(panel.x[at], of_head[at], zorder=2, **faint)
            entries["one head"] = legend_line(**faint)
        bold: dict[str, Any] = {"color": colour, "linewidth": 1.5, "marker": "o" if markers else "", "markersize": 2.5}
        axes.plot(panel.x, mean, zorder=3, **bold)
        entries["mean of the heads" if n_heads > 1 else "the head"] = legend_line(**bold)
        draw_references(axes, panel, entries)
        axes.set_title(panel.title)
    x_axis(grid[0])
    label_outer_panels(grid, grid[0].get_xlabel(), heights.label)
    add_legend(figure, list(entries.items()))
    return figure


@in_figure_style
def draw_head_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    label: str,
    limits: tuple[float, float] = (0, 1),
    write: Callable[[float], str] = lambda share: format_value(share, ".2f"),
) -> Figure:
    """Draw values by block and head, one panel per (title, ``[L, H]`` array), all on one range.

    Args:
        panels: arrays, by default of shares.
        label: name of the values.
        limits: values of the first and the last colour.
        write: function from a value to its cell's text, if cells are few.
    """
    low, high = limits
    n_layers, n_heads = (max(array.shape[i] for _, array in panels) for i in (0, 1))
    figure, grid = new_figure(
        360, 62 + min(max(16 * n_layers, 150), 190), columns=len(panels), squeeze=False, sharey=True
    )
    for axes, (title, array) in zip(grid[0], panels, strict=True):
        rows, columns = array.shape
        extent = (-0.5, columns - 0.5, rows + 0.5, 0.5)
        axes.imshow(array, cmap="cividis", vmin=low, vmax=high, aspect="auto", interpolation="none", extent=extent)
        if n_heads * len(panels) <= 16 and n_layers <= 16:
            for (layer, head), value in np.ndenumerate(array):
                if not np.isfinite(value):
                    continue
                shade = (
                    "#ffffff" if value < low + 0.55 * (high - low) else "#000000"
                )  # in the cell, so in no colour of the page
                axes.text(head, layer + 1, write(float(value)), color=shade, fontsize=7, ha="center", va="center")
        axes.set_title(title)
        axes.set_xlabel("head")
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axis.set_tick_params(length=0)
    grid[0][0].set_ylabel("block")
    ticks = [low, (low + high) / 2, high]
    add_colour_bar(grid[0], "cividis", ticks, limits=limits, label=label)
    return figure


@in_figure_style
def draw_importance(panels: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Draw importance over key position, mean over heads, one curve per block, panels per (title, ``[L, H, T]``
    array).
    """
    figure, grid = new_figure(360, 200, columns=len(panels), squeeze=False, sharey=True)
    n_layers = max(array.shape[0] for _, array in panels)
    colours = block_colours(n_layers)
    for axes, (title, array) in zip(grid[0], panels, strict=True):
        keys = np.arange(array.shape[2])
        for layer, values in enumerate(array.mean(axis=1)):
            shown = least_and_greatest(values, most_points(n_layers))
            axes.plot(shown, np.where(values > 0, values, np.nan)[shown], color=colours[layer], linewidth=1.1)
        axes.plot(keys, uniform_importance(len(keys)), **REFERENCE)
        axes.set_yscale("log")
        axes.set_title(title)
        axes.set_xlabel("key position")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    low, high = grid[0][0].get_ylim()
    grid[0][0].set_ylim(10 ** np.floor(np.log10(low)), max(high, 1.0))
    log_axis(grid[0][0].yaxis)
    grid[0][0].set_ylabel("importance")
    name_blocks(figure, grid[0], n_layers, {"uniform": legend_line(**REFERENCE)})
    return figure


def uniform_importance(length: int) -> np.ndarray:
    """Return ``[T]``, the importance of each key under uniform attention: 1/(t+1) from every query, averaged over the
    queries t ≥ j.
    """
    keys = np.arange(length)
    return np.cumsum(1 / (keys[::-1] + 1.0))[::-1] / (length - keys)
