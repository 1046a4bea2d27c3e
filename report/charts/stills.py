"""Still pictures of panels, for print and for browsers without script."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from ..pictures.labels import place_labels
from ..pictures.panels import blocks_of_change
from ..pictures.style import RUN_COLOURS
from ..text import format_value, shorten
from .scales import CIVIDIS, Scale, cell_colour, depth_colour, fitting_scale, png_of_cells, tick_text
from .specs import ChartPanel, CurvePanel, HeatmapPanel, MatrixPanel, Point, RankingPanel, ScatterPanel, axis_title

_WIDTH, _HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 6, 6, 20
_MOST_POINTS = 120
"""Largest number of points per line: a still picture is small."""
_MANY_LINES = 12
_MOST_LINES = 24
"""Largest number of blocks with lines in a still picture; among more, those where the numbers change most are drawn."""
MOST_NAMED = 6
"""Largest number of blocks that keys name; more of them have a scale of colours."""
_MOST_NUMBERED = (16, 12)
"""Largest numbers of rows and columns of a map with numbers in its cells; a larger map is a picture."""
_DASHES = {"dashed": "5 3", "dotted": "1.5 2.5", "control": "4 3"}


def still(panel: ChartPanel) -> Markup:
    """Render a panel as HTML that needs no script."""
    if isinstance(panel, CurvePanel):
        return _curves(panel)
    if isinstance(panel, HeatmapPanel):
        return _heatmap(panel)
    if isinstance(panel, RankingPanel):
        return _ranking(panel)
    if isinstance(panel, MatrixPanel):
        return _matrix(panel)
    return _scatter(panel)


def run_variable(run: int | None) -> str:
    """Return the CSS colour of a run; grey for parts common to all."""
    return "var(--muted)" if run is None else f"var(--run-{run % len(RUN_COLOURS)})"


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Line:
    x: np.ndarray
    y: np.ndarray
    colour: str
    name: str
    look: str
    plain_name: str
    """The same without block, head and step."""
    blocks: tuple[int, int] | None = None
    """First and last block, if it is the line of a block."""


def _lines(panel: CurvePanel) -> Iterator[_Line]:
    """Yield the lines that the page shows at first: whole runs, the last step, the mean of the heads."""
    plain = any(len(series.axes) == 1 for series in panel.series)
    led = [s for s in panel.series if not (s.probe and panel.lead) or s.probe == panel.lead]
    shown = [s for s in led if not (plain and {"layer", "head"} & (set(s.axes) - {panel.x}))]
    for series in shown:
        values, axes = np.asarray(series.values, dtype=float), {k: list(v) for k, v in series.axes.items()}
        when = ""
        for name in [name for name in axes if name in ("step", "head") and name != panel.x]:
            place = list(axes).index(name)
            with np.errstate(invalid="ignore"):
                values = values.take(-1, place) if name == "step" else values.mean(place)
            when = f"step {axes[name][-1]:,}" if name == "step" else when
            del axes[name]
        if panel.x not in axes or not len(axes[panel.x]):
            continue
        values = np.moveaxis(values, list(axes).index(panel.x), -1)
        x = np.asarray(axes.pop(panel.x), dtype=float)
        counts: list[Sequence[int]] = [range(len(c)) for c in axes.values()]
        if next(iter(axes), "") == "layer" and len(counts[0]) > _MOST_LINES:
            counts[0] = blocks_of_change([_on_axis(values, panel.log)], len(counts[0]), _MOST_LINES)
        for index in product(*counts):
            where = ", ".join(
                f"{'block' if name == 'layer' else name} {axes[name][i]}" for name, i in zip(axes, index, strict=True)
            )
            colour = _depth(index[0], len(next(iter(axes.values())))) if index else run_variable(series.run)
            name, look = ", ".join(filter(None, [series.name, where, when])), series.look
            if look in ("control", "band"):
                yield _Line(x, values[index], "var(--muted)", name, look, series.name)
                continue
            ends = (axes["layer"][0], axes["layer"][-1]) if "layer" in axes else None
            yield _Line(x, values[index], colour, name, look, series.name, ends)


def _depth(index: int, count: int) -> str:
    return depth_colour(index / max(count - 1, 1))


def _on_axis(values: np.ndarray, log: bool) -> np.ndarray:
    """Transform values to the spacing of their axis."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log(values) if log else values


def step_share(x: np.ndarray, log: bool) -> np.ndarray:
    """Return the places of x on its axis: unchanged, or with room for zero on a logarithmic one."""
    if not log:
        return x
    positive = x[x > 0]
    unit = float(positive.min()) if len(positive) else 1.0
    return np.arcsinh(x / unit)


def _curves(panel: CurvePanel) -> Markup:
    lines = list(_lines(panel))
    if not lines:
        return Markup('<p class="note">Nothing to draw yet.</p>')
    extra = [-line.y for line in lines if line.look == "band"]
    judged = [line.y for line in lines if line.look not in ("control", "band")]
    log = panel.log and any((y > 0).any() for y in judged)
    y_scale = fitting_scale(np.concatenate([*(line.y for line in lines), *extra]), log)
    every_x = np.unique(np.concatenate([line.x for line in lines]))
    places = step_share(every_x, panel.x_log)
    low, high = float(places.min()), float(places.max())
    at = dict(zip(every_x.tolist(), ((places - low) / (high - low or 1.0)).tolist(), strict=True))
    parts = [_frame(y_scale), _x_ticks(every_x, at, axis_title(panel.x, log=panel.x_log))]
    for line in lines:
        parts.append(_draw_line(line, at, y_scale, many=len(lines) > _MANY_LINES))
    described = escape(panel.title)
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 12}" role="img" aria-label="{described}">' + "".join(parts) + "</svg>"
    )
    of_blocks = [line for line in lines if line.blocks is not None]
    scale = ""
    if len(of_blocks) > MOST_NAMED:
        first, last = of_blocks[0].blocks or (0, 0)
        scale = _scale(f"block {first}", str(last), [depth_colour(i / 6) for i in range(7)])
    names: dict[tuple[str, str], str] = {}
    for line in lines:
        if scale and line.blocks is not None:
            names[line.plain_name, line.look] = "var(--ink)"
        else:
            names[line.name, line.look] = line.colour
    if len(names) == 1 and scale:
        names = {}  # one name alone tells nothing apart
    keys = "".join(
        f'<span><i class="{escape(look)}" style="--c:{colour}"></i>{escape(shorten(name, 40))}</span>'
        for (name, look), colour in names.items()
        if name
    )
    return Markup(picture + scale + (f'<div class="keys">{keys}</div>' if keys else ""))


def _scale(low: str, high: str, colours: Sequence[str]) -> str:
    """Render a labelled gradient."""
    ramp = f"background:linear-gradient(to right,{','.join(colours)})"
    return f'<div class="scale">{escape(low)}<i style="{ramp}"></i>{escape(high)}</div>'


def _frame(scale: Scale) -> str:
    parts = []
    for tick in scale.ticks():
        y = _y(scale.share(tick))
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3:.1f}" text-anchor="end">{tick_text(tick)}</text>')
    return "".join(parts)


def _x_ticks(values: np.ndarray, at: dict[float, float], title: str) -> str:
    chosen: list[float] = []
    for value in [*values.tolist()]:
        if not chosen or at[value] - at[chosen[-1]] > 0.14:
            chosen.append(value)
    texts = [
        f'<text x="{_x(at[v]):.1f}" y="{_HEIGHT - _BOTTOM + 13}" text-anchor="middle">{tick_text(v)}</text>'
        for v in chosen
    ]
    foot = f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT + 8}" text-anchor="end">{escape(title)}</text>'
    return "".join(texts) + foot


def _draw_line(line: _Line, at: dict[float, float], scale: Scale, *, many: bool) -> str:
    """Draw a line, with a dot at each point if there are few lines and points."""
    most = _MOST_POINTS // 2 if many else _MOST_POINTS
    keep = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), most)).astype(int))
    points = [(_x(at[float(line.x[i])]), _y(scale.share(float(line.y[i])))) for i in keep]
    if line.look == "band":
        there = [(x, y, _y(scale.share(-float(line.y[i])))) for i, (x, y) in zip(keep, points, strict=True)]
        there = [p for p in there if all(map(math.isfinite, p))]
        outline = [f"{x:.1f} {y:.1f}" for x, y, _ in there] + [f"{x:.1f} {y:.1f}" for x, _, y in reversed(there)]
        return f'<path d="M{"L".join(outline)}Z" fill="var(--muted)" opacity=".25"/>' if there else ""
    pieces, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            pieces.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L" if math.isfinite(y) else "M"
    dash = f' stroke-dasharray="{_DASHES[line.look]}"' if line.look in _DASHES else ""
    path = f'<path class="l" d="{"".join(pieces)}" stroke="{line.colour}"{dash}/>'
    if many or len(points) >= 25 or line.look == "control":
        return path
    dots = [(x, y) for x, y in points if math.isfinite(y)]
    return path + "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{line.colour}"/>' for x, y in dots)


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


# ── cells ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _heatmap(panel: HeatmapPanel) -> Markup:
    """Draw the first run's map at the last step."""
    if not panel.series:
        return Markup('<p class="note">Nothing to draw yet.</p>')
    series = panel.series[0]
    values, axes = np.asarray(series.values, dtype=float), list(series.axes)
    if "step" in axes:
        values = values.take(-1, axes.index("step"))
        axes.remove("step")
    if axes.index(panel.rows) > axes.index(panel.columns):
        values = values.T
    low, high = panel.limits
    rows, columns = (list(series.axes[name]) for name in (panel.rows, panel.columns))
    if len(rows) > _MOST_NUMBERED[0] or len(columns) > _MOST_NUMBERED[1]:
        return _map((values - low) / (high - low), rows, columns, panel)
    cells = [["" if not math.isfinite(v) else _short(v) for v in row] for row in values]
    shares = [[(v - low) / (high - low) for v in row] for row in values]
    return _cells(rows, columns, cells, [[_look_of(s) for s in row] for row in shares], panel.rows, panel.columns)


def _map(shares: np.ndarray, rows: Sequence[Any], columns: Sequence[Any], panel: HeatmapPanel) -> Markup:
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
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT + 12}" role="img" aria-label="{escape(panel.title)}"'
    low, high = (tick_text(limit) for limit in panel.limits)
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
    looks = [[_growing(v, panel.pale, panel.full) for v in row] for row in values]
    table = _cells(panel.rows, panel.columns, cells, looks, "", "", panel.tips)
    legend = f'<p class="note">{escape(panel.legend)}</p>' if panel.legend else ""
    return Markup(f'<div class="scroll">{table}</div>{legend}')


def _growing(value: float, pale: float, full: float) -> str:
    """Return a cell's colour: pale up to ``pale``, then growing with the logarithm."""
    if not math.isfinite(value):
        return ""
    size = abs(value)
    share = 0.0 if size <= pale else min(1.0, math.log(size / max(pale, 1e-12)) / math.log(full / max(pale, 1e-12)))
    percent = round(6 + 84 * share)
    ink = ";color:#fff" if percent > 60 else ""
    tone = "var(--matrix-plus)" if value >= 0 else "var(--matrix-minus)"
    return f"background:color-mix(in srgb,{tone} {percent}%,var(--paper)){ink}"


def _ranking(panel: RankingPanel) -> Markup:
    """Render the lists of the first and the last step of every run."""
    runs = sorted({ranking.run for ranking in panel.rankings})
    parts = []
    for run in runs:
        held = sorted((r for r in panel.rankings if r.run == run), key=lambda r: r.step)
        for ranking in held if len(held) < 2 else (held[0], held[-1]):
            when = panel.start if ranking.step == 0 else f"step {ranking.step:,}"
            parts.append(ranking_table(panel, ranking.rows, when))
    return Markup('<div class="lists">') + Markup("").join(parts) + Markup("</div>")


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
        f'<tr><td class="text"><i class="{"ring" if p.hollow else "dot"}" style="--c:{run_variable(p.colour)}"></i>'
        f"{escape(p.name)}</td>{_with_ends(p.x, p.x_error)}{_with_ends(p.y, p.y_error)}</tr>"
        for p in sorted(points, key=lambda p: (p.x, p.y))
    )
    labels = "".join(f"<th>{escape(label)}</th>" for label in (panel.x_label, panel.y_label))
    head = f'<th class="text"></th>{labels}'
    return Markup(f'<table class="points keys"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>')


def _with_ends(value: float, ends: tuple[float, float] | None) -> str:
    beside = f"<small>{' – '.join(format_value(end, '.3f') for end in ends)}</small>" if ends else ""
    return f"<td>{format_value(value, '.3f')}{beside}</td>"


def _scatter(panel: ScatterPanel) -> Markup:
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
        look = (
            f'r="3.8" fill="var(--paper)" stroke="{colour}" stroke-width="1.8"'
            if p.hollow
            else f'r="4.5" fill="{colour}"'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" {look} data-tip="{tip}"/>')
        parts.append(f'<text class="name" x="{left:.1f}" y="{top + 9.5:.1f}">{escape(shorten(p.name, 28))}</text>')
    described = escape(panel.title)
    box = f'<svg class="scatter" viewBox="0 0 {width} {height}" role="img" aria-label="{described}">'
    return _point_list(panel, points) + Markup(f"{box}{''.join(parts)}</svg>")
