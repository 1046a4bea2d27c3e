"""Live panels of every picture of the causal chain, from the same numbers as its CSV file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...metrics.quantities import LOGGED, MEASURED
from ...metrics.quantity import Quantity
from ..csv_files import LabelledArray
from ..text import one_line
from .specs import LOOKS, CurvePanel, HeatmapPanel, Look, Series

_ALONG = ("position", "rank", "epsilon", "index", "step", "layer")
"""Axes along which lines run: the first of these that the numbers have; the scrubber chooses among steps beside it."""
_CONTROLS = {q.control for q in (*MEASURED.values(), *LOGGED.values()) if isinstance(q.control, str)}
_CONTROLS |= {"level", "unigram_entropy", "predicted", "seedprint/z_stranger", "seedprint/weights_stranger"}
_MOST_CELLS = 4096
"""Largest number of cells in a live map; a larger one is a picture."""
_MOST_HEADS = 16
"""Largest number of heads whose lines are shown together."""
_SPACED = ("position", "rank")
"""Axes whose first coordinates matter most."""


def panel_of_numbers(
    id_: str, title: str, numbers: Sequence[LabelledArray], runs: Sequence[str], declared: Mapping[str, Quantity]
) -> CurvePanel | HeatmapPanel | None:
    """Build the panel of a picture; None if nothing runs along an axis.

    Args:
        id_: id of the panel in the page.
        title: title above it.
        numbers: numbers of the picture.
        runs: names of the page's runs.
        declared: quantities by name.
    """
    joined = _joined(numbers)
    names = {name for array in joined for name in _axes(array)}
    is_map = {"layer", "head"} <= names <= {"layer", "head", "step"} and all("step" in a.at for a in numbers)
    if is_map and max(np.size(array.values) for array in joined) > _MOST_CELLS:
        return None
    if not is_map:
        joined = [part for array in joined for part in _few_heads(array)]
    kinds = list(dict.fromkeys(a.quantity for a in joined if not _is_control(a)))
    several = len({array.quantity for array in joined}) > 1
    found = [_series(array, runs, several, kinds) for array in joined if np.size(array.values)]
    log = any(getattr(declared.get(_plain(a.quantity)), "scale", "") == "log" for a in joined)
    if is_map:
        finite = np.concatenate([np.ravel(s.values)[np.isfinite(np.ravel(s.values))] for s in found] or [np.zeros(0)])
        low, high = (min(0.0, float(finite.min())), max(1.0, float(finite.max()))) if len(finite) else (0.0, 1.0)
        return HeatmapPanel(id_, title, found, limits=(low, high))
    x = next((name for name in _ALONG if name in names), None)
    shown = [series for series in found if x in series.axes]
    if x is None or not any(len(series.axes[x]) > 1 for series in shown):
        return None
    return CurvePanel(id_, title, shown, x, unit=_measure(kinds, declared), log=log, x_log=x in _SPACED)


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


def _series(array: LabelledArray, runs: Sequence[str], several: bool, kinds: Sequence[str]) -> Series:
    words = [_name(array.quantity)] if several else []
    words += [f"block {array.at['layer']}"] if "layer" in array.at else []
    words += [array.at["head"]] if "head" in array.at else []
    if array.quantity.startswith("bias_text/"):
        words.append("text probe")
    run = runs.index(array.at["run"]) if array.at.get("run") in runs else None
    look: Look = "control" if _is_control(array) else LOOKS[kinds.index(array.quantity) % len(LOOKS)]
    if array.at.get("head") in ("least head", "largest head"):
        look = "dotted"
    probe = str(array.at.get("probe", ""))
    return Series(np.asarray(array.values, dtype=float), _axes(array), run, ", ".join(words), look, probe)
