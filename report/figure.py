"""Figures for papers: a panel of a run over training by name, drawn by matplotlib at the size asked for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..files import atomic_path
from ..findings.formatting import format_value, shorten
from ..findings.run_history import read_runs
from ..measure.records import RunDir
from .charts.scales import DEPTH, Scale, tick_text
from .charts.specs import ChartPanel, CurvePanel, HeatmapPanel, MatrixPanel, axis_title
from .charts.stills import (
    Line,
    end_of_path,
    facets_of,
    growing_shares,
    lines_of,
    maps_of,
    n_columns,
    names_of,
    paths_of,
    run_variable,
    scales_of,
    x_ticks,
)
from .pictures.axes import turned_names
from .pictures.point_labels import spread_apart
from .pictures.style import BASE_SIZE, INK, PAPER, THEME, figure_style, pale_to_full, plain_legend
from .sections.chain import sections_over_training
from .sections.training_view import TrainingView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

FORMATS = (".pdf", ".svg", ".png")
"""Endings of files that figures are written to."""

NAMES = {
    "loss": "loss-loss",
    "aggregation": "aggregation-discrepancy",
    "neurons": "neurons-count",
    "dominance": "dominance-ratio",
    "lock": "lock-cosine",
    "sink": "sink-mass",
    "direction": "direction-alignment",
    "contraction": "contraction-inter",
    "preference": "preference-ranks",
    "persistence": "persistence-correlation",
    "lineage": "lineage-z",
}
"""Short names of figures: the one of each section that says most. All others have the name of their CSV file."""


def save_figure(
    runs: Sequence[RunDir],
    name: str,
    out: Path,
    *,
    width: float = 5.0,
    height: float | None = None,
    font_size: float | None = None,
) -> None:
    """Write one figure of ``runs`` to ``out``, whose ending decides the format; the same input gives the same bytes.

    Args:
        runs: the runs to show.
        name: a section's (``sink``), or the one of a CSV file (``sink-map``).
        out: ends in .pdf, .svg or .png.
        width: inches.
        height: inches; by default in the proportion of the page's picture.
        font_size: points; by default 8.5.

    Raises:
        UsageError: there is no such figure, or it cannot be written so; the message lists those that there are.
        RunError: a file of a run is damaged; the message names it.
    """
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out {out}: a figure is written as {', '.join(FORMATS)}")
    key = NAMES.get(name, name)
    view = TrainingView(read_runs(runs))
    pictures = [picture for section in sections_over_training(view) for picture in section.pictures]
    wanted = [picture for picture in pictures if picture.name == key]
    if not wanted:
        raise UsageError(_no_such(name, [picture.name for picture in pictures]))
    if len(wanted) > 1:
        raise UsageError(f"{name}: a figure of one run and probe each; give one run (it has {len(wanted)} here)")
    panel = view.panel(wanted[0])
    assert panel is not None
    save_panel(
        panel, out, [run.name for run in view.runs], width=width, height=height, font_size=font_size or BASE_SIZE
    )


def save_panel(
    panel: ChartPanel,
    out: Path,
    runs: Sequence[str] = ("",),
    *,
    width: float = 5.0,
    height: float | None = None,
    font_size: float = BASE_SIZE,
) -> None:
    """Write a panel of curves or maps to ``out``, on white.

    Args:
        panel: the panel; it is drawn as its still picture, for the light theme.
        out: ends in .pdf, .svg or .png.
        runs: names of the runs, which a legend has if they are several.
        width: inches.
        height: inches.
        font_size: points.
    """
    with _style(font_size):
        _save(draw_panel(panel, runs, width, height), out)


def save_panels(panels: Sequence[ChartPanel], out: Path, *, across: bool = False, width: float = 5.0) -> None:
    """Write panels below one another, or side by side, to one file (`draw_panels`)."""
    with _style(BASE_SIZE):
        _save(draw_panels(panels, across=across, width=width), out)


def draw_panels(panels: Sequence[ChartPanel], *, across: bool = False, width: float = 5.0) -> Figure:
    """Draw panels below one another, or side by side if ``across``, each ``width`` inches wide and with its title."""
    with _style(BASE_SIZE):
        from matplotlib.figure import Figure

        heights = [_height(panel, width) * (0.8 if len(panels) > 2 else 1) for panel in panels]
        size = (width * len(panels), max(heights)) if across else (width, sum(heights))
        figure = Figure(figsize=size, layout="constrained")
        parts = figure.subfigures(*((1, len(panels)) if across else (len(panels), 1)), squeeze=False)
        for part, panel in zip(parts.flat, panels, strict=True):
            _draw(part, panel, ("",))
            part.axes[0].set_title(panel.title, parse_math=False)
    return figure


def _save(figure: Figure, out: Path) -> None:
    """Write a figure on white, without a date."""
    undated: dict[str, dict[str, Any]] = {
        ".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {"Software": None},
    }  # fmt: skip
    kind = out.suffix.lower()
    with atomic_path(out) as new:
        figure.savefig(new, format=kind[1:], dpi=300, facecolor="white", metadata=undated[kind])


@contextmanager
def _style(font_size: float) -> Iterator[None]:
    """Set the report's style with letters of this size."""
    with figure_style():
        from matplotlib import rc_context

        sizes: Any = dict.fromkeys(("font.size", "axes.labelsize", "axes.titlesize"), font_size)
        sizes |= dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), font_size * 8 / BASE_SIZE)
        # Papers want letters that can be searched, not outlines.
        with rc_context({**sizes, "pdf.fonttype": 42}):
            yield


def draw_panel(
    panel: ChartPanel, runs: Sequence[str] = ("",), width: float = 5.0, height: float | None = None
) -> Figure:
    """Draw a panel of curves or maps (`save_panel`) in the style that is set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height or _height(panel, width)), layout="constrained")
    _draw(figure, panel, runs)
    return figure


def _draw(figure: FigureBase, panel: ChartPanel, runs: Sequence[str]) -> None:
    if isinstance(panel, HeatmapPanel):
        _draw_maps(figure, panel)
    elif isinstance(panel, CurvePanel):
        _draw_curves(figure, panel, runs)
    elif isinstance(panel, MatrixPanel):
        _draw_matrix(figure, panel)
    else:
        raise UsageError(f"{panel.title}: no figure is made of it")


def pixels_of(panel: ChartPanel, width: float, dpi: float) -> np.ndarray:
    """Return the picture of a panel, ``[height, width, 3]`` bytes."""
    with figure_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = draw_panel(panel, width=width)
        figure.set_dpi(dpi)
        figure.set_facecolor("white")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _height(panel: ChartPanel, width: float) -> float:
    """Return the height of a panel in inches: more for many rows of small panels."""
    if isinstance(panel, MatrixPanel):
        return width
    n = len(facets_of(list(lines_of(panel)))) if isinstance(panel, CurvePanel) else 1
    columns = n_columns(n)
    return width * (0.56 if n == 1 else 0.1 + 0.7 / columns * -(-n // columns))


def _plain(colour: str) -> str:
    """Return a CSS colour of the light theme as matplotlib reads it."""
    found = re.fullmatch(r"var\((--[\w-]+)\)", colour)
    return THEME[found[1]][0] if found else colour


_MOST_NUMBERED = 10
"""Largest number of rows of a matrix with numbers in it."""
_STYLES = {"dashed": (0, (4, 1.6)), "dotted": (0, (1, 1.3)), "control": (0, (5, 2)), "dots": ""}


def _look(line: Line) -> dict[str, Any]:
    """Return the properties of a line."""
    look: dict[str, Any] = {"color": _plain(line.colour), "linestyle": _STYLES.get(line.look, "-")}
    if line.look == "dots":
        return {**look, "marker": "o", "markersize": 1.6 if len(line.x) > 120 else 3}
    if line.faint:
        return {**look, "linewidth": 0.8, "alpha": 0.5}
    if line.look == "control":
        return {**look, "linewidth": 1.1}
    return {**look, "marker": "o" if len(line.x) < 25 else "", "markersize": 2.5}


def _draw_curves(figure: FigureBase, panel: CurvePanel, runs: Sequence[str]) -> None:
    """Draw the lines of a panel, in small panels if it has them."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    named = any("text" in series.axes for series in panel.series)
    lines = paths_of(panel) if named else list(lines_of(panel))
    facets = facets_of(lines)
    columns = n_columns(len(facets))
    grid = figure.subplots(-(-len(facets) // columns), columns, squeeze=False, sharex=True, sharey=True)
    for axes in grid.flat[len(facets) :]:
        axes.set_visible(False)
    for i, (axes, facet) in enumerate(zip(grid.flat, facets, strict=False)):
        for line in lines:
            if line.facet not in ("", facet):
                continue
            if line.look == "band":
                axes.fill_between(line.x, -line.y, line.y, color=_plain(line.colour), alpha=0.25, linewidth=0)
            else:
                axes.plot(line.x, line.y, **_look(line))
        axes.set_title(facet)
        if i + columns >= len(facets):
            axes.set_xlabel(axis_title(panel.x))
            axes.tick_params(labelbottom=True)
    y_scale = _set_axes(grid[0][0], panel, lines)
    if named:
        _name_paths(grid[0][0], lines, y_scale)
        lines = [replace(line, name=line.plain_name) for line in lines]
    figure.supylabel(panel.unit, fontsize=grid[0][0].xaxis.label.get_fontsize())
    entries: dict[str, Any] = {}
    if len(runs) > 1:
        entries = {name: Line2D([], [], color=_plain(run_variable(i))) for i, name in enumerate(runs)}
    names, scaled = names_of(lines)
    by_name = {(line.name, "faint" if line.faint else line.look): line for line in lines}
    by_name |= {(line.plain_name, line.look): line for line in lines if line.blocks is not None}
    for name, look in names:
        line, colour = by_name[name, look], _plain("var(--ink)" if len(runs) > 1 else names[name, look])
        held = _look(line) | ({} if look == "control" else {"color": colour})
        entries[shorten(name, 40)] = (
            Patch(color=_plain(line.colour), alpha=0.25) if look == "band" else Line2D([], [], **held)
        )
    if entries:
        plain_legend(figure, list(entries.items()))
    if scaled:
        _add_bar(figure, grid, scaled)


def _name_paths(axes: Axes, lines: Sequence[Line], scale: Scale) -> None:
    """Write the texts of tokens beside both ends of their paths, moved apart where they would overlap."""
    for end, x, side in ((0, -0.03, "right"), (-1, 1.03, "left")):
        points = np.array([1 - scale.share(float(line.y[end])) for line in lines])
        for line, place in zip(lines, spread_apart(points, 1 / max(len(lines), 1), 0.0, 1.0).tolist(), strict=True):
            look: dict[str, Any] = {"ha": side, "va": "center", "fontsize": 6, "family": "monospace"}
            axes.text(x, place, end_of_path(line, end), transform=axes.transAxes, parse_math=False, **look)
    axes.tick_params(labelleft=False)
    axes.spines["left"].set_visible(False)


def _set_axes(axes: Axes, panel: CurvePanel, lines: Sequence[Line]) -> Scale:
    """Set scales, limits and ticks as the still picture has them."""
    y_scale, across = scales_of(panel, lines)
    if y_scale.log:
        axes.set_yscale("log")
    axes.set_ylim(y_scale.low, y_scale.high)
    ticks = y_scale.ticks()
    axes.set_yticks(ticks, [tick_text(tick) for tick in ticks])
    axes.minorticks_off()
    if across.unit:
        axes.set_xscale("asinh", linear_width=across.unit)
        shown = x_ticks(across)
        axes.set_xticks(shown, [tick_text(tick) for tick in shown])
    else:
        whole: Any = axes.xaxis.get_major_locator()
        whole.set_params(integer=panel.x in ("step", "layer", "position"))
        axes.xaxis.set_major_formatter(lambda value, _: tick_text(value))
    axes.minorticks_off()
    if panel.down:
        axes.invert_yaxis()
    return y_scale


def _add_bar(figure: FigureBase, grid: np.ndarray, blocks: tuple[int, int]) -> None:
    """Add the scale of the blocks' colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    ramp = LinearSegmentedColormap.from_list("depth", list(DEPTH))
    figure.colorbar(ScalarMappable(Normalize(*blocks), ramp), ax=grid, label="block")


def _draw_maps(figure: FigureBase, panel: HeatmapPanel) -> None:
    """Draw the maps of a panel side by side."""
    maps = maps_of(panel)
    grid = figure.subplots(1, len(maps), squeeze=False, sharey=True)
    image: Any = None
    for axes, (title, values, rows, columns) in zip(grid[0], maps, strict=True):
        extent = (columns[0] - 0.5, columns[-1] + 0.5, rows[-1] + 0.5, rows[0] - 0.5)
        low, high = panel.limits
        image = axes.imshow(values, cmap="cividis", vmin=low, vmax=high, aspect="auto", extent=extent)
        axes.set_title(title)
        axes.set_xlabel(axis_title(panel.columns))
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    grid[0][0].set_ylabel(axis_title(panel.rows))
    figure.colorbar(image, ax=grid, label=panel.unit)


def _draw_matrix(figure: FigureBase, panel: MatrixPanel) -> None:
    """Draw a matrix with its numbers in it; the colour grows with the logarithm."""
    axes = figure.subplots()
    values = np.asarray(panel.values, dtype=float)
    shares = np.where(np.isfinite(values), growing_shares(values, panel.pale, panel.full), np.nan)
    axes.imshow(shares, cmap=pale_to_full(), vmin=0, vmax=1)
    for row, column in np.argwhere(np.isfinite(values)) if max(values.shape) <= _MOST_NUMBERED else ():
        ink = PAPER if shares[row, column] > 0.6 else INK
        text = format_value(float(values[row, column]), panel.format)
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=6)
    axes.grid(visible=False)
    turned_names(axes, [shorten(name, 24) for name in panel.columns], 60)
    axes.set_yticks(range(len(panel.rows)), labels=[shorten(name, 24) for name in panel.rows], parse_math=False)
    axes.tick_params(length=0)


def _no_such(name: str, there: Sequence[str]) -> str:
    names = list(dict.fromkeys([*(short for short, key in NAMES.items() if key in there), *there]))
    if not names:
        return f"{name}: the runs have no figures yet; they come with the first snapshot after birth"
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{name}: no such figure; {hint}there are: {', '.join(names)}"
