"""Panels that share a scale: small multiples, lines of many blocks, and their references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .axes import AROUND_ZERO, add_colour_bar, log_heights, log_ticks
from .style import DEPTH, INK, REFERENCE, add_legend, figure_style, legend_line, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREDICTION: dict[str, Any] = {"color": INK, "linestyle": (0, (2, 1.6)), "linewidth": 1.0}
_REFERENCE_LOOKS = (REFERENCE, PREDICTION)  # of the first and the second reference of a picture
MAX_PANELS = 12
"""Largest number of panels in small multiples; for more blocks `blocks_of_change` picks those that are drawn."""
_MOST_POINTS = 6000
"""Largest number of points of all lines in a picture together."""
_NAMED_BLOCKS = 4
"""Blocks whose lines a legend names; those of more have a scale of colours."""


def evenly_spaced(n: int, most: int = MAX_PANELS) -> list[int]:
    """Choose at most ``most`` of ``n`` indices, evenly, always with the first and the last."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, most))})


def blocks_of_change(profiles: Iterable[np.ndarray], n_blocks: int, most: int = MAX_PANELS) -> list[int]:
    """Choose the indices of at most ``most`` blocks: the first, the last, and both sides of the largest changes along
    depth.

    A change is the root mean square difference between neighbouring blocks, as a share of its profile's largest one.
    Ties go to the earlier block. Evenly spaced blocks fill the rest if nothing else changes.

    Args:
        profiles: quantities along the blocks, ``[L]`` or ``[L, X]`` each; logarithms if ratios count. A
            difference that is not finite is no change.
        n_blocks: L.
        most: blocks to pick, at least two.
    """
    largest = np.zeros(max(n_blocks - 1, 0))
    for profile in profiles:
        with np.errstate(invalid="ignore"):
            steps = np.diff(np.asarray(profile, dtype=float).reshape(n_blocks, -1), axis=0)
        change = np.sqrt(np.square(np.where(np.isfinite(steps), steps, 0.0)).mean(axis=1))
        if change.any():
            largest = np.maximum(largest, change / change.max())
    order = [int(i) for i in np.argsort(-largest, kind="stable") if largest[i] > 0]
    # Behind a change the new state stands, so that side comes first where one place is left.
    wanted = [0, n_blocks - 1, *(block for i in order for block in (i + 1, i)), *evenly_spaced(n_blocks, most)]
    return sorted(list(dict.fromkeys([*wanted, *range(n_blocks)]))[:most]) if n_blocks else []


def small_multiples(n: int, heights: tuple[float, float, float] = (200, 118, 96)) -> tuple[Figure, list[Axes]]:
    """Make ``n`` panels of one scale, in one, two or three columns with these heights, as many as stay readable."""
    columns = _columns(n)
    rows = -(-n // columns)
    figure, grid = new_figure(
        360, 24 + heights[columns - 1] * rows, rows, columns, squeeze=False, sharex=True, sharey=True
    )
    panels = list(grid.flat)
    for spare in panels[n:]:
        spare.set_visible(False)
    return figure, panels[:n]


def label_outer_panels(panels: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    """Label small multiples: below the lowest panel of each column, and left of the first."""
    columns = _columns(len(panels))
    for i, axes in enumerate(panels):
        lowest, first = i + columns >= len(panels), i % columns == 0
        axes.tick_params(labelbottom=lowest, labelleft=first)
        axes.set_xlabel(xlabel if lowest else "")
        axes.set_ylabel(ylabel if first else "")


def same_scale(figures: Sequence[Figure], square: bool = False) -> None:
    """Give figures that stand side by side one y axis, and if ``square`` one x axis; maps keep theirs."""
    panels = [axes for figure in figures for axes in figure.axes if axes.get_visible() and not axes.images]
    with figure_style():  # new limits make new ticks
        for name in ("y", "x") if square else ("y",):
            if len({getattr(axes, f"get_{name}scale")() for axes in panels}) > 1:
                continue
            limits = np.array([getattr(axes, f"get_{name}lim")() for axes in panels])
            if not len(limits) or (limits == limits[0]).all():
                continue
            low, high = float(limits.min()), float(limits.max())
            for axes in panels:
                getattr(axes, f"set_{name}lim")(low, high)
                if getattr(axes, f"get_{name}scale")() == "log":
                    log_ticks(getattr(axes, f"{name}axis"), low, high)


def _columns(n: int) -> int:
    return 1 if n == 1 else 2 if n <= 4 else 3


def block_colours(n_blocks: int) -> list[Any]:
    """Return the colours of the blocks, first to last."""
    ramp = _depth_ramp()
    return [ramp(i / max(n_blocks - 1, 1)) for i in range(n_blocks)]


def _depth_ramp() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("depth", list(DEPTH))


def name_blocks(
    figure: Figure, panels: Sequence[Axes], n_blocks: int, entries: Mapping[str, Any], first: int = 1
) -> None:
    """Name the blocks of the colours of `block_colours`: few in the legend, many by a bar beside ``panels``.

    Args:
        figure: figure of `new_figure`.
        panels: the axes, side by side.
        n_blocks: lines of blocks in each.
        entries: the legend's other words and lines.
        first: number of the first block.
    """
    colours, last = block_colours(n_blocks), first + n_blocks - 1
    if n_blocks <= _NAMED_BLOCKS:
        blocks = {f"block {first + i}": legend_line(color=colour) for i, colour in enumerate(colours)}
        add_legend(figure, [*blocks.items(), *entries.items()])
        return
    add_legend(figure, list(entries.items()))
    every = next(size for size in (2, 5, 10, 20, 50, 100, 200, 500, n_blocks) if n_blocks / size <= 6)
    # Round numbers that leave room for the first and the last.
    inner = [tick for tick in range(every, last, every) if min(tick - first, last - tick) >= every / 2]
    add_colour_bar(panels, _depth_ramp(), [first, *inner, last], limits=(first, last), label="block")


def most_points(n_lines: int) -> int:
    """Return the number of points for each of so many lines in one picture: fewer for many, so that a page
    stays small.
    """
    return int(np.clip(_MOST_POINTS // max(n_lines, 1), 48, 256))


def least_and_greatest(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of the least and the greatest of each group of neighbours: fewer points, without losing a
    peak.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    n_groups = limit // 2
    size, n_longer = divmod(len(values), n_groups)
    number = np.arange(n_groups + 1)
    starts = number * size + np.minimum(number, n_longer)
    places = starts[:-1, None] + np.arange(size + (n_longer > 0))
    inside, places = places < starts[1:, None], np.minimum(places, len(values) - 1)
    low, high = (np.where(np.isnan(values), worst, values) for worst in (np.inf, -np.inf))
    least = np.where(inside, low[places], np.inf).argmin(1)
    greatest = np.where(inside, high[places], -np.inf).argmax(1)
    return np.unique([0, *(starts[:-1] + least), *(starts[:-1] + greatest), len(values) - 1])


@dataclass(frozen=True)
class Heights:
    """The y axis of a picture."""

    label: str
    log: bool = False
    least: float | None = None
    """Value that the axis reaches down to at least."""
    most: float | None = None
    """Value that the axis reaches up to at least."""


@dataclass(frozen=True)
class Panel:
    """Lines of heads or of blocks over a common x."""

    title: str
    x: np.ndarray
    """``[X]``"""
    lines: np.ndarray
    """``[H or blocks, X]``; values that are not finite are not drawn."""
    references: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Label → ``[X]``: levels that the lines are judged against."""


def heights_for(heights: Heights, panels: Sequence[Panel]) -> Heights:
    """Return ``heights``, linear if no line has values for a logarithmic axis."""
    return replace(heights, log=heights.log and any((panel.lines > 0).any() for panel in panels))


def drawable(values: np.ndarray, heights: Heights) -> np.ndarray:
    """Replace ``values`` that cannot be drawn by NaN."""
    return np.where(np.isfinite(values) & ((values > 0) | (not heights.log)), values, np.nan)


def fit_heights(axes: Axes, heights: Heights, panels: Sequence[Panel]) -> None:
    """Give ``axes`` the y axis that all lines of all panels need."""
    drawn = [panel.lines for panel in panels] + [values for panel in panels for values in panel.references.values()]
    if heights.log:
        log_heights(axes, [*drawn, np.array([v for v in (heights.least, heights.most) if v is not None])])
        return
    finite = np.concatenate([values[np.isfinite(values)] for values in drawn])
    low = min([heights.least, *finite.tolist()] if heights.least is not None else finite.tolist(), default=0.0)
    high = max([heights.most, *finite.tolist()] if heights.most is not None else finite.tolist(), default=1.0)
    if low == high == 0:
        low, high = AROUND_ZERO
    margin = 0.05 * ((high - low) or 1.0)
    axes.set_ylim(low - margin, high + margin)


def draw_references(axes: Axes, panel: Panel, entries: dict[str, Any]) -> None:
    """Draw the references of a panel, and put them among the legend's ``entries``."""
    for look, (label, values) in zip(_REFERENCE_LOOKS, panel.references.items(), strict=False):
        # Predictions are judged where the lines are, so they lie on top of them.
        axes.plot(panel.x, values, **look, zorder=1 if look is REFERENCE else 4)
        entries.setdefault(label, legend_line(**look))
