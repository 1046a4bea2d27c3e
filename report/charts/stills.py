"""Still pictures of panels, for print and for browsers without script."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from ...findings.formatting import format_value, shorten
from ..pictures.panels import least_and_greatest
from ..pictures.point_labels import place_labels, spread_apart
from .lines import (
    Across,
    Line,
    end_of_path,
    facets_of,
    keys_of,
    lines_of,
    paths_of,
    run_variable,
    scales_of,
    with_run_names,
    x_ticks,
)
from .scales import CIVIDIS, Scale, cell_colour, depth_colour, fitting_scale, png_of_cells, tick_text
from .specs import (
    MARKS,
    PICTURED,
    ChartPanel,
    CurvePanel,
    HeatmapPanel,
    MatrixPanel,
    PageRun,
    Point,
    RankingPanel,
    ScatterPanel,
    Series,
    axis_title,
)  # fmt: skip

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 6, 6, 20
_GAP, _DIGIT = 10, 6.0
"""Distance between small panels that stand side by side, and the width of a digit at an axis."""
_MOST_POINTS = 120
"""Largest number of points per line: a still picture is small."""
_MANY_LINES = 12
_MOST_NUMBERED = (16, 12)
"""Largest numbers of rows and columns of a map with numbers in its cells; a larger map is a picture."""
_DASHES = {"dashed": "5 3", "dotted": "1.5 2.5", "control": "4 3"}
_KEY_LOOKS = {"dots": "dot"}
PALE = 0.4
"""Opacity of the first of two steps."""


def still(panel: ChartPanel, description: str = "", runs: Sequence[PageRun] = ()) -> Markup:
    """Render a panel as HTML that needs no script.

    Args:
        panel: the panel.
        description: words for screen readers; by default the title.
        runs: runs of the page.
    """
    if isinstance(panel, RankingPanel):
        return _ranking(panel, runs)
    if isinstance(panel, MatrixPanel):
        return _matrix(panel)
    described = f'role="img" aria-label="{escape(description or panel.title)}"'
    if isinstance(panel, CurvePanel):
        named = any("text" in series.axes for series in panel.series)
        return (_paths if named else _curves)(panel, described, runs)
    return _heatmap(panel, described) if isinstance(panel, HeatmapPanel) else _scatter(panel, described)


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Frame:
    """The rectangle of a plot within a picture, and the places of shares of its axes."""

    left: float = _LEFT
    top: float = _TOP
    width: float = _WIDTH - _LEFT - _RIGHT
    height: float = _HEIGHT - _TOP - _BOTTOM
    down: bool = False

    def x(self, share: float) -> float:
        """Return the place of a share of the x axis."""
        return self.left + share * self.width

    def y(self, share: float) -> float:
        """Return the place of a share of the y axis."""
        return self.top + (share if self.down else 1 - share) * self.height


def n_columns(n: int) -> int:
    """Return the columns that ``n`` small panels stand in."""
    return 1 if n == 1 else 2 if n <= 4 else 3


def _frames(n: int, *, titled: bool) -> tuple[list[_Frame], float]:
    """Lay out small panels, with room for their titles if they have any; return them with the height of all."""
    columns = n_columns(n)
    height, title = (_HEIGHT - _TOP - _BOTTOM, 80, 62)[columns - 1], 14 if titled else 0
    width = (_WIDTH - _LEFT - _RIGHT - _GAP * (columns - 1)) / columns
    rows = -(-n // columns)
    frames = [
        _Frame(
            _LEFT + (i % columns) * (width + _GAP), _TOP + title + (i // columns) * (height + title + 4), width, height
        )
        for i in range(n)
    ]
    return frames, _TOP + rows * (height + title + 4) - 4 + _BOTTOM


def _curves(panel: CurvePanel, described: str, runs: Sequence[PageRun]) -> Markup:
    """Draw lines, in a small panel for each block if there are heads."""
    lines = with_run_names(lines_of(panel), runs)
    if not lines:
        return Markup('<p class="note">Nothing to draw yet.</p>')
    y_scale, across = scales_of(panel, lines)
    facets = facets_of(lines)
    frames, height = _frames(len(facets), titled=any(facets))
    columns = n_columns(len(facets))
    parts = []
    for i, (facet, frame) in enumerate(zip(facets, frames, strict=True)):
        frame = replace(frame, down=panel.down)
        parts.append(_grid(y_scale, frame, labelled=i % columns == 0, about=4 if columns == 1 else 3))
        if i + columns >= len(facets):
            # Beside another panel a number ends before that one's begins.
            parts.append(_x_ticks(across, frame, 0.14 * columns, _GAP / 2 - 1 if columns > 1 else math.inf))
        if facet:
            parts.append(f'<text class="name" x="{frame.left:.1f}" y="{frame.top - 4:.1f}">{escape(facet)}</text>')
        inside = [line for line in lines if line.facet in (facet, "")]
        many = len(lines) > _MANY_LINES
        parts += [_draw_line(line, across, y_scale, frame, many=many) for line in inside]
    title = axis_title(panel.x, log=panel.x_log)
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{height + 8:.0f}" text-anchor="end">{escape(title)}</text>')
    picture = f'<svg viewBox="0 0 {_WIDTH} {height + 12:.0f}" {described}>{"".join(parts)}</svg>'
    return Markup(picture + _keys(lines))


def _keys(lines: Sequence[Line]) -> str:
    """Render the names of lines, and the scale of the blocks' colours."""
    shown, scaled = keys_of(lines)
    scale = _scale(f"block {scaled[0]}", str(scaled[1]), [depth_colour(i / 6) for i in range(7)]) if scaled else ""
    keys = "".join(
        f'<span><i class="{"faint" if key.faint else escape(_KEY_LOOKS.get(key.look, key.look))}" '
        f'style="--c:{key.colour}{f";opacity:{PALE}" if key.pale else ""}"></i>{escape(shorten(key.name, 40))}</span>'
        for key in shown
    )
    return scale + (f'<div class="keys">{keys}</div>' if keys else "")


def _scale(low: str, high: str, colours: Sequence[str]) -> str:
    """Render a labelled gradient."""
    ramp = f"background:linear-gradient(to right,{','.join(colours)})"
    return f'<div class="scale">{escape(low)}<i style="{ramp}"></i>{escape(high)}</div>'


def _grid(scale: Scale, frame: _Frame, *, labelled: bool, about: int) -> str:
    """Draw the lines of the grid, with their numbers if ``labelled``."""
    parts = []
    for tick in scale.ticks(about):
        y, right = frame.y(scale.share(tick)), frame.left + frame.width
        parts.append(f'<line class="g" x1="{frame.left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        if labelled:
            parts.append(f'<text x="{frame.left - 5:.1f}" y="{y + 3:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    return "".join(parts)


def _x_ticks(across: Across, frame: _Frame, apart: float, beyond: float = math.inf) -> str:
    """Write the numbers of an x axis, none of which reaches further than ``beyond`` past the frame."""
    foot = frame.top + frame.height + 13
    parts, taken = [], -math.inf
    for value in x_ticks(across, apart):
        text = tick_text(value)
        half = _DIGIT * len(text) / 2
        x = min(max(frame.x(across.share(value)), frame.left - beyond + half), frame.left + frame.width + beyond - half)
        if x - half > taken:
            parts.append(f'<text x="{x:.1f}" y="{foot:.1f}" text-anchor="middle">{text}</text>')
            taken = x + half
    return "".join(parts)


def _draw_line(line: Line, across: Across, scale: Scale, frame: _Frame, *, many: bool) -> str:
    """Draw a line, with a dot at each point if there are few lines and points."""
    if line.look == "dots":
        xs, ys = line.x.tolist(), line.y.tolist()
        shown = [(frame.x(across.share(x)), frame.y(scale.share(y))) for x, y in zip(xs, ys, strict=True)]
        # Dots are the round ends of lines of no length.
        d = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in shown if math.isfinite(y))
        wide = 2.2 if len(shown) > _MOST_POINTS else 4
        return f'<path class="l" d="{d}" stroke="{line.colour}" style="stroke-width:{wide};stroke-linecap:round"/>'
    most = _MOST_POINTS // 2 if many else _MOST_POINTS
    keep = least_and_greatest(line.y, most)
    points = [(frame.x(across.share(float(line.x[i]))), frame.y(scale.share(float(line.y[i])))) for i in keep]
    if line.look == "band":
        there = [(x, y, frame.y(scale.share(-float(line.y[i])))) for i, (x, y) in zip(keep, points, strict=True)]
        d = ""
        for is_finite, part in groupby(there, lambda p: all(map(math.isfinite, p))):
            held = list(part)
            if is_finite:
                outline = [(x, y) for x, y, _ in held] + [(x, y) for x, _, y in reversed(held)]
                d += f"{path_of(outline)}Z"
        return f'<path d="{d}" fill="var(--muted)" opacity=".25"/>' if d else ""
    d = path_of(points)
    dash = f' stroke-dasharray="{_DASHES[line.look]}"' if line.look in _DASHES else ""
    faint = ' opacity=".45" style="stroke-width:.8"' if line.faint else f' opacity="{PALE}"' if line.pale else ""
    path = f'<path class="l" d="{d}" stroke="{line.colour}"{dash}{faint}/>' if d else ""
    lone = len(line.x) == 1
    if not lone and (many or len(points) >= 25 or line.look == "control" or line.faint):
        return path
    dots = [(x, y) for x, y in points if math.isfinite(y)]
    dot = f'r="1.8" fill="{line.colour}"{faint}'
    return path + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" {dot}/>' for x, y in dots)


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """Return the path of a line through points, which begins anew behind each that is not finite. A point alone is a
    line of no length, whose round ends are a dot.
    """
    parts = []
    for is_finite, part in groupby(points, lambda point: math.isfinite(point[1])):
        held = [f"{x:.1f} {y:.1f}" for x, y in part]
        if is_finite:
            parts.append(f"M{'L'.join(held)}{'h0' if len(held) == 1 else ''}")
    return "".join(parts)


_NAME_WIDTH, _NAME_GAP = 100, 11.0
"""Room for a token's name beside its path, and the distance between two names."""


def _paths(panel: CurvePanel, described: str, runs: Sequence[PageRun]) -> Markup:
    """Draw the ranks of tokens over training, with every token's text at both ends."""
    lines = with_run_names(paths_of(panel), runs)
    y_scale, across = scales_of(panel, lines)
    high = max(190.0, _NAME_GAP * len(lines))
    frame = _Frame(_NAME_WIDTH, 10, _WIDTH - 2 * _NAME_WIDTH, high, panel.down)
    parts = [_x_ticks(across, frame, 0.3)]
    for end, side, away in ((0, "end", -1), (-1, "start", 1)):
        points = [frame.y(y_scale.share(float(line.y[end]))) for line in lines]
        heights = spread_apart(np.array(points), _NAME_GAP, frame.top, frame.top + high)
        x = frame.x(0.0 if end == 0 else 1.0)
        for line, point, height in zip(lines, points, heights.tolist(), strict=True):
            text = escape(end_of_path(line, end, isolated=True))
            parts.append(f'<path class="g" d="M{x:.1f} {point:.1f}L{x + 9 * away:.1f} {height:.1f}" fill="none"/>')
            place = f'x="{x + 11 * away:.1f}" y="{height + 3:.1f}" text-anchor="{side}"'
            parts.append(f'<text class="path" {place}>{text}</text>')
    parts += [_draw_line(line, across, y_scale, frame, many=False) for line in lines]
    foot = f'<text x="{frame.x(1):.1f}" y="{high + 34:.0f}" text-anchor="end">{escape(axis_title(panel.x))}</text>'
    named = [replace(line, name=line.plain_name) for line in lines]
    return Markup(f'<svg viewBox="0 0 {_WIDTH} {high + 38:.0f}" {described}>{"".join(parts)}{foot}</svg>{_keys(named)}')


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def maps_of(panel: HeatmapPanel) -> list[tuple[str, np.ndarray, list[Any], list[Any]]]:
    """Return title, values, rows and columns of the maps that are shown at first: of the first run and probe.

    Each name has one, or two if it was measured at two steps, otherwise at the last.
    """
    found = []
    first: dict[str, Series] = {}
    for series in panel.series:
        if (series.run, series.probe) == (panel.series[0].run, panel.series[0].probe):
            first.setdefault(series.name, series)
    for series in first.values():
        values, axes = np.asarray(series.values, dtype=float), list(series.axes)
        steps = list(series.axes.get("step", ()))
        rows, columns = (list(series.axes[name]) for name in (panel.rows, panel.columns))
        for when in (0, 1) if len(steps) == 2 else (-1,):
            cells = values.take(when, axes.index("step")) if steps else values
            said = f"step {steps[when]:,}" if len(steps) > 1 else ""
            if axes.index(panel.rows) > axes.index(panel.columns):
                cells = cells.T
            found.append((", ".join(filter(None, [series.name, said])), cells, rows, columns))
    return found


def _heatmap(panel: HeatmapPanel, described: str) -> Markup:
    """Draw the maps of a panel, side by side."""
    if not panel.series:
        return Markup('<p class="note">Nothing to draw yet.</p>')
    maps = maps_of(panel)
    low, high = panel.limits
    made = []
    for title, values, rows, columns in maps:
        if len(rows) > _MOST_NUMBERED[0] or len(columns) * len(maps) > _MOST_NUMBERED[1]:
            drawn = _map((values - low) / (high - low), rows, columns, panel, described)
        else:
            cells = [["" if not math.isfinite(v) else _short(v) for v in row] for row in values]
            looks = [[_look_of((v - low) / (high - low)) for v in row] for row in values]
            drawn = _cells(rows, columns, cells, looks, panel.rows, panel.columns)
        heading = f'<p class="when">{escape(title)}</p>' if title else ""
        made.append(Markup(f"<div>{heading}{drawn}</div>") if len(maps) > 1 else Markup(heading) + drawn)
    return Markup('<div class="maps">') + Markup("").join(made) + Markup("</div>") if len(maps) > 1 else made[0]


def _map(
    shares: np.ndarray, rows: Sequence[Any], columns: Sequence[Any], panel: HeatmapPanel, described: str
) -> Markup:
    """Draw a map of many cells as a picture, with a scale of its colours."""
    data = base64.b64encode(png_of_cells(shares)).decode()
    across, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP
    parts = [
        f'<image x="{_LEFT}" y="{_TOP}" width="{across}" height="{tall}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>'
    ]
    for i in _labelled(rows):
        y = _TOP + (i + 0.5) / len(rows) * tall
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{escape(rows[i])}</text>')
    for i in _labelled(columns):
        x = _LEFT + (i + 0.5) / len(columns) * across
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 7}" text-anchor="middle">{escape(columns[i])}</text>')
    words = {"layer": "block"}
    foot = f"{words.get(panel.rows, panel.rows)} by {words.get(panel.columns, panel.columns)}"
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT + 8}" text-anchor="end">{escape(foot)}</text>')
    low, high = (tick_text(limit) for limit in panel.limits)
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT + 12}" {described}'
    return Markup(f"<svg {box}>{''.join(parts)}</svg>{_scale(low, high, CIVIDIS)}")


def _labelled(names: Sequence[Any]) -> list[int]:
    """Return the indices of rows or columns with names: the first, the last and round numbers between."""
    last = len(names) - 1
    every = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, last + 1) if last / size <= 6)
    return [0, *(i for i in range(1, last) if names[i] % every == 0 and every / 2 <= i <= last - every / 2), last]


def _short(value: float) -> str:
    return format_value(value, ".2f" if abs(value) < 10 else ".3g")


def _look_of(share: float) -> str:
    if not math.isfinite(share):
        return ""
    ground, ink = cell_colour(share)
    return f"background:{ground};color:{ink}"


def _cells(
    rows: Sequence[object],
    columns: Sequence[object],
    cells: Sequence[Sequence[str]],
    looks: Sequence[Sequence[str]],
    row_name: str,
    column_name: str,
    tips: Sequence[Sequence[str]] | None = None,
) -> Markup:
    words = {"layer": "block"}
    head = f"{words.get(row_name, row_name)} \\ {words.get(column_name, column_name)}" if row_name else ""
    parts = [f'<table class="cells"><thead><tr><th>{escape(head)}</th>']
    parts += [f'<th scope="col">{escape(column)}</th>' for column in columns]
    parts.append("</tr></thead><tbody>")
    for i, row in enumerate(rows):
        parts.append(f'<tr><th scope="row">{escape(row)}</th>')
        for j in range(len(columns)):
            tip = f' data-tip="{escape(tips[i][j])}"' if tips else ""
            parts.append(f'<td style="{looks[i][j]}"{tip}>{escape(cells[i][j])}</td>')
        parts.append("</tr>")
    return Markup("".join([*parts, "</tbody></table>"]))


def _matrix(panel: MatrixPanel) -> Markup:
    values = np.asarray(panel.values, dtype=float)
    cells = [["" if not math.isfinite(v) else format_value(v, panel.format) for v in row] for row in values]
    shares = growing_shares(values, panel.pale, panel.full)
    looks = [[_growing(*cell) for cell in zip(*rows, strict=True)] for rows in zip(values, shares, strict=True)]
    table = _cells(panel.rows, panel.columns, cells, looks, "", "", panel.tips)
    legend = f'<p class="note">{escape(panel.legend)}</p>' if panel.legend else ""
    return Markup(f'<div class="scroll">{table}</div>{legend}')


def growing_shares(values: np.ndarray, pale: float, full: float) -> np.ndarray:
    """Return the shares of full colour of a matrix's cells: 0 up to ``pale``, then growing with the logarithm; NaN
    stays.
    """
    least = max(pale, 1e-12)
    return np.log(np.clip(np.abs(values), least, full) / least) / (math.log(full / least) or 1.0)


def _growing(value: float, share: float) -> str:
    """Return the colour of a cell."""
    if not math.isfinite(value):
        return ""
    percent = round(6 + 84 * share)
    ink = ";color:#fff" if percent > 60 else ""
    tone = "var(--matrix-plus)" if value >= 0 else "var(--matrix-minus)"
    return f"background:color-mix(in srgb,{tone} {percent}%,var(--paper)){ink}"


def _ranking(panel: RankingPanel, runs: Sequence[PageRun]) -> Markup:
    """Render the lists of the first and the last step of every run, or of the first of many."""
    ranked = sorted({ranking.run for ranking in panel.rankings})
    parts = []
    for run in ranked[:PICTURED]:
        held = sorted((r for r in panel.rankings if r.run == run), key=lambda r: r.step)
        for ranking in held if len(held) < 2 else (held[0], held[-1]):
            when = panel.start if ranking.step == 0 else f"step {ranking.step:,}"
            parts.append(ranking_table(panel, ranking.rows, f"{runs[run].name}, {when}" if len(runs) > 1 else when))
    note = f"Shown: {PICTURED} of {len(ranked)} runs." if len(ranked) > PICTURED else ""
    lists = Markup('<div class="lists">') + Markup("").join(parts) + Markup("</div>")
    return lists + (Markup('<p class="note">{}</p>').format(note) if note else "")


def ranking_table(panel: RankingPanel, rows: Sequence[Sequence[str]], when: str) -> Markup:
    """Render one list as a table."""
    head = "".join(
        f'<th scope="col"{" class=text" if i in panel.texts else ""}>{escape(heading)}</th>'
        for i, heading in enumerate(panel.headings)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="text"><span class="token">{escape(cell)}</span></td>'
            if i in panel.texts
            else f"<td>{escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    caption = f"<caption>{escape(when)}</caption>"
    return Markup(f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


# ── scatter, and the same points as a list for narrow screens ─────────────────────────────────────────────────────────


def _point_list(panel: ScatterPanel, points: Sequence[Point]) -> Markup:
    """Render the points as a table with their numbers, the lowest x first; the page shows it where it is narrow."""
    rows = "".join(
        f'<tr><td class="text">{mark_of(p.marker, run_variable(p.colour))}'
        f"{escape(p.name)}</td>{_with_ends(p.x, p.x_error)}{_with_ends(p.y, p.y_error)}</tr>"
        for p in sorted(points, key=lambda p: (p.x, p.y))
    )
    labels = "".join(f"<th>{escape(label)}</th>" for label in (panel.x_label, panel.y_label))
    head = f'<th class="text"></th>{labels}'
    return Markup(f'<table class="points keys"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>')


def mark_of(marker: str, colour: str) -> Markup:
    """Draw the marker of points for a key."""
    drawn = f'<path d="{MARKS[marker]}" fill="{colour}"/>'
    style = "display:inline-block;width:.95em;margin-right:.4em"
    return Markup(f'<svg class="mark" viewBox="-7 -7 14 14" style="{style}">{drawn}</svg>')


def _with_ends(value: float, ends: tuple[float, float] | None) -> str:
    beside = f"<small>{' – '.join(format_value(end, '.3f') for end in ends)}</small>" if ends else ""
    return f"<td>{format_value(value, '.3f')}{beside}</td>"


def _scatter(panel: ScatterPanel, described: str) -> Markup:
    points = [p for p in panel.points if math.isfinite(p.x) and math.isfinite(p.y)]
    width, height, foot = 2 * _WIDTH, 2 * _HEIGHT, 34
    # The name of the y axis stands above its highest number.
    top_y = 20
    if not points:
        return Markup('<p class="note">Nothing to draw yet.</p>')
    x_scale = fitting_scale([v for p in points for v in (p.x, *(p.x_error or ()))], panel.x_log)
    y_scale = fitting_scale([v for p in points for v in (p.y, *(p.y_error or ()))], panel.y_log)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + x_scale.share(x) * (width - _LEFT - 10),
            height - foot - y_scale.share(y) * (height - foot - top_y),
        )

    parts = []
    for tick in y_scale.ticks(6):
        _, y = place(points[0].x, tick)
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    for tick in x_scale.ticks(6):
        x, _ = place(tick, points[0].y)
        parts.append(f'<text x="{x:.1f}" y="{height - foot + 14}" text-anchor="middle">{tick_text(tick)}</text>')
    parts.append(f'<text x="{width - 10}" y="{height - 4}" text-anchor="end">{escape(panel.x_label)}</text>')
    parts.append(f'<text x="4" y="8">{escape(panel.y_label)}</text>')
    at = np.array([place(p.x, p.y) for p in points])
    sizes = np.array([[6.0 * len(shorten(p.name, 28)) + 2, 12.0] for p in points])
    # Names keep clear of the bars too.
    bars = []
    for p, (x, y) in zip(points, at, strict=True):
        if p.x_error and all(map(math.isfinite, p.x_error)):
            bars.append((place(p.x_error[0], p.y)[0], y - 1, place(p.x_error[1], p.y)[0], y + 1))
        if p.y_error and all(map(math.isfinite, p.y_error)):
            bars.append((x - 1, place(p.x, p.y_error[1])[1], x + 1, place(p.x, p.y_error[0])[1]))
    taken = np.array(bars) if bars else None
    corners = place_labels(at, sizes, (_LEFT, top_y, width - 10, height - foot), 9, taken)
    for p, (x, y), (left, top), size in zip(points, at, corners, sizes, strict=True):
        colour = run_variable(p.colour)
        for ends, across in ((p.x_error, True), (p.y_error, False)):
            if ends and all(map(math.isfinite, ends)):
                a, b = (place(v, p.y) if across else place(p.x, v) for v in ends)
                parts.append(f'<path class="l" d="M{a[0]:.1f} {a[1]:.1f}L{b[0]:.1f} {b[1]:.1f}" stroke="{colour}"/>')
        places = (f"{label}: {format_value(at, '.4g')}" for label, at in ((panel.x_label, p.x), (panel.y_label, p.y)))
        tip = escape("\n".join(filter(None, [p.name, *places, p.tip])))
        middle = (left + size[0] / 2, top + size[1] / 2)
        if math.dist(middle, (x, y)) > 12 + size[0] / 2:
            parts.append(f'<line class="g" x1="{x:.1f}" y1="{y:.1f}" x2="{middle[0]:.1f}" y2="{middle[1]:.1f}"/>')
        mark = f'class="mark" d="{MARKS[p.marker]}" transform="translate({x:.1f} {y:.1f})" fill="{colour}"'
        parts.append(f'<path {mark} data-tip="{tip}"/>')
        parts.append(f'<text class="name" x="{left:.1f}" y="{top + 9.5:.1f}">{escape(shorten(p.name, 28))}</text>')
    box = f'<svg class="scatter" viewBox="0 0 {width} {height}" {described}>'
    return _point_list(panel, points) + Markup(f"{box}{''.join(parts)}</svg>")
