"""Layout of axes, legend and colour bars of a figure: from the widths of letters, in one pass, without drawing.

matplotlib's own layouts draw every text to learn its size, twice; that took more than half of a page's time. The
report's pictures are a grid of axes of one size, with a legend above and a colour bar to the right, which determines
all places. Lengths are points.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis, YAxis
from matplotlib.layout_engine import LayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ...text import shorten
from ..labels import text_height, text_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from matplotlib.text import Text


# ---------------------------------------------------------------- light axes
# Axes that create no ticks until matplotlib draws them, for files: a page needs none.
#
# A tick is three lines and two texts; creating them took half of a picture's time.


def _need_ticks(axis: Axis) -> None:
    axis.get_major_ticks(1)
    axis.get_minor_ticks(1)


class _LightX(XAxis):
    def reset_ticks(self) -> None:
        """Start without ticks, not with one of each kind; `get_major_ticks` creates those that are requested."""
        self.majorTicks, self.minorTicks = [], []

    def get_ticks_position(self) -> Any:
        """Return the place of ticks, which matplotlib reads from the first of each kind."""
        _need_ticks(self)
        return super().get_ticks_position()


class _LightY(YAxis):
    def reset_ticks(self) -> None:
        """Start without ticks, like the x axis."""
        self.majorTicks, self.minorTicks = [], []

    def get_ticks_position(self) -> Any:
        """Return the place of ticks, like the x axis."""
        _need_ticks(self)
        return super().get_ticks_position()


class LightAxes(Axes):
    """Axes that equal matplotlib's in everything else."""

    def _init_axis(self) -> None:
        self.xaxis = _LightX(self, clear=False)
        self.yaxis = _LightY(self, clear=False)
        for side, spine in self.spines.items():
            spine.register_axis(self.xaxis if side in ("bottom", "top") else self.yaxis)


# ---------------------------------------------------------------- layout

_EDGE = 3.0
"""Space between the drawing and the figure's edge."""
_GAP = 9.0
"""Space between neighbouring axes, beside their labels."""
_TICK_LENGTH, _TICK_PAD, _TITLE_PAD = 3.5, 3.5, 5.0
LABEL_PAD = 3.0
"""Space between an axis' numbers and its label."""
_BAR_WIDTH, _BAR_GAP = 9.0, 8.0
_HANDLE, _HANDLE_PAD, _COLUMN_GAP, _ROW, _LEGEND_GAP = 16.0, 6.0, 12.0, 12.5, 3.0
_LONGEST_ENTRY = 44


@dataclass(frozen=True)
class Margins:
    """Space that labels take around axes."""

    left: float = 0.0
    right: float = 0.0
    bottom: float = 0.0
    top: float = 0.0

    def or_more(self, other: Margins) -> Margins:
        """Return the larger of both on each side."""
        sides = ("left", "right", "bottom", "top")
        return Margins(*(max(getattr(self, side), getattr(other, side)) for side in sides))


@dataclass(frozen=True)
class _Bar:
    """A colour bar: its axes, the panels beside it, and its share of their height."""

    axes: Axes
    panels: Sequence[Axes]
    share: float


@dataclass(frozen=True)
class _Entry:
    """A legend's line, its mark, and its words."""

    parts: Sequence[Line2D | Rectangle]
    text: Text


def visible_ticks(axis: Axis) -> list[tuple[float, float, str]]:
    """List (place, share of the axis, text) of the ticks that an axis shows."""
    low, high = sorted(axis.get_view_interval())
    places = axis.get_majorticklocs()
    texts = axis.get_major_formatter().format_ticks(places.tolist())
    ends = axis.get_transform().transform([*axis.get_view_interval(), *places])
    span = ends[1] - ends[0]
    slack = 1e-6 * (high - low)
    found = zip(places, (ends[2:] - ends[0]) / span if span else ends[2:] * 0, texts, strict=True)
    return [(float(place), float(at), text) for place, at, text in found if low - slack <= place <= high + slack]


def labelled_side(axis: Axis) -> str:
    """Return the side of an axis' numbers, or ""."""
    shown = axis.get_tick_params()
    return next((side for side in ("bottom", "left", "right", "top") if shown.get(f"label{side}")), "")


def tick_reach(axis: Axis) -> float:
    """Return the distance from the axes to the numbers at their ticks."""
    shown = axis.get_tick_params()
    return float(shown.get("length", _TICK_LENGTH)) + float(shown.get("pad", _TICK_PAD))


def tick_size(axis: Axis) -> float:
    """Return the size of the numbers at an axis' ticks."""
    return float(axis.get_tick_params().get("labelsize", rcParams["xtick.labelsize"]))


class MeasuredLayout(LayoutEngine):
    """Layout of a figure that `new_figure` makes."""

    _adjust_compatible = False
    _colorbar_gridspec = False

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[_Entry] = []
        self._bars: list[_Bar] = []
        self._kept: dict[Axes, Margins] = {}
        self._turned: dict[Axes, float] = {}

    def set(self, **kwargs: Any) -> None:
        """Refuse all settings: there are none."""
        if kwargs:
            raise TypeError(f"MeasuredLayout has no {', '.join(kwargs)}")

    def keep_free(self, axes: Axes, **sides: float) -> None:
        """Keep at least this much space around ``axes``, for content other than labels."""
        self._kept[axes] = self._kept.get(axes, Margins()).or_more(Margins(**sides))

    def turn_names(self, axes: Axes, angle: float) -> None:
        """Note that the names below ``axes`` rise to their ticks at this angle in degrees."""
        self._turned[axes] = math.radians(angle)

    def add_bar(self, axes: Axes, panels: Sequence[Axes], share: float) -> None:
        """Place ``axes`` to the right of ``panels``, over this share of their height."""
        self._bars.append(_Bar(axes, panels, share))

    def add_entries(self, figure: Figure, entries: Sequence[tuple[str, Any]]) -> None:
        """Add entries to the legend above the axes; the figure grows by its height, the axes keep theirs."""
        inches = figure.dpi_scale_trans
        before = self._legend_rows(figure)
        for label, handle in entries:
            words = figure.text(
                0,
                0,
                shorten(label, _LONGEST_ENTRY),
                transform=inches,
                va="center",
                parse_math=False,
                fontsize=rcParams["legend.fontsize"],
            )
            parts = _handle(handle, inches)
            for part in parts:
                figure.add_artist(part)
            self._entries.append(_Entry(parts, words))
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + (self._legend_rows(figure) - before) * _ROW / 72)

    def execute(self, figure: Figure) -> None:
        """Place everything; the figure's size and letters may have changed since the last time."""
        width, height = (72 * float(side) for side in figure.get_size_inches())
        self._place_legend(figure, height)
        height -= self._legend_rows(figure) * _ROW + (_LEGEND_GAP if self._entries else 0)
        grid = [axes for axes in figure.axes if axes.get_subplotspec() is not None]
        margins = {axes: Margins(30, 8, 24, 10) for axes in grid}
        size = (width, height)
        # The number of ticks that fit depends on the size of the axes, which depends on the ticks' labels.
        for _ in range(2):
            sizes = self._place(figure, grid, margins, size)
            margins = {axes: self._measure(axes, sizes) for axes in grid}
        self._place(figure, grid, margins, size)

    # ── legend ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _legend_columns(self, figure: Figure) -> list[float]:
        """Return the widths of the legend's columns: as many as fit."""
        widths = [
            _HANDLE + _HANDLE_PAD + text_width(entry.text.get_text(), float(entry.text.get_fontsize())) + _COLUMN_GAP
            for entry in self._entries
        ]
        room = 72 * float(figure.get_size_inches()[0]) - 2 * _EDGE + _COLUMN_GAP
        for columns in range(len(widths), 1, -1):
            found = [max(widths[column::columns]) for column in range(columns)]
            if sum(found) <= room:
                return found
        return [max(widths)] if widths else []

    def _legend_rows(self, figure: Figure) -> int:
        return -(-len(self._entries) // max(len(self._legend_columns(figure)), 1))

    def _place_legend(self, figure: Figure, height: float) -> None:
        columns = self._legend_columns(figure)
        for i, entry in enumerate(self._entries):
            row, column = divmod(i, len(columns))
            x, y = _EDGE + sum(columns[:column]), height - _EDGE - (row + 0.5) * _ROW + 1
            for part in entry.parts:
                if isinstance(part, Rectangle):
                    part.set_bounds(x / 72, (y - 3) / 72, _HANDLE / 72, 6 / 72)
                    continue
                places = [x + _HANDLE / 2] if part.get_marker() not in ("", "None", None) else [x, x + _HANDLE]
                part.set_data([place / 72 for place in places], [y / 72] * len(places))
            entry.text.set_position(((x + _HANDLE + _HANDLE_PAD) / 72, y / 72))

    # ── axes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _place(
        self, figure: Figure, grid: Sequence[Axes], margins: dict[Axes, Margins], size: tuple[float, float]
    ) -> tuple[float, float]:
        """Place every axes; return their size."""
        width, height = size
        whole = 72 * float(figure.get_size_inches()[1])
        left, right, top, bottom = (defaultdict[int, float](float) for _ in range(4))
        at = {axes: _cell(axes) for axes in grid}
        for axes, around in margins.items():
            row, column = at[axes]
            left[column], right[column] = max(left[column], around.left), max(right[column], around.right)
            top[row], bottom[row] = max(top[row], around.top), max(bottom[row], around.bottom)
        rows, columns = (1 + max((cell[i] for cell in at.values()), default=0) for i in (0, 1))
        for bar in self._bars:
            right[max(at[axes][1] for axes in bar.panels)] += _BAR_GAP + _BAR_WIDTH + self._across(bar.axes.yaxis)
        wide = width - 2 * _EDGE - (columns - 1) * _GAP - sum(left.values()) - sum(right.values())
        tall = height - 2 * _EDGE - (rows - 1) * _GAP - sum(top.values()) - sum(bottom.values())
        wide, tall = max(wide / columns, 10.0), max(tall / rows, 10.0)
        for axes, (row, column) in at.items():
            x = _EDGE + sum(left[c] + right[c - 1] for c in range(column + 1)) + column * (wide + _GAP)
            y = height - _EDGE - sum(top[r] + bottom[r - 1] for r in range(row + 1)) - row * (tall + _GAP) - tall
            axes.set_position((x / width, y / whole, wide / width, tall / whole))
            axes.apply_aspect()
        for bar in self._bars:
            boxes = [axes.get_position() for axes in bar.panels if axes.get_visible()]
            low, high = min(box.y0 for box in boxes), max(box.y1 for box in boxes)
            x, height_of_bar = max(box.x1 for box in boxes) + _BAR_GAP / width, (high - low) * bar.share
            bar.axes.set_position((x, (low + high - height_of_bar) / 2, _BAR_WIDTH / width, height_of_bar))
        return wide, tall

    def _across(self, axis: Axis) -> float:
        """Return the space that numbers and label of a vertical axis take beside it."""
        taken = 0.0
        if labelled_side(axis):
            size = tick_size(axis)
            taken = tick_reach(axis) + max((text_width(text, size) for _, _, text in visible_ticks(axis)), default=0.0)
        label = axis.get_label_text()
        return taken + (LABEL_PAD + text_height(label, _size(axis.label)) if label else 0.0)

    def _measure(self, axes: Axes, size: tuple[float, float]) -> Margins:
        """Return the space that labels take around axes of this size."""
        if not axes.get_visible():
            return Margins()
        left = self._across(axes.yaxis)
        bottom = right = 0.0
        axis = axes.xaxis
        letters = tick_size(axis)
        if labelled_side(axis):
            ticks = [(at, text_width(text, letters)) for _, at, text in visible_ticks(axis)]
            turn = self._turned.get(axes)
            # Numbers below the ends reach beyond them.
            if turn is None:
                bottom = tick_reach(axis) + 1.2 * letters
                right = max((wide / 2 - (1 - at) * size[0] for at, wide in ticks), default=0.0)
                left = max([left, *(wide / 2 - at * size[0] for at, wide in ticks)])
            else:
                longest = max((wide for _, wide in ticks), default=0.0)
                bottom = tick_reach(axis) + math.sin(turn) * longest + math.cos(turn) * 1.2 * letters
                left = max([left, *(math.cos(turn) * wide + letters - at * size[0] for at, wide in ticks)])
        label = axis.get_label_text()
        bottom += LABEL_PAD + text_height(label, _size(axis.label)) if label else 0.0
        title = axes.get_title(loc="left")
        top = _TITLE_PAD + text_height(title, _size(axes.title)) if title else 0.6 * letters
        if labelled_side(axes.yaxis):
            bottom = max(bottom, 0.6 * letters)
        found = Margins(max(left, 2.0), max(right, 2.0), max(bottom, 2.0), top)
        return found.or_more(self._kept.get(axes, Margins()))


def layout_of(figure: Any) -> MeasuredLayout:
    """Return the layout of a figure that `new_figure` made."""
    engine = figure.get_layout_engine()
    assert isinstance(engine, MeasuredLayout)
    return engine


def _cell(axes: Axes) -> tuple[int, int]:
    """Return row and column of a panel."""
    spec = axes.get_subplotspec()
    assert spec is not None
    return spec.rowspan.start, spec.colspan.start


def _size(text: Text) -> float:
    return float(text.get_fontsize())


def _handle(handle: Any, inches: Any) -> list[Line2D | Rectangle]:
    """Build a legend's symbol: for a line the line with and without its marker, for anything else its colour."""
    if not isinstance(handle, Line2D):
        face = handle.get_facecolor()
        return [Rectangle((0, 0), 0, 0, facecolor=face[0] if getattr(face, "ndim", 1) == 2 else face, transform=inches)]
    line, mark = Line2D([], []), Line2D([], [])
    for part in (line, mark):
        part.update_from(handle)
        part.set_transform(inches)
    line.set_marker("")
    mark.set_linestyle("none")
    marked = handle.get_marker() not in ("", "None", None)
    lined = handle.get_linestyle() not in ("", "None", "none", None)
    return [part for part, drawn in ((line, lined), (mark, marked)) if drawn]
