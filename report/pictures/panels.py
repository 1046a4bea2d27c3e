"""Panels that share a scale: small multiples, lines of many blocks, and the axes that suit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .style import DEPTH, count, line, new, no_ticks, power, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 12
"""Panels of small multiples; of more blocks those are drawn that lie evenly between the first and the last."""


def spread(n: int, most: int = MAX_PANELS) -> list[int]:
    """At most ``most`` of ``n`` indices, evenly, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, most))})


def small_multiples(n: int, heights: tuple[float, float, float] = (200, 118, 96)) -> tuple[Figure, list[Axes]]:
    """``n`` panels of one scale, in one, two or three columns of such a height each, as many as stay readable."""
    columns = _columns(n)
    rows = -(-n // columns)
    figure, grid = new(360, 24 + heights[columns - 1] * rows, rows, columns, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.flat)
    for spare in panels[n:]:
        spare.set_visible(False)
    return figure, panels[:n]


def label_outside(panels: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    """Labels of small multiples: below the lowest panel of each column, and left of the first."""
    columns = _columns(len(panels))
    for i, axes in enumerate(panels):
        lowest, first = i + columns >= len(panels), i % columns == 0
        axes.tick_params(labelbottom=lowest, labelleft=first)
        axes.set_xlabel(xlabel if lowest else "")
        axes.set_ylabel(ylabel if first else "")


def same_scale(figures: Sequence[Figure], square: bool = False) -> None:
    """Give figures that stand side by side one y axis, and if ``square`` one x axis; maps keep theirs."""
    panels = [axes for figure in figures for axes in figure.axes if axes.get_visible() and not axes.images]
    with styled():  # new limits make new ticks
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


# ── axes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def token_axis(axes: Axes, length: int) -> None:
    """Positions as the number of tokens that a query there sees, t + 1, logarithmic."""
    axes.set_xscale("log")
    axes.set_xlim(0.85, length * 1.15)
    log_ticks(axes.xaxis, 1, length)
    axes.set_xlabel("t + 1")


def position_axis(axes: Axes, length: int) -> None:
    """Positions from 0, logarithmic behind 1, so that the first ones can be told apart."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.35)
    parts = (1,) if length > 3000 else (1, 3)
    ticks = [0, *(part * 10**i for i in range(7) for part in parts if part * 10**i < length)]
    axes.set_xticks(ticks, labels=[count(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(no_ticks())
    axes.set_xlim(-0.15, length)
    axes.set_xlabel("position")


def whole(axis: Any) -> None:
    """Ticks at whole numbers only."""
    axis.get_major_locator().set_params(integer=True)


def log_ticks(axis: Any, low: float, high: float) -> None:
    """Three ticks at least between ``low`` and ``high`` on a logarithmic axis, all of them labelled."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    every = max(1, (len(decades) + 3) // 6)
    wanted = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
    for parts in wanted:
        ticks = [part * 10.0**d for d in decades if d % every == 0 for part in parts]
        ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) >= 3:
            break
    axis.set_ticks(ticks, labels=[power(tick) or f"{tick:g}" for tick in ticks])
    axis.set_minor_locator(no_ticks())


def log_heights(axes: Axes, values: Sequence[np.ndarray], least: float | None = None) -> None:
    """A logarithmic y axis around all positive ``values``, down to ``least`` if they do not go lower."""
    every = np.concatenate([np.ravel(v) for v in values])
    every = every[np.isfinite(every) & (every > 0)]
    low, high = (float(every.min()), float(every.max())) if len(every) else (1.0, 10.0)
    low = min(low, high / 3, high if least is None else least)
    margin = (high / low) ** 0.06
    axes.set_yscale("log")
    axes.set_ylim(low / margin, high * margin)
    log_ticks(axes.yaxis, low / margin, high * margin)


def depth_colours(n_blocks: int) -> list[Any]:
    """Colours of the blocks, first to last."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("depth", list(DEPTH))
    return [ramp(i / max(n_blocks - 1, 1)) for i in range(n_blocks)]


def depth_entries(n_blocks: int) -> list[tuple[str, Any]]:
    """What a legend says about blocks: four of them at most."""
    colours = depth_colours(n_blocks)
    return [(f"block {i + 1}", line(color=colours[i])) for i in spread(n_blocks, 4)]
