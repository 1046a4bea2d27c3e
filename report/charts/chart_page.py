"""Pages made of blocks: sentences, tables, panels and folds, in one HTML file that fetches nothing.

To make a page, list its blocks and write the result of `render_page`:

    panel = CurvePanel("loss", "Validation loss (nats)", [Series(losses, {"step": steps}, run=0)], csv="loss.csv")
    blocks = [Prose("One sentence."), Controls(), Panels([panel]), Fold("Config", [table])]
    write_text(out, render_page("my study", blocks, runs=[PageRun("run-a")], data="my-data"))

Every text is escaped here. `Controls` is the bar with the step scrubber and the choices that its panels leave open; it
shows nothing without script. Panels have their still picture in the page (`stills`), which print and browsers without
script show; the script draws the live one over it. Ids of panels and folds are one word each, unique in the page.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from markupsafe import Markup

from ...messages import printable
from ..html_page import render
from ..pictures.style import DEPTH
from ..table import Table
from .lines import POINTED, step_share
from .scales import CIVIDIS
from .specs import ChartPanel, CurvePanel, HeatmapPanel, PageRun, RankingPanel, Series, colours_of
from .stills import path_of, still

# ---------------------------------------------------------------- size limit of pages of deep models
# Arrays that panels share are stored once, and long arrays keep only some of their steps.
#
# A page may hold `MOST_NUMBERS` numbers. If its panels have more, the longest arrays are thinned: first steps, then
# positions, spread over the measured ones, always with the first and the last. A note below the panel says so.

MOST_NUMBERS = 150_000
"""Largest number of values in all of a page's panels: about 1 MB."""
_FEWEST = {"step": 2, "position": 32}
"""Coordinates that an axis keeps at least, in the order in which axes give way."""
_SHARED = 1000
"""Numbers from which on equal arrays stand in a page once."""


def thinned(panels: Iterable[ChartPanel], most: int = MOST_NUMBERS) -> tuple[list[ChartPanel], dict[str, str]]:
    """Thin the panels to at most ``most`` numbers, if possible; return them with a note, by id, for each
    thinned one.
    """
    panels = list(panels)
    sizes = {_key(series): np.size(series.values) for panel in panels for series in _series(panel)}
    longest = _longest(list(sizes.values()), most)
    found, notes = [], {}
    for panel in panels:
        if isinstance(panel, CurvePanel | HeatmapPanel):
            kept = [_thin(series, longest) for series in panel.series]
            if words := _words(panel.series, kept):
                # The first view of a panel is whole if only its choices were thinned.
                of_choices = "of a single block or head, " if len(words) < len(panel.series) else ""
                notes[panel.id] = f"Shown: {of_choices}{' and '.join(dict.fromkeys(words))}; the snapshots hold all."
            panel = replace(panel, series=kept)
        found.append(panel)
    return found, notes


def _series(panel: ChartPanel) -> Sequence[Series]:
    return panel.series if isinstance(panel, CurvePanel | HeatmapPanel) else ()


def _key(series: Series) -> tuple[bytes, tuple[int, ...]]:
    values = np.asarray(series.values, dtype=float)
    return values.tobytes(), values.shape


def _longest(sizes: Sequence[int], most: int) -> int:
    """Return the largest length of arrays with which all together have ``most`` numbers."""
    left, longest = most, max(sizes, default=0)
    for n_others, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * n_others > left:
            return left // n_others
        left -= size
    return longest


def _thin(series: Series, longest: int) -> Series:
    """Thin the series to at most ``longest`` numbers, or to as few as its axes allow."""
    for name, fewest in _FEWEST.items():
        size, axes = np.size(series.values), dict(series.axes)
        if size <= longest or name not in axes:
            continue
        count = len(axes[name])
        kept = _spread(count, max(fewest, longest * count // size), close_first=name == "position")
        axes[name] = [axes[name][i] for i in kept]
        series = replace(series, values=np.take(series.values, kept, list(axes).index(name)), axes=axes)
    return series


def _spread(count: int, most: int, *, close_first: bool) -> list[int]:
    """Choose at most ``most`` of ``count`` indices, evenly or closer for the first ones, always with the first and the
    last.
    """
    if most >= count:
        return list(range(count))
    places = np.geomspace(1, count, most) - 1 if close_first else np.linspace(0, count - 1, most)
    return np.unique(places.round().astype(int)).tolist()


def _words(before: Sequence[Series], after: Sequence[Series]) -> list[str]:
    """Describe, for each thinned series, the number of coordinates shown of each axis."""
    said = []
    for given, kept in zip(before, after, strict=True):
        fewer = [name for name in _FEWEST if name in given.axes and len(kept.axes[name]) < len(given.axes[name])]
        if fewer:
            said.append(", ".join(f"{len(kept.axes[name])} of {len(given.axes[name])} {name}s" for name in fewer))
    return said


def share_arrays(panels: Mapping[str, dict[str, Any]]) -> list[list[Any]]:
    """Collect long arrays that several series share, and replace the array in each series by its index.

    Args:
        panels: panels for the page's script; changed in place.
    """
    holders: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for panel in panels.values():
        for series in panel.get("series", ()):
            if len(series["v"]) >= _SHARED:
                holders.setdefault(tuple(series["v"]), []).append(series)
    shared: list[list[Any]] = []
    for values, series_of_it in holders.items():
        if len(series_of_it) > 1:
            for series in series_of_it:
                series["v"] = len(shared)
            shared.append(list(values))
    return shared


# ---------------------------------------------------------------- the page

# ── blocks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Heading:
    """A heading that can be linked to, with a sentence below it."""

    id: str
    title: str
    lede: str = ""
    kind: str = "heading"


@dataclass(frozen=True)
class Prose:
    """A paragraph."""

    text: str
    note: bool = False
    """True for small grey type."""
    kind: str = "prose"


@dataclass(frozen=True)
class Finding:
    """A sentence about a measurement, with the curve behind it."""

    sentence: str
    tone: str = ""
    """``present``, ``weak``, ``absent`` or ``unclear``: the mark before it."""
    values: Sequence[float] = ()
    """Values of the sparkline, over steps."""
    control: Sequence[float] = ()
    """Controls of the values, in grey."""
    link: str = ""
    """Id of the block that it leads to."""
    colour: int | None = 0
    """Place of its run among the colours; None for grey."""
    steps: Sequence[int] = ()
    """Steps of the values, of which each has its place; without them they lie at equal distances."""
    is_log: bool = False
    """True if steps are spaced logarithmically, as in the panels of the page."""


@dataclass(frozen=True)
class Findings:
    """Sentences about the course of the runs."""

    findings: Sequence[Finding]
    title: str = ""
    kind: str = "findings"


@dataclass(frozen=True)
class Panels:
    """Panels side by side, as many as fit."""

    panels: Sequence[ChartPanel]
    wide: bool = False
    """Two in a row instead of three."""
    kind: str = "panels"


@dataclass(frozen=True)
class Controls:
    """The bar with the step scrubber, runs, probe, block and head."""

    kind: str = "controls"


@dataclass(frozen=True)
class Fold:
    """Blocks behind one line."""

    summary: str
    blocks: Sequence[Block]
    id: str = ""
    note: str = ""
    """Grey, behind the summary."""
    open: bool = False
    kind: str = "fold"


@dataclass(frozen=True)
class Html:
    """Markup that was made, and escaped, by other code."""

    markup: Markup
    kind: str = "html"


Block = Heading | Prose | Findings | Table | Panels | Controls | Fold | Html


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def render_page(
    title: str,
    blocks: Sequence[Block],
    *,
    runs: Sequence[PageRun] = (),
    about: str = "Birthmark report",
    data: str = "",
    template: str = "charts.html.j2",
    further: Sequence[ChartPanel] = (),
    **values: Any,
) -> str:
    """Render ``blocks`` as one HTML file; the same blocks give the same bytes.

    Args:
        title: heading of the page.
        blocks: blocks from top to bottom.
        runs: runs that `Series.run` refers to by index; empty if panels belong to no run.
        about: a few words above the title.
        data: the folder beside the page that holds the panels' CSV files; "" for none.
        template: a template that extends ``charts.html.j2``, and takes ``values``.
        further: panels that the template itself places, by its macro ``show``.

    Raises:
        ValueError: two panels have one id.
    """

    def picture(panel: ChartPanel, description: str = "") -> Markup:
        return still(panel, description, runs)

    panels = [*panels_of(blocks), *further]
    ids = [panel.id for panel in panels]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise ValueError(f"two panels of one page are called {twice[0]}")
    script = page_script()
    shown, notes = thinned(panels)
    return render(
        template,
        title=printable(title),
        about=about,
        blocks=blocks,
        runs=runs,
        still=picture,
        spark=sparkline,
        data=data,
        shortened=notes,
        styles=page_styles(),
        island=Markup(island(shown, runs)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def panels_of(blocks: Iterable[Block]) -> Iterator[ChartPanel]:
    """Yield all panels, in their order."""
    for block in blocks:
        if isinstance(block, Panels):
            yield from block.panels
        elif isinstance(block, Fold):
            yield from panels_of(block.blocks)


def island(panels: Iterable[ChartPanel], runs: Sequence[PageRun]) -> str:
    """Encode the data of the page's script as JSON that is safe inside HTML: no character begins or ends markup."""
    panels = list(panels)
    data: dict[str, Any] = {
        "runs": [run.to_json() for run in runs],
        "run_colours": colours_of(runs),
        "pointed_colour": POINTED,
        "steps": _steps(panels),
        "colours": list(CIVIDIS),
        "depth": list(DEPTH),
        "panels": {panel.id: panel.to_json() for panel in panels},
    }
    data["shared"] = share_arrays(data["panels"])
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a character has no bytes of its own.
    text = text.encode("utf-8", "backslashreplace").decode()
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def _steps(panels: Iterable[ChartPanel]) -> list[int]:
    """Return the steps at which the scrubber stops: those of maps, rankings and everything that is cut at a step."""
    found: set[int] = set()
    for panel in panels:
        if isinstance(panel, RankingPanel):
            found |= {ranking.step for ranking in panel.rankings}
        elif isinstance(panel, (CurvePanel, HeatmapPanel)):
            for series in panel.series:
                if "step" in series.axes and len(series.axes) > 1:
                    found |= {int(step) for step in series.axes["step"]}
    return sorted(found)


@cache
def page_styles() -> Markup:
    """Return the style sheet of every page with panels."""
    return Markup(_asset("uPlot.min.css") + _asset("page.css"))


@cache
def page_script() -> str:
    """Return the script of every page: the library, the panels, the controls."""
    return "".join(_asset(name) for name in ("uPlot.min.js", "charts.js", "page.js"))


@cache
def _asset(name: str) -> str:
    room = (__package__ or "").rpartition(".")[0]
    return resources.files(room).joinpath("assets", name).read_text(encoding="utf-8")


def sparkline(
    values: Sequence[float], control: Sequence[float] = (), steps: Sequence[int] = (), *, is_log: bool = False
) -> Markup:
    """Draw a small curve without axes, its control in grey; "" for fewer than two points."""
    places = step_share(np.asarray(steps if len(steps) == len(values) else range(len(values)), dtype=float), is_log)
    curves = [[(i, float(v)) for i, v in enumerate(found)] for found in (control, values)]
    shown = [v for curve in curves for _, v in curve if math.isfinite(v)]
    if sum(math.isfinite(v) for _, v in curves[1]) < 2:
        return Markup("")
    low, high = min(shown), max(shown)

    def place(i: int, v: float) -> tuple[float, float]:
        first, last = places[0], places[-1]
        return (
            2 + 96 * (places[i] - first) / (last - first or 1.0),
            22 - 20 * ((v - low) / (high - low) if high > low else 0.5),
        )

    paths = [
        f'<path{look} d="{path_of(place(i, v) for i, v in curve)}"/>'
        for curve, look in zip(curves, (' class="against"', ""), strict=True)
        if sum(math.isfinite(v) for _, v in curve) > 1
    ]
    x, y = next(place(i, v) for i, v in reversed(curves[1]) if math.isfinite(v))
    return Markup(
        f'<svg class="spark" viewBox="0 0 100 24" aria-hidden="true">{"".join(paths)}'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/></svg>'
    )
