"""Content of panels as plain data: curves, maps, rankings, matrices and scatters, each with its JSON.

Numbers stay arrays with named axes: the page's script selects the step, block, head and probe of the reader's choice.
Nothing here draws, and nothing loads torch or matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..text import one_line

Look = Literal["solid", "dashed", "dotted", "control", "band"]
"""Look of a line. ``control`` is the grey level for comparison, ``band`` the area from its negative to itself."""

LOOKS: tuple[Look, ...] = ("solid", "dashed", "dotted")
"""Looks of one run's lines in a panel, in turn."""

DIGITS = 4
"""Significant digits of every number in a page."""


def rounded(value: Any) -> float | int | None:
    """Round a number for a page: `DIGITS` significant digits, None if it is not finite."""
    number = float(value)
    if not math.isfinite(number):
        return None
    if number.is_integer() and abs(number) < 1e15:
        return int(number)
    short = float(f"{number:.{DIGITS}g}")
    return int(short) if short.is_integer() else short


def _coordinate(value: Any) -> float | int | str | None:
    return one_line(value) if isinstance(value, str) else _exact(value)


def _exact(value: Any) -> float | int | None:
    """Keep all digits of a coordinate: steps may differ beyond the fourth."""
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() else float(f"{number:.9g}")


@dataclass(frozen=True)
class Series:
    """Numbers along named axes: the lines of a curve panel, or the cells of a map."""

    values: np.ndarray
    axes: Mapping[str, Sequence[Any]]
    """Each dimension of ``values``, outermost first: its name (``step``, ``layer``, ``head``, ``position``, …) and the
    coordinate of every index. The page's choice of step, block (``layer``) and head applies by these names.
    """
    run: int | None = None
    """Place among the runs of the page, which decides the colour; None for a series common to all."""
    name: str = ""
    """Name, if a panel holds several series of one run."""
    look: Look = "solid"
    probe: str = ""
    """``random`` or ``text``, if the series belongs to one of these probes."""

    def __post_init__(self) -> None:
        lengths = tuple(len(coordinates) for coordinates in self.axes.values())
        if np.shape(self.values) != lengths:
            raise ValueError(f"{self.name or 'series'}: shape {np.shape(self.values)}, axes of {lengths}")

    def to_json(self) -> dict[str, Any]:
        """Return the series for the page's script."""
        found: dict[str, Any] = {
            "axes": [[name, [_coordinate(c) for c in coordinates]] for name, coordinates in self.axes.items()],
            "v": [rounded(v) for v in np.asarray(self.values, dtype=float).reshape(-1)],
        }
        optional = {"run": self.run, "name": self.name, "look": self.look, "probe": self.probe}
        return found | {key: value for key, value in optional.items() if value not in (None, "", "solid")}


@dataclass(frozen=True)
class CurvePanel:
    """Lines over one axis: over steps, positions or blocks. Hover, zoom, log or linear.

    Series that have blocks or heads, in a panel whose other series have none, appear once a block or head is chosen.
    Lines over something else than steps follow the chosen step.
    """

    id: str
    title: str
    series: Sequence[Series]
    x: str = "step"
    """Name of the axis that lines run along."""
    unit: str = ""
    log: bool = False
    """True if y begins logarithmic; the reader can change it."""
    x_log: bool = False
    """True if x is spaced logarithmically."""
    lead: str = ""
    """The probe that is shown until the reader chooses one; "" for all."""
    caption: str = ""
    csv: str = ""
    """Name of the CSV file that holds its numbers."""
    kind: str = "curves"

    def to_json(self) -> dict[str, Any]:
        """Return the panel for the page's script."""
        shown = [s.to_json() for s in self.series]
        return _panel(self, x=self.x, log=self.log, xlog=self.x_log, lead=self.lead, series=shown)


@dataclass(frozen=True)
class HeatmapPanel:
    """A map of cells, such as blocks by heads, at the chosen step, of the run and probe in focus."""

    id: str
    title: str
    series: Sequence[Series]
    """Series, one per run and probe; axes other than ``rows`` and ``columns`` are chosen by the reader."""
    rows: str = "layer"
    columns: str = "head"
    limits: tuple[float, float] = (0.0, 1.0)
    """Values of the first and the last colour."""
    unit: str = ""
    caption: str = ""
    csv: str = ""
    kind: str = "heatmap"

    def to_json(self) -> dict[str, Any]:
        """Return the panel for the page's script."""
        limits = [rounded(limit) for limit in self.limits]
        shown = [s.to_json() for s in self.series]
        return _panel(self, rows=self.rows, columns=self.columns, limits=limits, series=shown)


@dataclass(frozen=True)
class Ranking:
    """Ranked rows of one run at one step."""

    run: int
    step: int
    rows: Sequence[Sequence[str]]
    """Rows, each with one text per heading of the panel."""


@dataclass(frozen=True)
class RankingPanel:
    """A ranked list at the chosen step, of the run in focus."""

    id: str
    title: str
    headings: Sequence[str]
    rankings: Sequence[Ranking]
    texts: Sequence[int] = ()
    """Columns that are text, not numbers."""
    caption: str = ""
    csv: str = ""
    unit: str = ""
    start: str = "at birth"
    """Name of step 0."""
    kind: str = "ranking"

    def to_json(self) -> dict[str, Any]:
        """Return the panel for the page's script."""
        lists = [
            {"run": r.run, "step": r.step, "rows": [list(map(one_line, row)) for row in r.rows]} for r in self.rankings
        ]
        return _panel(self, headings=list(self.headings), texts=list(self.texts), lists=lists)


@dataclass(frozen=True)
class MatrixPanel:
    """A matrix with its numbers in it; colour begins at ``pale``, so that smaller values stay pale."""

    id: str
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: np.ndarray
    """``[rows, columns]``; NaN where there is none."""
    pale: float = 0.0
    """Size up to which a cell has nearly no colour."""
    full: float = 1.0
    """Size from which on a cell has full colour; in between the colour grows with the logarithm."""
    format: str = ".2f"
    tips: Sequence[Sequence[str]] | None = None
    """Texts shown when hovering over the cells."""
    legend: str = ""
    """Meaning of the colours, in a sentence."""
    caption: str = ""
    csv: str = ""
    unit: str = ""
    kind: str = "matrix"

    def to_json(self) -> dict[str, Any]:
        """Return the panel without cells, which are in the page: the script draws nothing."""
        return _panel(self)


@dataclass(frozen=True)
class Point:
    """A point of a scatter."""

    x: float
    y: float
    name: str
    tip: str = ""
    """Text shown when hovering, beside the name and the numbers."""
    colour: int = 0
    """Index among the runs' colours."""
    x_error: tuple[float, float] | None = None
    """Ends of its interval."""
    y_error: tuple[float, float] | None = None
    hollow: bool = False
    """A ring: where there are more kinds of points than colours."""


@dataclass(frozen=True)
class ScatterPanel:
    """Points with names that do not lie on one another."""

    id: str
    title: str
    points: Sequence[Point]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    caption: str = ""
    csv: str = ""
    unit: str = ""
    kind: str = "scatter"

    def to_json(self) -> dict[str, Any]:
        """Return the panel without points, which are in the page: the script draws nothing."""
        return _panel(self)


ChartPanel = CurvePanel | HeatmapPanel | RankingPanel | MatrixPanel | ScatterPanel


def _panel(panel: Any, **more: Any) -> dict[str, Any]:
    return {"kind": panel.kind, "title": panel.title, "unit": panel.unit, **more}


@dataclass(frozen=True)
class PageRun:
    """Name and facts of a run for the page's controls."""

    name: str
    group: str = ""
    """Runs of one group are seeds of one config: drawn as a band."""
    tokens: Mapping[int, int] | None = None
    """Tokens seen, by step."""
    start: str = "at birth"
    """Name of step 0."""

    def to_json(self) -> dict[str, Any]:
        """Return the run for the page's script."""
        tokens = {str(step): int(n) for step, n in (self.tokens or {}).items()}
        found: dict[str, Any] = {"name": self.name, "group": self.group, "start": self.start}
        return found | ({"tokens": tokens} if tokens else {})
