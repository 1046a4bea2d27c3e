"""Style of all pictures: palette, type, line styles and legends.

matplotlib is imported on use: everything else works without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

# ── palette ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Light form → dark form. Run colours after Okabe and Ito, the pale ones darkened until each has a contrast of 3:1.
INK, MUTED, GRID, PAPER = "#23272e", "#7b8087", "#dcdfe4", "#fefefe"
RUN_COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#8a6d00", "#0092b8")
_DARK_RUN_COLOURS = ("#5fb0ea", "#ff9250", "#3fc79a", "#e48fc4", "#d6b441", "#62cdea")
THEME = {
    "--ink": (INK, "#e3e6ea"),
    "--muted": (MUTED, "#969ca5"),
    "--grid": (GRID, "#343a43"),
    "--paper": (PAPER, "#16191d"),
    **{f"--run-{i}": pair for i, pair in enumerate(zip(RUN_COLOURS, _DARK_RUN_COLOURS, strict=True))},
}
"""CSS variable → (light, dark): variables that a page must define for its pictures."""

# First to last block: hues of one middling lightness, readable on white and on black.
DEPTH = ("#3b82c4", "#8f6cc0", "#c9577f", "#d9722b")
REFERENCE: dict[str, Any] = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.1}
BASE_SIZE, TICK_SIZE = 8.5, 8
"""Sizes in points of letters, and of those at ticks."""
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.titlepad": 5,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": BASE_SIZE,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "legend.borderaxespad": 0.2,
    "legend.columnspacing": 1.4,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.5,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "birthmark",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": TICK_SIZE,
    "xtick.minor.size": 0,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": TICK_SIZE,
    "ytick.minor.size": 0,
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Apply the report's settings around drawing *and* saving, since ticks are created as late as that."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UsageError("figures need matplotlib: pip install matplotlib") from None
    if matplotlib.rcParams["svg.hashsalt"] == _STYLE["svg.hashsalt"]:
        yield  # it is set already: setting it takes a millisecond
        return
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Layout asks a font that lacks some tokens' letters; the page's fonts have them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def in_figure_style(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a function that draws a figure, so that it draws in the report's style."""

    @wraps(draw)
    def in_style(*args: Any, **kwargs: Any) -> Figure:
        with figure_style():
            return draw(*args, **kwargs)

    return in_style


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **share: Any) -> tuple[Figure, Any]:
    """Make a figure of a size in points, with axes like those of ``Figure.subplots``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
    return figure, figure.subplots(rows, columns, **share)


def run_colour(run: int) -> str:
    """Return the colour of the ``run``-th run, the same in every picture."""
    return RUN_COLOURS[run % len(RUN_COLOURS)]


def add_legend(figure: Figure | SubFigure, entries: Sequence[tuple[str, Any]], *, grows: bool = True) -> float:
    """Add a legend above the axes, with as many columns as have room; return its height in inches.

    Args:
        figure: figure with a constrained layout, or a part of one, which never grows.
        entries: words, with their line or area.
        grows: add the legend's height to the figure's.
    """
    from matplotlib.figure import Figure

    if not entries:
        return 0.0
    words, marks = zip(*entries, strict=True)
    for rows in range(1, len(entries) + 1):
        columns = -(-len(entries) // rows)
        legend = figure.legend(marks, words, loc="outside upper left", ncols=columns)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a run's name may have a dollar sign
        box = legend.get_window_extent()
        if columns == 1 or box.width <= figure.bbox.width:
            break
        legend.remove()
    tall = float(box.height / figure.dpi)
    if grows and isinstance(figure, Figure):
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + tall)
    return tall


def legend_line(**look: Any) -> Any:
    """Make a line that only a legend shows."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def pale_to_full() -> Any:
    """Make the colours for a map of numbers: pale grey, then the palette's blues."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("pale to full", ["#f1f3f5", RUN_COLOURS[5], RUN_COLOURS[0]])
