"""Picture of a study of seeds: every figure's shares with their intervals, and every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...report.pictures.saving import save_both
from ...report.pictures.style import INK, MUTED, RUN_COLOURS, add_legend, in_our_style, legend_line, new_figure
from .file import SeedsStudy
from .results import SeedsResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OF = ("init", "data", "rest")
_COLOURS = (RUN_COLOURS[0], RUN_COLOURS[1], MUTED)


def draw_seeds(study: SeedsStudy, results: Sequence[SeedsResult], out: Path) -> list[str]:
    """Write ``figure`` as PNG and SVG; return the files' names."""
    return save_both(seeds_figure(study, results), out, "figure")


@in_our_style
def seeds_figure(study: SeedsStudy, results: Sequence[SeedsResult]) -> Figure:
    """Draw a row for each figure: left its values, a column of dots per birth; right the shares of its variance."""
    figure, grid = new_figure(540, 40 + 92 * len(results), len(results), 2, squeeze=False, width_ratios=[1.2, 1])
    for (values, shares), result in zip(grid, results, strict=True):
        _values(values, study, result)
        _shares(shares, result)
    for axes in grid[:-1, 1]:
        axes.set_xticklabels([])
    grid[-1, 0].set_xlabel("init_seed")
    grid[-1, 1].set_xlabel("share of the variance (%)")
    entries = [(f"data_seed {seed}", legend_line(**_dot(place))) for place, seed in enumerate(study.data_seeds)]
    add_legend(figure, entries)
    return figure


def _dot(place: int) -> dict[str, Any]:
    colour = RUN_COLOURS[place % len(RUN_COLOURS)]
    return {"linestyle": "none", "marker": "osD^vPXph*"[place % 10], "markersize": 3.6, "color": colour}


def _values(axes: Axes, study: SeedsStudy, result: SeedsResult) -> None:
    places = np.arange(len(study.init_seeds))
    n = len(study.data_seeds)
    for number in range(n):
        # Beside one another: equal values would hide each other.
        axes.plot(places + 0.5 * (number - (n - 1) / 2) / n, result.values_NM[:, number], **_dot(number))
    axes.set_xticks(places, labels=[str(seed) for seed in study.init_seeds])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_title(result.words, loc="left")


def _shares(axes: Axes, result: SeedsResult) -> None:
    axes.set_yticks(range(len(_OF)), labels=_OF)
    axes.set_ylim(len(_OF) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    if result.shares is None:
        axes.text(50, 1, "no shares: runs are missing", ha="center", va="center", color=MUTED, fontsize=7)
        return
    for place, (share, colour) in enumerate(zip(result.shares[:3], _COLOURS, strict=True)):
        axes.barh(place, 100 * share.value, height=0.6, color=colour, alpha=0.55)
        axes.plot([100 * share.low, 100 * share.high], [place, place], color=INK, linewidth=1.0, solid_capstyle="butt")
