"""Pages made of blocks: sentences, tables, panels and folds, in one HTML file that fetches nothing.

To make a page, list its blocks and write the result of `render_page`:

    panel = CurvePanel("loss", "Validation loss (nats)", [Series(losses, {"step": steps}, run=0)], csv="loss.csv")
    blocks = [Prose("One sentence."), Controls(), Panels([panel]), Fold("Config", [Table(["field", "value"], rows)])]
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from markupsafe import Markup

from ..html_page import render
from ..pictures.style import DEPTH
from ..text import printable
from .scales import CIVIDIS
from .specs import ChartPanel, CurvePanel, HeatmapPanel, PageRun, RankingPanel
from .stills import still
from .thinning import share_arrays, thinned

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
    run: int = 0
    """Number of the run, which decides the colour."""


@dataclass(frozen=True)
class Findings:
    """Sentences about the course of the runs."""

    findings: Sequence[Finding]
    title: str = ""
    kind: str = "findings"


@dataclass(frozen=True)
class Table:
    """A table; cells that are markup are not escaped."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str | Markup]]
    texts: Sequence[int] = (0,)
    """Columns that are text, not numbers; the rest are set to the right."""
    caption: str = ""
    kind: str = "table"


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
        still=still,
        spark=sparkline,
        data=data,
        shortened=notes,
        styles=Markup(_asset("uPlot.min.css") + _asset("page.css")),
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
def page_script() -> str:
    """Return the script of every page: the library, the panels, the controls."""
    return "".join(_asset(name) for name in ("uPlot.min.js", "charts.js", "page.js"))


@cache
def _asset(name: str) -> str:
    room = (__package__ or "").rpartition(".")[0]
    return resources.files(room).joinpath("assets", name).read_text(encoding="utf-8")


def sparkline(values: Sequence[float], control: Sequence[float] = ()) -> Markup:
    """Draw a small curve without axes, its control in grey; "" for fewer than two points."""
    curves = [[(i, v) for i, v in enumerate(found) if math.isfinite(v)] for found in (control, values)]
    if len(curves[1]) < 2:
        return Markup("")
    shown = [v for curve in curves for _, v in curve]
    low, high = min(shown), max(shown)

    def points(curve: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        last = len(values) - 1
        return [(2 + 96 * i / last, 22 - 20 * ((v - low) / (high - low) if high > low else 0.5)) for i, v in curve]

    paths = [
        f'<path{look} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points(curve))}"/>'
        for curve, look in zip(curves, (' class="against"', ""), strict=True)
        if len(curve) > 1
    ]
    x, y = points(curves[1])[-1]
    return Markup(
        f'<svg class="spark" viewBox="0 0 100 24" aria-hidden="true">{"".join(paths)}'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/></svg>'
    )
