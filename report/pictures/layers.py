"""Pictures of layers and heads: small multiples, lines coloured by depth, maps of heads; arrays in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .panels import depth_colours, depth_entries, label_outside, log_heights, small_multiples, spread, whole
from .style import INK, MUTED, PAPER, REFERENCE, legend, line, log_axis, new, picture, run_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_HEAD_LINES = 16  # more heads than that are a band
_PREDICTION: dict[str, Any] = {"color": INK, "linestyle": (0, (2, 1.6)), "linewidth": 1.0}
_GUIDES = (REFERENCE, _PREDICTION)  # of the first and the second reference of a picture


@dataclass(frozen=True)
class Heights:
    """The y axis of a picture."""

    label: str
    log: bool = False
    least: float | None = None
    """The axis reaches down to it at least."""
    most: float | None = None
    """And up to it."""


@dataclass(frozen=True)
class Panel:
    """Lines over a common x: of heads, or of blocks."""

    title: str
    x: np.ndarray
    """``[X]``"""
    lines: np.ndarray
    """``[H or blocks, X]``; what is not finite is not drawn."""
    references: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Label → ``[X]``: what the lines are judged against."""


def _shown(values: np.ndarray, heights: Heights) -> np.ndarray:
    """``values``, NaN where they cannot be drawn."""
    return np.where(np.isfinite(values) & ((values > 0) | (not heights.log)), values, np.nan)


def _fit(axes: Axes, heights: Heights, panels: Sequence[Panel]) -> None:
    drawn = [panel.lines for panel in panels] + [values for panel in panels for values in panel.references.values()]
    if heights.log and any((values > 0).any() for values in drawn):
        log_heights(axes, [*drawn, np.array([v for v in (heights.least, heights.most) if v is not None])])
        return
    finite = np.concatenate([values[np.isfinite(values)] for values in drawn])
    low = min([heights.least, *finite.tolist()] if heights.least is not None else finite.tolist(), default=0.0)
    high = max([heights.most, *finite.tolist()] if heights.most is not None else finite.tolist(), default=1.0)
    margin = 0.05 * ((high - low) or 1.0)
    axes.set_ylim(low - margin, high + margin)


def _guides(axes: Axes, panel: Panel, entries: dict[str, Any]) -> None:
    for look, (label, values) in zip(_GUIDES, panel.references.items(), strict=False):
        # Predictions are judged where the lines are, so they lie on top of them.
        axes.plot(panel.x, values, **look, zorder=1 if look is REFERENCE else 4)
        entries.setdefault(label, line(**look))


@picture
def heads(
    panels: Sequence[Panel], *, run: int, heights: Heights, x_axis: Callable[[Axes], None], markers: bool = False
) -> Figure:
    """Small multiples, one panel per block: a thin line per head, their mean bold; many heads are a band.

    Args:
        panels: of the blocks.
        run: which run of the page; decides the colour.
        heights: the y axis, common to all panels.
        x_axis: sets scale, ticks and label of x.
        markers: mark every point of the mean.
    """
    figure, grid = small_multiples(len(panels))
    colour = run_colour(run)
    faint: dict[str, Any] = {"color": colour, "alpha": 0.5, "linewidth": 0.8}
    entries: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=True):
        values = _shown(panel.lines, heights)
        n_heads = len(values)
        if n_heads > _MAX_HEAD_LINES:
            band: dict[str, Any] = {"color": colour, "alpha": 0.2, "linewidth": 0}
            entries["range of the heads"] = axes.fill_between(panel.x, values.min(0), values.max(0), zorder=2, **band)
        elif n_heads > 1:
            for of_head in values:
                axes.plot(panel.x, of_head, zorder=2, **faint)
            entries["one head"] = line(**faint)
        bold: dict[str, Any] = {"color": colour, "linewidth": 1.5, "marker": "o" if markers else "", "markersize": 2.5}
        axes.plot(panel.x, values.mean(0), zorder=3, **bold)
        entries["mean of the heads" if n_heads > 1 else "the head"] = line(**bold)
        _guides(axes, panel, entries)
        axes.set_title(panel.title)
    _fit(grid[0], heights, panels)
    x_axis(grid[0])
    label_outside(grid, grid[0].get_xlabel(), heights.label)
    legend(figure, list(entries.items()))
    return figure


@picture
def depth(
    panels: Sequence[Panel],
    *,
    heights: Heights,
    x_axis: Callable[[Axes], None],
    embeddings: bool = False,
    markers: bool = False,
) -> Figure:
    """A line per block, coloured by depth; several panels stand side by side on one scale.

    Args:
        panels: lines of the blocks in order, of the embeddings before them if ``embeddings``.
        heights: the y axis, common to all panels.
        x_axis: sets scale, ticks and label of x.
        embeddings: whether the first line is that of the embeddings, which is grey.
        markers: mark every point.
    """
    figure, grid = new(360, 200, columns=len(panels), squeeze=False, sharey=True)
    n_blocks = len(panels[0].lines) - embeddings
    colours = [MUTED] * embeddings + depth_colours(n_blocks)
    entries: dict[str, Any] = {"embeddings": line(color=MUTED)} if embeddings else {}
    entries |= depth_entries(n_blocks)
    for axes, panel in zip(grid[0], panels, strict=True):
        for colour, values in zip(colours, panel.lines, strict=True):
            look: dict[str, Any] = {
                "color": colour,
                "linewidth": 1.2,
                "marker": "o" if markers else "",
                "markersize": 2.5,
            }
            axes.plot(panel.x, _shown(values, heights), zorder=2, **look)
        _guides(axes, panel, entries)
        if panel.title:
            axes.set_title(panel.title)
        x_axis(axes)
    _fit(grid[0][0], heights, panels)
    grid[0][0].set_ylabel(heights.label)
    legend(figure, list(entries.items()))
    return figure


@picture
def contraction(profiles: Sequence[tuple[str, np.ndarray, np.ndarray]], *, run: int) -> Figure:
    """Contraction of the residual stream along depth; the first of two is dashed and hollow.

    Args:
        profiles: (when, after attention ``[L]``, after the MLP ``[L+1]``, where 0 is the embeddings) of a snapshot.
        run: which run of the page.
    """
    figure, axes = new(360, 200)
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
            entries.append((when, line(**look)))
    axes.set_ylim(min(axes.get_ylim()[0], -0.03), 1.03)  # one range for all runs that stand side by side
    axes.set_ylabel("mean cosine")
    block_axis(axes)
    for label, marker in (("after attention", "^"), ("after MLP", "o")):
        entries.append((label, line(color=INK, linestyle="", marker=marker, markersize=3.8)))
    legend(figure, entries)
    return figure


def block_axis(axes: Axes, embeddings: bool = True) -> None:
    """Blocks from 1, and the embeddings before them."""
    axes.set_xlabel("block (0: embeddings)" if embeddings else "block")
    whole(axes.xaxis)


@picture
def head_maps(panels: Sequence[tuple[str, np.ndarray]], label: str) -> Figure:
    """A share by block and head, one panel per (title, ``[L, H]`` array), all on the fixed range 0 to 1."""
    n_layers, n_heads = (max(array.shape[i] for _, array in panels) for i in (0, 1))
    figure, grid = new(360, 62 + min(max(16 * n_layers, 150), 190), columns=len(panels), squeeze=False, sharey=True)
    for axes, (title, array) in zip(grid[0], panels, strict=True):
        rows, columns = array.shape
        extent = (-0.5, columns - 0.5, rows + 0.5, 0.5)
        axes.imshow(array, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="none", extent=extent)
        if n_heads * len(panels) <= 16 and n_layers <= 16:
            for (layer, head), value in np.ndenumerate(array):
                shade = "#ffffff" if value < 0.55 else "#000000"  # in the cell, so in no colour of the page
                axes.text(
                    head, layer + 1, f"{value:.2f}".lstrip("0"), color=shade, fontsize=7, ha="center", va="center"
                )
        axes.set_title(title)
        axes.set_xlabel("head")
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axis.set_tick_params(length=0)
    grid[0][0].set_ylabel("block")
    _colour_bar(figure, grid[0], label)
    return figure


def _colour_bar(figure: Figure, panels: Sequence[Axes], label: str) -> None:
    """One image instead of matplotlib's 256 rectangles."""
    bar = figure.colorbar(panels[0].images[0], ax=list(panels), aspect=18, pad=0.03, label=label, ticks=[0, 0.5, 1])
    for part in (bar.outline, bar.solids):
        if part is not None:
            part.set_visible(False)
    ramp = np.linspace(0, 1, 128)[:, None]
    bar.ax.imshow(ramp, cmap="cividis", aspect="auto", extent=(0, 1, 0, 1), origin="lower", interpolation="none")
    bar.ax.grid(False)
    bar.ax.tick_params(length=0)


@picture
def importance(panels: Sequence[tuple[str, np.ndarray]]) -> Figure:
    """Importance over key position, mean over heads, one curve per block, panels per (title, ``[L, H, T]`` array)."""
    figure, grid = new(360, 200, columns=len(panels), squeeze=False, sharey=True)
    n_layers = max(array.shape[0] for _, array in panels)
    colours = depth_colours(n_layers)
    for axes, (title, array) in zip(grid[0], panels, strict=True):
        keys = np.arange(array.shape[2])
        for layer, values in enumerate(array.mean(axis=1)):
            shown = extremes(values)
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
    legend(figure, [*depth_entries(n_layers), ("uniform", line(**REFERENCE))])
    return figure


def uniform_importance(length: int) -> np.ndarray:
    """``[T]``: what uniform attention gives each key, 1/(t+1) from every query, on average over the queries t ≥ j."""
    keys = np.arange(length)
    return np.cumsum(1 / (keys[::-1] + 1.0))[::-1] / (length - keys)


def extremes(values: np.ndarray, limit: int = 256) -> np.ndarray:
    """Indices of the least and the greatest of each group of neighbours: fewer points, and no peak is lost."""
    if len(values) <= limit:
        return np.arange(len(values))
    groups = np.array_split(np.arange(len(values)), limit // 2)
    return np.unique([group[pick(values[group])] for group in groups for pick in (np.argmin, np.argmax)])


# ── units and channels ───────────────────────────────────────────────────────────────────────────────────────────────


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
        """Indices of units that another does not hide: one per cell of a grid of so many cells per decade."""
        places = np.round(cells * np.log10(np.maximum([self.others, self.first], self.silent)), 0)
        # Super neurons first, so that none of them is the one that is left out.
        order = np.argsort(~self.is_super, kind="stable")
        _, kept = np.unique(places[:, order], axis=1, return_index=True)
        return np.sort(order[kept])


@picture
def unit_scatter(panels: Sequence[Units], *, run: int, ratio: float) -> Figure:
    """Every hidden unit at position 0 against the others, one panel per block; super neurons stand out.

    Args:
        panels: of the blocks.
        run: which run of the page.
        ratio: how many times the others' activation a super neuron's must be at least.
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
        axes.axline((1, ratio), (10, 10 * ratio), zorder=1, **_PREDICTION)
        axes.set_title(panel.title)
    axes = grid[0]
    log_heights(axes, [np.array([low, high])])
    bottom, top = axes.get_ylim()
    axes.set_xscale("log")
    axes.set_xlim(bottom, top)
    axes.xaxis.set_ticks(axes.get_yticks(), labels=[label.get_text() for label in axes.get_yticklabels()])
    axes.xaxis.set_minor_locator(axes.yaxis.get_minor_locator().__class__())
    label_outside(grid, "elsewhere", "at position 0")
    marks = [("unit", line(**plain)), ("super neuron", line(**strong))]
    guides = [("equal", line(**REFERENCE)), (f"{ratio:g} times", line(**_PREDICTION))]
    legend(figure, marks + guides)
    return figure


@picture
def massive(value: np.ndarray, position: np.ndarray, *, run: int) -> Figure:
    """The largest absolute values of the residual stream at every depth, those at position 0 full, others hollow.

    Args:
        value: ``[L+1, K]``.
        position: ``[L+1, K]`` where each is.
        run: which run of the page.
    """
    figure, axes = new(360, 200)
    looks: dict[str, dict[str, Any]] = {
        "at position 0": {"color": run_colour(run), "marker": "D", "markersize": 3.6},
        "elsewhere": {"color": MUTED, "marker": "o", "markersize": 3.6, "markerfacecolor": "none"},
    }
    blocks = np.broadcast_to(np.arange(len(value))[:, None], value.shape)
    for at_first, look, offset in zip((True, False), looks.values(), (-0.12, 0.12), strict=True):
        shown = (position == 0) == at_first
        axes.plot(blocks[shown] + offset, value[shown], linestyle="", **look)
    log_heights(axes, [value])
    axes.set_ylabel("|h|, the ten largest")
    block_axis(axes)
    axes.set_xlim(-0.5, len(value) - 0.5)
    legend(figure, [(label, line(linestyle="", **look)) for label, look in looks.items()])
    return figure


def block_titles(n_layers: int) -> list[tuple[int, str]]:
    """(index, title) of the blocks that small multiples show."""
    return [(layer, f"block {layer + 1}") for layer in spread(n_layers)]
