"""Lines and paths of panels as still pictures show them, with their colours, axes and keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from ...findings.formatting import shorten
from ..pictures.panels import blocks_of_change
from ..pictures.style import RUN_COLOURS
from .scales import Scale, depth_colour, fitting_scale
from .specs import (
    LOOKS,
    CurvePanel,
    PageRun,
    Series,
    colours_of,
)  # fmt: skip

_MOST_LINES = 24
"""Largest number of blocks with lines in a still picture; among more, those where the numbers change most are drawn."""
MOST_NAMED = 6
"""Largest number of blocks that keys name; more of them have a scale of colours."""
POINTED = 3
"""Place among the colours of a grey run that stands alone, or that a reader of the page points at."""


def run_variable(run: int | None) -> str:
    """Return the CSS colour of a run; grey for parts common to all."""
    return "var(--muted)" if run is None else f"var(--run-{run % len(RUN_COLOURS)})"


@dataclass(frozen=True)
class Line:
    """A line of a panel as it is shown at first."""

    x: np.ndarray
    y: np.ndarray
    colour: str
    name: str
    look: str
    plain_name: str
    """The same without block, head and step."""
    blocks: tuple[int, int] | None = None
    """First and last block, if it is the line of a block."""
    facet: str = ""
    """Title of its small panel; "" belongs to all."""
    faint: bool = False
    """True for one of many heads, whose mean stands out."""
    pale: bool = False
    """True for the first of two steps."""
    run: int | None = None
    """Place among the runs."""
    is_coloured: bool = False
    """True if its series gives it a colour, not its run."""


def lines_of(panel: CurvePanel) -> list[Line]:
    """Return the lines that the page shows at first: whole runs, the last step, the mean of the heads.

    Small panels show every head, and two steps are both shown, the first paler. Several runs have one band, as wide as
    the widest, for one on another would be darker, and equal controls once.
    """
    found: dict[Any, Line] = {}
    for place, line in enumerate(_every_line(panel)):
        key: Any = place
        if line.look in ("band", "control"):
            key = line.name, line.look, line.facet, line.x.tobytes(), line.look == "band" or line.y.tobytes()
        found[key] = replace(line, y=np.fmax(line.y, found[key].y)) if key in found else line
    return list(found.values())


def _every_line(panel: CurvePanel) -> Iterator[Line]:
    plain = any(len(series.axes) == 1 and series.look not in ("control", "band") for series in panel.series)
    led = [s for s in panel.series if not (s.probe and panel.lead) or s.probe == panel.lead]
    shown = [s for s in led if not (plain and {"layer", "head"} & (set(s.axes) - {panel.x}))]
    for series in shown:
        if panel.x not in series.axes or not len(series.axes[panel.x]):
            continue
        steps = series.axes.get("step", ()) if panel.x != "step" else ()
        both = len(steps) == 2 and not series.facet and series.look in LOOKS
        for when in (0, 1) if both else (-1,):
            yield from _lines_at(panel, series, when, len(steps))


def _lines_at(panel: CurvePanel, series: Series, when: int, n_steps: int) -> Iterator[Line]:
    """Yield the lines of a series, at one of its steps if it has several."""
    values, axes = np.asarray(series.values, dtype=float), {k: list(v) for k, v in series.axes.items()}
    said, look, pale = "", series.look, when == 0
    if n_steps:
        values = values.take(when, list(axes).index("step"))
        step = axes.pop("step")[when]
        said = f"step {step:,}" if n_steps > 1 else ""
    values = np.moveaxis(values, list(axes).index(panel.x), -1)
    x = np.asarray(axes.pop(panel.x), dtype=float)
    if not np.isfinite(x).all():
        return
    in_facets = series.facet == "layer"
    if "head" in axes and not in_facets:
        with np.errstate(invalid="ignore"):
            values = values.mean(list(axes).index("head"))
        del axes["head"]
    counts: list[Sequence[int]] = [range(len(c)) for c in axes.values()]
    if next(iter(axes), "") == "layer" and len(counts[0]) > _MOST_LINES:
        counts[0] = blocks_of_change([_on_axis(values, panel.log)], len(counts[0]), _MOST_LINES)
    run = run_variable(series.run if series.colour is None else series.colour)
    given: dict[str, Any] = {"run": series.run, "is_coloured": series.colour is not None}
    if in_facets:
        colour = run if series.run is not None else run_variable(0)
        for i, layer in enumerate(axes["layer"]):
            lines, facet = (values[i] if "head" in axes else values[i][None]), f"block {layer}"
            for line in lines if len(lines) > 1 else ():
                yield Line(x, line, colour, "one head", look, "", facet=facet, faint=True, **given)
            name = ("mean of the heads" if len(lines) > 1 else "the head") if "head" in axes else series.name
            yield Line(x, lines.mean(0), colour, name, look, "", facet=facet, **given)
        return
    for index in product(*counts):
        where = ", ".join(
            f"{'block' if name == 'layer' else name} {axes[name][i]}" for name, i in zip(axes, index, strict=True)
        )
        colour = _depth(index[0], len(next(iter(axes.values())))) if index else run
        name, facet = ", ".join(filter(None, [series.name, where, said])), series.facet
        if look in ("control", "band"):
            yield Line(x, values[index], "var(--muted)", name, look, series.name, facet=facet)
            continue
        ends = (axes["layer"][0], axes["layer"][-1]) if "layer" in axes else None
        plain_name = ", ".join(filter(None, [series.name, said]))
        yield Line(x, values[index], colour, name, look, plain_name, ends, facet, pale=pale, **given)


def with_run_names(lines: Sequence[Line], runs: Sequence[PageRun]) -> list[Line]:
    """Return lines of more runs than colours: those of grey runs lie below, those of others have their names. A run
    alone has its colour, or the one of a grey run that a reader points at.
    """
    places = colours_of(runs)
    shared = len(set(places) - {None})
    if len(runs) <= len(RUN_COLOURS) or shared > len(RUN_COLOURS):
        return list(lines)
    if len({line.run for line in lines} - {None}) < 2:
        return [
            line
            if line.run is None or line.is_coloured or line.blocks
            else replace(line, colour=run_variable(POINTED if (place := places[line.run]) is None else place))
            for line in lines
        ]
    grey, others = [], []
    for line in lines:
        if line.run is None or line.is_coloured:
            others.append(line)
            continue
        run, place = runs[line.run], places[line.run]
        # Colours are those of runs, not of blocks, which have no names then.
        plain = replace(line, colour=run_variable(place), blocks=None)
        said = line.name if line.blocks is None else line.plain_name
        if place is None:
            grey.append(replace(plain, faint=True, name="other runs" if line.look == "solid" else ""))
        else:
            name = f"{run.name} ({run.role})" if run.role else run.group or run.name
            others.append(replace(plain, name=", ".join(filter(None, [name, said]))))
    return [*grey, *others]


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


@dataclass(frozen=True)
class Across:
    """The x axis of lines."""

    values: np.ndarray
    """``[X]``, every x of the lines, rising."""
    unit: float = 0.0
    """Least positive x of a logarithmic axis, which has room for zero; 0 for a linear one."""

    @cached_property
    def _ends(self) -> tuple[float, float]:
        low, high = self._place(float(self.values[0])), self._place(float(self.values[-1]))
        return low, high - low or 1.0

    def _place(self, x: float) -> float:
        return math.asinh(x / self.unit) if self.unit else x

    def share(self, x: float) -> float:
        """Return the share of the axis at x."""
        low, room = self._ends
        return (self._place(x) - low) / room


def scales_of(panel: CurvePanel, lines: Sequence[Line]) -> tuple[Scale, Across]:
    """Return the axes of a panel's lines."""
    extra = [-line.y for line in lines if line.look == "band"] + ([np.array(panel.span)] if panel.span else [])
    judged = [line.y for line in lines if line.look not in ("control", "band")]
    log = panel.log and any((y > 0).any() for y in judged)
    y_scale = fitting_scale(np.concatenate([*(line.y for line in lines), *extra]), log)
    every_x = np.unique(np.concatenate([line.x for line in lines]))
    positive = every_x[every_x > 0]
    return y_scale, Across(every_x, float(positive[0]) if panel.x_log and len(positive) else 0.0)


def facets_of(lines: Sequence[Line]) -> list[str]:
    """Return the titles of the small panels; one without a title if there are none."""
    return list(dict.fromkeys(line.facet for line in lines if line.facet)) or [""]


def keys_of(lines: Sequence[Line]) -> tuple[list[Line], tuple[int, int] | None]:
    """Return a line for each of a panel's keys, and the blocks of its scale of colours, if it has one.

    A key of lines in several colours, which are those of runs, is in ink.
    """
    of_blocks = [line for line in lines if line.blocks is not None]
    scaled = of_blocks[0].blocks if len({line.name for line in of_blocks}) > MOST_NAMED else None
    keys: dict[tuple[str, str, bool], Line] = {}
    for line in lines:
        if scaled and line.blocks is not None:
            line = replace(line, name=line.plain_name, colour="var(--ink)")
        if line.name:
            key = line.name, line.look, line.faint
            alike = line.colour == keys.get(key, line).colour
            keys[key] = line if alike else replace(line, colour="var(--ink)")
    # One name alone tells nothing apart.
    return [] if len(keys) == 1 and scaled else list(keys.values()), scaled


def x_ticks(across: Across, apart: float = 0.14) -> list[float]:
    """Return x that have numbers, so far apart that these do not touch: powers of ten on a logarithmic axis with
    several, otherwise their double and fivefold too; some of the lines' own on a linear one, or where there are no two.
    """
    values = across.values.tolist()
    candidates: list[float] = []
    if across.unit:
        low, high = across.unit, values[-1]
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        for leads in ((1,), (1, 2, 5)):
            if len(candidates) < 3:
                found = (float(f"{lead}e{decade}") for decade in decades for lead in leads)
                candidates = [*values[: values[0] == 0], *(value for value in found if low <= value <= high)]
    chosen: list[float] = []
    for value in candidates if len(candidates) > 1 else values:
        if not chosen or across.share(value) - across.share(chosen[-1]) > apart:
            chosen.append(value)
    return chosen


def paths_of(panel: CurvePanel) -> list[Line]:
    """Return the paths of a panel's tokens, each named by its text."""
    return [
        Line(
            np.asarray(series.axes["step"], dtype=float),
            path,
            run_variable(series.run),
            text,
            series.look,
            series.name,
            run=series.run,
        )
        for series in panel.series
        if "text" in series.axes
        for text, path in zip(series.axes["text"], np.asarray(series.values, dtype=float), strict=True)
    ]


def end_of_path(line: Line, end: int, *, isolated: bool = False) -> str:
    """Return the words beside an end of a path: the token's text and its rank; ``isolated`` by the characters that keep
    a text from right to left apart from the number, which matplotlib would draw.
    """
    name = f"‹{shorten(line.name, 10)}›"
    words = [f"\u2068{name}\u2069" if isolated else name, f"{line.y[end]:,.0f}"]
    return " ".join(words if end else words[::-1])
