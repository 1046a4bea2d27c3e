"""Content of panels as plain data: curves, maps, rankings, matrices and scatters, each with its JSON.

Numbers stay arrays with named axes: the page's script selects the step, block, head and probe of the reader's choice.
Nothing here draws, and nothing loads torch or matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from ...findings.formatting import one_line
from ...metrics.quantities import LOGGED, MEASURED
from ...metrics.quantity import Quantity
from ..csv_files import LabelledArray
from ..pictures.style import RUN_COLOURS

Look = Literal["solid", "dashed", "dotted", "control", "band", "dots"]
"""Look of a line. ``control`` is the grey level for comparison, ``band`` the area from its negative to itself, ``dots``
points without a line.
"""

LOOKS: tuple[Look, ...] = ("solid", "dashed", "dotted")
"""Looks of one run's lines in a panel, in turn."""

_AXIS_TITLES = {"step": "optimizer steps", "layer": "block", "text": "token", "alpha": "α", "epsilon": "ε"}


def axis_title(name: str, *, log: bool = False) -> str:
    """Return the title of an axis by the name that numbers have for it."""
    return f"{_AXIS_TITLES.get(name, name)}{', log scale' if log else ''}"


PICTURED = 3
"""Number of runs that get pictures of blocks, heads and maps, and lists in still pictures; further runs have only the
numbers.
"""
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
    """Place among the runs of the page; None for a series common to all."""
    name: str = ""
    """Name, if a panel holds several series of one run."""
    look: Look = "solid"
    probe: str = ""
    """``random`` or ``text``, if the series belongs to one of these probes."""
    facet: str = ""
    """Small panel of a still picture that it belongs to: its title, or ``layer`` for one of each block."""
    colour: int | None = None
    """Place among the colours of runs; by default that of the run."""

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
        names = ("run", "name", "look", "probe", "colour")
        optional = {name: getattr(self, name) for name in names}
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
    down: bool = False
    """True if y grows downwards, as ranks do."""
    span: tuple[float, float] | None = None
    """Numbers that y covers in a still picture too, such as those of a panel beside it."""
    of_all: str = ""
    """Words for numbers made of all blocks and heads, behind the unit as long as none of these is chosen."""
    kind: str = "curves"

    @property
    def begins_log(self) -> bool:
        """True if y is logarithmic at first: one without anything to show would be an empty axis."""
        judged = [series.values for series in self.series if series.look not in ("control", "band")]
        return self.log and any((np.asarray(values) > 0).any() for values in judged)

    def to_json(self) -> dict[str, Any]:
        """Return the panel for the page's script."""
        shown = [s.to_json() for s in self.series]
        title = axis_title(self.x)
        made = _panel(self, x=self.x, xname=title, log=self.log, xlog=self.x_log, lead=self.lead, series=shown)
        return made | ({"down": True} if self.down else {})


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
    is_still: bool = False
    """True if the script draws nothing, because the cells are too many."""
    kind: str = "heatmap"

    def to_json(self) -> dict[str, Any]:
        """Return the panel for the page's script."""
        if self.is_still:
            return _panel(self) | {"kind": "still"}
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


MARKS = {
    "o": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "s": "M-4-4h8v8h-8z",
    "D": "M0-5.2L5.2 0L0 5.2L-5.2 0z",
    "^": "M0-5L5 4h-10z",
    "v": "M0 5L5-4h-10z",
    "<": "M-5 0L4-5v10z",
    "P": "M-1.8-5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
    "X": "M-4.8-2.3L-2.3-4.8L0-2.5L2.3-4.8L4.8-2.3L2.5 0L4.8 2.3L2.3 4.8L0 2.5L-2.3 4.8L-4.8 2.3L-2.5 0z",
    "p": "M0-5.2L4.9-1.6L3.1 4.2h-6.2L-4.9-1.6z",
    "h": "M0-5.2L4.5-2.6v5.2L0 5.2L-4.5 2.6v-5.2z",
    "*": "M0-6.5L1.5-2L6.2-2L2.4.8L3.8 5.3L0 2.5L-3.8 5.3L-2.4.8L-6.2-2L-1.5-2z",
}
"""SVG path of each marker of a point, around 0."""


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
    marker: str = "o"
    """Shape, by its letter in matplotlib: a key of `MARKS`."""


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
    role: str = ""
    """Reason why it has a colour among more runs than colours: first, best, worst."""

    def to_json(self) -> dict[str, Any]:
        """Return the run for the page's script."""
        tokens = {str(step): int(n) for step, n in (self.tokens or {}).items()}
        found: dict[str, Any] = {"name": self.name, "group": self.group, "start": self.start}
        return found | ({"tokens": tokens} if tokens else {}) | ({"role": self.role} if self.role else {})


def roles_of(
    values: Sequence[float], groups: Sequence[str] = (), least: str = "best", largest: str = "worst"
) -> list[str]:
    """Name the runs that stand out where there are more than colours: the first, and those of the least and the largest
    finite value, by default of the last validation loss; "" for others, and where every run or group has a colour.

    Args:
        values: a value of each run.
        groups: the group of each run (`PageRun.group`); without them every run is alone.
        least: role of the run of the least value.
        largest: role of the run of the largest.
    """
    roles: list[list[str]] = [[] for _ in values]
    if len(set(_owners(groups or [""] * len(values)))) > len(RUN_COLOURS):
        roles[0].append("first")
        finite = [run for run, value in enumerate(values) if math.isfinite(value)]
        for choose, role in ((min, least), (max, largest)) if finite else ():
            roles[choose(finite, key=values.__getitem__)].append(role)
    return [", ".join(words) for words in roles]


def colours_of(runs: Sequence[PageRun]) -> list[int | None]:
    """Return the place of each run among the colours; None for a grey one. Of more runs than colours, the seeds of a
    group share a place; of more groups and single runs than colours, those with a role have one, if any has.
    """
    owners: Sequence[str | int] = range(len(runs))
    if len(runs) > len(RUN_COLOURS):
        shared = _owners([run.group for run in runs])
        owners = shared if len(set(shared)) <= len(RUN_COLOURS) else owners
    standing_out = [owner for owner, run in zip(owners, runs, strict=True) if run.role]
    places = list(dict.fromkeys(standing_out or owners))
    return [places.index(owner) if owner in places else None for owner in owners]


def _owners(groups: Sequence[str]) -> list[str | int]:
    """Return the group of each run, or its place if it is alone."""
    return [group or run for run, group in enumerate(groups)]


# ---------------------------------------------------------------- panels from the numbers of a picture
# The panel of every picture of the causal chain, from the same numbers as its CSV file.

_ALONG = ("position", "rank", "epsilon", "index", "expert", "unit", "channel", "token", "stranger", "step", "layer")
"""Axes along which lines run: the first of these that the numbers have; the scrubber chooses among steps beside it."""
_CONTROLS = {q.control for q in (*MEASURED.values(), *LOGGED.values()) if isinstance(q.control, str)}
_CONTROLS |= {"level", "unigram_entropy", "predicted", "seedprint/z_stranger", "seedprint/weights_stranger"}
_BANDS = {"alignment_stranger", "rank_persistence_stranger"}
"""Controls of either sign."""
_MOST_CELLS = 4096
"""Largest number of cells of a map that the page's script draws; a larger one is a picture."""
_MOST_HEADS = 16
"""Largest number of heads whose lines are shown together."""
_SPACED = ("position", "rank")
"""Axes whose first coordinates matter most."""


@dataclass(frozen=True)
class Drawn:
    """Numbers that a panel shows, and how."""

    numbers: Sequence[LabelledArray]
    """Numbers of the panel's CSV file."""
    beside: Sequence[LabelledArray] = ()
    """Levels that only the panel has, by the words that name them."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Quantity → its name in the legend."""
    unit: str = ""
    """Label of the values; by default the declared one."""
    span: tuple[float, float] | None = None
    """Numbers that the values' axis covers too."""
    log: bool = False
    """True if y begins logarithmic, whatever its quantities say."""
    made: CurvePanel | HeatmapPanel | None = None
    """The panel, if it is not made from the numbers."""
    part: str = ""
    """Words for the part of the blocks that it shows; "" for all."""

    def within(self, at: Mapping[str, Any]) -> Drawn:
        """Return the same with further columns of the numbers."""
        return replace(self, numbers=[array.within(at) for array in self.numbers])

    def panel(self, id_: str, runs: Sequence[str], declared: Mapping[str, Quantity]) -> ChartPanel | None:
        """Build the panel; None if nothing runs along an axis.

        Args:
            id_: id of the panel in the page.
            runs: names of the page's runs.
            declared: quantities by name.
        """
        if isinstance(self.made, CurvePanel):
            return replace(self.made, id=id_, span=self.span)
        if self.made is not None:
            return replace(self.made, id=id_)
        joined = _joined(self.numbers)
        names = {name for array in joined for name in _axes(array)}
        log = self.log or any(getattr(declared.get(_plain(a.quantity)), "scale", "") == "log" for a in joined)
        kinds = list(dict.fromkeys(a.quantity for a in joined if not _is_control(a)))
        at_steps = all("step" in array.at for array in self.numbers)
        if at_steps and {"layer", "head"} <= names <= {"layer", "head", "step"}:
            found = [self._series(array, runs, kinds, len(kinds) > 1) for array in joined]
            finite = np.concatenate([s.values[np.isfinite(s.values)] for s in found] or [np.zeros(0)])
            low, high = (min(0.0, float(finite.min())), max(1.0, float(finite.max()))) if len(finite) else (0, 1)
            many = max(np.size(series.values) for series in found) > _MOST_CELLS
            unit = self.unit or _measure(kinds, declared)
            return HeatmapPanel(id_, "", found, limits=(low, high), unit=unit, is_still=many)
        joined = [part for array in joined for part in _few_heads(array)]
        several = len({array.quantity for array in joined}) > 1
        found = [self._series(array, runs, kinds, several) for array in joined if np.size(array.values)]
        lengths = {name: max((len(s.axes[name]) for s in found if name in s.axes), default=0) for name in names}
        # Single steps are no axis beside another.
        along = [name for name in _ALONG if name in names and not (name == "step" and at_steps)]
        x = next((name for name in along if lengths[name] > 1), next(iter(along), None))
        if x is None:
            return None
        shown = [series for series in found if x in series.axes]
        shown += [
            Series(np.asarray(a.values, dtype=float), _axes(a), None, a.quantity, "control", facet=_facet(a, several))
            for a in self.beside
        ]
        unit = self.unit or _measure(kinds, declared)
        return CurvePanel(id_, "", shown, x, unit=unit, log=log, x_log=x in _SPACED, span=self.span)

    def _series(self, array: LabelledArray, runs: Sequence[str], kinds: Sequence[str], several: bool) -> Series:
        given = self.names.get(array.quantity)
        words = [given if given is not None else _name(array.quantity)] if several or given else []
        words += [f"block {array.at['layer']}"] if "layer" in array.at and not _facet(array, several) else []
        words += [array.at["head"]] if "head" in array.at else []
        if array.quantity.startswith("bias_text/") and not (given and "text" in given):
            words.append("text probe")
        run = runs.index(array.at["run"]) if array.at.get("run") in runs else None
        look: Look = LOOKS[kinds.index(array.quantity) % len(LOOKS)] if array.quantity in kinds else "control"
        look = "band" if _plain(array.quantity) in _BANDS else look
        if array.at.get("head") in ("least head", "largest head"):
            look = "dotted"
        axes, values = _axes(array), np.asarray(array.values, dtype=float)
        heads = ("head" in axes or "head" in array.at) and "layer" in axes
        facet = "layer" if heads else _facet(array, several)
        name = ", ".join(filter(None, words))
        return Series(values, axes, run, name, look, str(array.at.get("probe", "")), facet)


def on_one_scale(drawn: Sequence[Drawn]) -> list[Drawn]:
    """Give panels that stand side by side one range of values."""
    every: list[np.ndarray] = []
    for one in drawn:
        every += [s.values for s in one.made.series] if one.made else [array.values for array in one.numbers]
    finite = np.concatenate([np.asarray(values, dtype=float).ravel() for values in every] or [np.zeros(0)])
    finite = finite[np.isfinite(finite)]
    span = (float(finite.min()), float(finite.max())) if len(finite) and len(drawn) > 1 else None
    return [replace(one, span=one.span or span) for one in drawn]


def _facet(array: LabelledArray, several: bool) -> str:
    """Return the small panel of an array of one block beside others."""
    return f"block {array.at['layer']}" if several and "layer" in array.at else ""


def _few_heads(array: LabelledArray) -> list[LabelledArray]:
    """Return the array or, for more heads than lines can show, their mean, least and largest."""
    names = list(_axes(array))
    if "head" not in names or np.shape(array.values)[names.index("head")] <= _MOST_HEADS:
        return [array]
    place = names.index("head")
    axes = [axis for i, axis in enumerate(array.axes) if i != place]
    values = array.values
    parts = {"mean of heads": values.mean(place), "least head": values.min(place), "largest head": values.max(place)}
    return [LabelledArray(array.quantity, part, axes, {**array.at, "head": words}) for words, part in parts.items()]


def _measure(kinds: Sequence[str], declared: Mapping[str, Quantity]) -> str:
    """Return the label of the y axis: label and unit of one declared quantity, or the common unit of several."""
    names = {_plain(kind) for kind in kinds}
    if len(names) > 1:
        units = {declared[name].unit if name in declared else "" for name in names}
        return units.pop() if len(units) == 1 else ""
    quantity = declared.get(next(iter(names), ""))
    return "" if quantity is None else quantity.axis_label


def _plain(quantity: str) -> str:
    return quantity if quantity in LOGGED else quantity.rpartition("/")[2]


def _name(quantity: str) -> str:
    """Return the name of a line beside others."""
    return LOGGED[quantity].label if quantity in LOGGED else _plain(quantity).replace("_", " ")


def _axes(array: LabelledArray) -> dict[str, Sequence[Any]]:
    """Return names and coordinates of an array's axes; a token's text says more than its id."""
    return {("text" if "text" in axis else next(iter(axis))): _words(axis) for axis in array.axes}


def _words(axis: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    return [one_line(text) for text in axis["text"]] if "text" in axis else next(iter(axis.values()))


def _joined(numbers: Sequence[LabelledArray]) -> list[LabelledArray]:
    """Join arrays that differ only in their step into one over steps, among which the scrubber chooses."""
    groups: dict[Any, list[LabelledArray]] = {}
    for array in numbers:
        rest = tuple(sorted((name, str(value)) for name, value in array.at.items() if name != "step"))
        axes = tuple((name, tuple(coordinates)) for name, coordinates in _axes(array).items())
        groups.setdefault((array.quantity, rest, axes), []).append(array)
    found = []
    for held in groups.values():
        first = held[0]
        if "step" not in first.at:
            found += held
            continue
        steps = [int(array.at["step"]) for array in held]
        at = {name: value for name, value in first.at.items() if name != "step"}
        values = np.stack([np.asarray(array.values, dtype=float) for array in held])
        found.append(LabelledArray(first.quantity, values, [{"step": steps}, *first.axes], at))
    return found


def _is_control(array: LabelledArray) -> bool:
    return _plain(array.quantity) in _CONTROLS or array.quantity in _CONTROLS
