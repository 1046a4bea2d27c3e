"""Size limit of pages of deep models: arrays that panels share are stored once, and long arrays keep only some of their
steps.

A page may hold `MOST_NUMBERS` numbers. If its panels have more, the longest arrays are thinned: first steps, then
positions, spread over the measured ones, always with the first and the last. A note below the panel says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .specs import ChartPanel, CurvePanel, HeatmapPanel, Series

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
