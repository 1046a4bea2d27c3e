"""Figures for papers: a panel of a run over training by name, drawn by matplotlib at the size asked for."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from ..files import atomic_path
from ..findings.compared_runs import compare_configs
from ..findings.formatting import format_value, shorten
from ..findings.run_history import read_runs
from ..measure.records import RunDir
from .charts.lines import (
    Across,
    Line,
    end_of_path,
    facets_of,
    keys_of,
    lines_of,
    paths_of,
    run_variable,
    scales_of,
    x_ticks,
)
from .charts.scales import DEPTH, Scale, tick_text
from .charts.specs import ChartPanel, CurvePanel, HeatmapPanel, MatrixPanel, PageRun, axis_title, colours_of, roles_of
from .charts.stills import PALE, growing_shares, maps_of, n_columns
from .pictures.axes import turned_names
from .pictures.point_labels import spread_apart
from .pictures.style import (
    BASE_SIZE,
    INK,
    MUTED,
    PAPER,
    RUN_COLOURS,
    THEME,
    add_legend,
    figure_style,
    legend_line,
    pale_to_full,
)
from .run_page import page_runs
from .sections.chain import sections_over_training
from .sections.training_view import TrainingView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_NO_NAME = (PageRun(""),)
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
        height: inches; by default the page's proportion for the axes, and the legend on top.
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
    with _style(font_size or BASE_SIZE):
        _save(draw_panel(panel, page_runs(view.runs, compare_configs(view.runs)), width, height), out)


def save_panel(panel: ChartPanel, out: Path, *, width: float = 5.0) -> None:
    """Write a panel of curves or maps to ``out``, which ends in .pdf, .svg or .png, on white."""
    with _style(BASE_SIZE):
        _save(draw_panel(panel, width=width), out)


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
            _draw(part, panel, _NO_NAME)
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
    panel: ChartPanel,
    runs: Sequence[PageRun] = _NO_NAME,
    width: float = 5.0,
    height: float | None = None,
) -> Figure:
    """Draw a panel of curves or maps, as its still picture for the light theme, in the style that is set.

    Args:
        panel: the panel.
        runs: the runs, whose names a legend has if they are several. Of more runs than colours, the seeds of a group
            share one, or those with a role stand out.
        width: inches.
        height: inches; by default the axes have the page's proportion, and the figure grows by its legend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height or _height(panel, width)), layout="constrained")
    _draw(figure, panel, runs, grows=height is None)
    return figure


def _draw(
    figure: Figure | SubFigure,
    panel: ChartPanel,
    runs: Sequence[PageRun],
    *,
    grows: bool = True,
) -> None:
    if isinstance(panel, HeatmapPanel):
        _draw_maps(figure, panel)
    elif isinstance(panel, CurvePanel):
        _draw_curves(figure, panel, runs, grows=grows)
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
    n = len(facets_of(lines_of(panel))) if isinstance(panel, CurvePanel) else 1
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
    if line.pale:
        look |= {"alpha": PALE, "zorder": 1.9}
    if line.look == "control":
        return {**look, "linewidth": 1.1}
    return {**look, "marker": "o" if len(line.x) < 25 else "", "markersize": 2.5}


def _draw_curves(figure: Figure | SubFigure, panel: CurvePanel, runs: Sequence[PageRun], *, grows: bool) -> None:
    """Draw the lines of a panel, in small panels if it has them."""
    named = any("text" in series.axes for series in panel.series)
    lines = paths_of(panel) if named else lines_of(panel)
    outstanding = _outstanding(lines, runs)
    if outstanding:
        lines = [_among_many(line, list(outstanding)) for line in lines]
    elif len(runs) > len(RUN_COLOURS):
        lines = [_of_group(line, colours_of(runs)) for line in lines]
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
            axes.tick_params(labelbottom=True)
    y_scale, across = _set_axes(grid[0][0], panel, lines)
    for axes in grid[-1] if len(facets) == grid.size else grid.flat:
        axes.set_xlabel(axis_title(panel.x, log=across.unit > 0) if axes.get_visible() else "")
    shown = [replace(line, name=line.plain_name) for line in lines] if named else lines
    keys, scaled = keys_of([line for line in shown if not outstanding or line.run in {None, *outstanding}])
    tall = add_legend(figure, [*_run_entries(runs, outstanding), *_key_entries(keys, len(runs) > 1)], grows=grows)
    high = figure.bbox.height / figure.dpi
    if not grows and tall > 0.6 * high:
        raise UsageError(f"--height {high:g}: the legend takes {tall:.1f} inches; give {2 * tall:.1f} or more")
    unit = ", ".join(filter(None, [panel.unit, "log scale" if y_scale.log else ""]))
    # Beside the axes, not beside the legend too.
    figure.supylabel(unit, y=0.5 * (1 - tall / high), fontsize=grid[0][0].xaxis.label.get_fontsize())
    if scaled:
        _add_bar(figure, grid, scaled)
    if named:
        _name_paths(figure, grid[0][0], lines, y_scale, grows=grows)
    elif outstanding and len(facets) == 1:
        ends = {line.run: y_scale.share(float(line.y[-1])) for line in lines if line.run in outstanding}
        _write_beside(
            grid[0][0],
            [
                (words, ends[run], _plain(run_variable(i)))
                for i, (run, words) in enumerate(outstanding.items())
                if math.isfinite(ends.get(run, math.nan))
            ],
        )


def _outstanding(lines: Sequence[Line], runs: Sequence[PageRun]) -> dict[int, str]:
    """Return the runs that stand out among many with their roles: by their losses or, without any, by the panel's last
    value.
    """
    roles = [run.role for run in runs]
    if set(roles) <= {"", "first"}:
        last = {line.run: float(line.y[-1]) for line in lines}
        values = [last.get(run, math.nan) for run in range(len(runs))]
        roles = roles_of(values, [run.group for run in runs], "lowest", "highest")
    return {run: role for run, role in enumerate(roles) if role}


def _among_many(line: Line, outstanding: Sequence[int]) -> Line:
    """Return a line of a run that stands out in a colour of its own, or of another in grey."""
    if line.run is None:
        return line
    if line.run in outstanding:
        return replace(line, colour=run_variable(outstanding.index(line.run)))
    return replace(line, colour=run_variable(None), faint=True)


def _of_group(line: Line, places: Sequence[int | None]) -> Line:
    """Return a line of a run in the colour of its group."""
    if line.run is None or line.is_coloured:
        return line
    return replace(line, colour=run_variable(places[line.run]), blocks=None)


def _run_entries(runs: Sequence[PageRun], outstanding: Mapping[int, str]) -> list[tuple[str, Any]]:
    """Return names and colours of several runs, or of their groups, for a legend."""
    if not outstanding:
        places = colours_of(runs)
        is_shared = len(set(places)) < len(runs)
        names = {place: (run.group if is_shared else "") or run.name for place, run in zip(places, runs, strict=True)}
        several = names.items() if len(runs) > 1 else ()
        return [(name, legend_line(color=_plain(run_variable(place)))) for place, name in several]
    held = [
        (f"{words}: {shorten(runs[run].name, 40)}", legend_line(color=_plain(run_variable(i))))
        for i, (run, words) in enumerate(outstanding.items())
    ]
    others = legend_line(color=_plain(run_variable(None)), linewidth=0.8, alpha=0.5)
    return [*held, (f"{len(runs) - len(outstanding)} other runs", others)]


def _key_entries(keys: Sequence[Line], several_runs: bool) -> list[tuple[str, Any]]:
    """Return names and looks of lines for a legend; in ink where colours are those of runs."""
    from matplotlib.patches import Patch

    found = []
    for key in keys:
        look = _look(key)
        if several_runs and key.look != "control":
            look["color"] = INK
        if key.look != "dots":
            look["marker"] = ""  # over a dash it would hide it
        mark = Patch(color=_plain(key.colour), alpha=0.25) if key.look == "band" else legend_line(**look)
        found.append((shorten(key.name, 40), mark))
    return found


_LINE = 1.25
"""Distance of two lines of text, over the size of their letters."""


def _write_beside(axes: Axes, words: Sequence[tuple[str, float, str]]) -> None:
    """Write words in colours to the right of axes, at shares of the height or moved apart where they would overlap."""
    size = float(axes.yaxis.get_ticklabels()[0].get_fontsize())
    gap = _LINE * size / _points_high(axes)
    heights = spread_apart(np.array([share for _, share, _ in words]), gap, gap / 2, 1 - gap / 2)
    for (word, _, colour), height in zip(words, heights.tolist(), strict=True):
        axes.text(1.01, height, word, transform=axes.transAxes, va="center", fontsize=size, color=colour)


def _points_high(axes: Axes) -> float:
    """Lay out the figure, and return the height of axes in points."""
    figure = axes.figure.canvas.figure
    figure.draw_without_rendering()
    return axes.bbox.height / figure.dpi * 72


def _name_paths(figure: Figure | SubFigure, axes: Axes, lines: Sequence[Line], scale: Scale, *, grows: bool) -> None:
    """Write the texts of tokens beside both ends of their paths, moved apart where they would overlap.

    The figure grows if they have no room; if it cannot, only the highest ranks have names.
    """
    axes.tick_params(labelleft=False, left=False)
    axes.spines["left"].set_visible(False)
    size = float(axes.xaxis.get_ticklabels()[0].get_fontsize())
    high = _points_high(axes)
    if grows and _LINE * size * len(lines) > high:
        width, tall = figure.canvas.figure.get_size_inches()
        figure.canvas.figure.set_size_inches(width, tall + (_LINE * size * len(lines) - high) / 72)
        high = _points_high(axes)
    for end, x, side in ((0, 0, "right"), (-1, 1, "left")):
        named = sorted(lines, key=lambda line: line.y[end])[: int(high / size / _LINE + 0.01)]
        points = np.array([1 - scale.share(float(line.y[end])) for line in named])
        gap = _LINE * size / high
        apart = spread_apart(points, gap, gap / 2, 1 - gap / 2)
        for line, point, place in zip(named, points.tolist(), apart.tolist(), strict=True):
            away = x + (0.03 if end else -0.03)
            axes.plot([x, away], [point, place], color=MUTED, linewidth=0.4, transform=axes.transAxes, clip_on=False)
            look: dict[str, Any] = {"ha": side, "va": "center", "fontsize": size, "family": "monospace"}
            axes.text(away, place, end_of_path(line, end), transform=axes.transAxes, parse_math=False, **look)


def _set_axes(axes: Axes, panel: CurvePanel, lines: Sequence[Line]) -> tuple[Scale, Across]:
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
        low, high = np.arcsinh(across.values[[0, -1]] / across.unit)
        room = 0.03 * (high - low) or 1.0
        axes.set_xlim(*(across.unit * np.sinh([low - room, high + room])))
        shown = x_ticks(across)
        axes.set_xticks(shown, [tick_text(tick) for tick in shown])
    else:
        whole: Any = axes.xaxis.get_major_locator()
        whole.set_params(integer=panel.x in ("step", "layer", "position"))
        axes.xaxis.set_major_formatter(lambda value, _: tick_text(value))
    axes.minorticks_off()
    if panel.down:
        axes.invert_yaxis()
    return y_scale, across


def _add_bar(figure: Figure | SubFigure, grid: np.ndarray, blocks: tuple[int, int]) -> None:
    """Add the scale of the blocks' colours."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    ramp = LinearSegmentedColormap.from_list("depth", list(DEPTH))
    ticks = MaxNLocator(6, integer=True)
    figure.colorbar(ScalarMappable(Normalize(*blocks), ramp), ax=grid, label="block", ticks=ticks)


def _draw_maps(figure: Figure | SubFigure, panel: HeatmapPanel) -> None:
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


def _draw_matrix(figure: Figure | SubFigure, panel: MatrixPanel) -> None:
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
