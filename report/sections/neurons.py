"""Super neurons: hidden units of the MLP that answer to the first token alone amplify its difference [SO]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ...findings.run_history import PROBES, arrays_of, measured_probes
from ...metrics.quantities import MEASURED
from ..charts.specs import CurvePanel, Drawn, Series
from ..csv_files import LabelledArray
from ..table import Column, Table
from .declared import Link
from .section import Listing, Section
from .snapshot_view import LISTED, Arrays, SnapshotView
from .training_view import BlockValues, TrainingView
from .value_aggregation import positive_ratio

_LARGEST_Z = BlockValues(MEASURED["neuron_z"], lambda a: positive_ratio(a[:, 0]))
_Z, _RATIO = (MEASURED[name].level({}) for name in ("neuron_z", "neuron_ratio"))  # what makes a super neuron


def _over_training(view: TrainingView, section: Section) -> None:
    caption = "Robust z of the unit that position 0 excites most, by block."
    view.add_blocks(section, "z", caption, _LARGEST_Z, unit="largest robust z")
    curves = view.by_probe("super_neurons")
    view.add_curves(section, "count", "Super neurons in all blocks.", curves, MEASURED["super_neurons"].label)


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    caption = (
        "Mean absolute activation of the hidden units, one of those that lie on one another; marked are the super "
        "neurons among the ten units of largest z."
    )
    needs = ["activation_first", "activation_others", "neuron_index", "neuron_is_super", "super_neurons"]
    blocks, caption = view.some_blocks(caption)
    view.add(section, "units", caption, needs, partial(_draw_units, blocks))
    for prefix in measured_probes(view.snapshot):
        _list_units(view, section, prefix)


def _draw_units(blocks: Sequence[int], arrays: Arrays) -> Drawn | None:
    """Draw the hidden units at the first position against the same units at the other positions."""
    first, others = arrays["activation_first"], arrays["activation_others"]
    # Blocks that show none, such as those with experts, have no number at all.
    seen = np.array([not np.isnan(of_layer).all() for of_layer in first])
    every = np.concatenate([first[seen].ravel(), others[seen].ravel()])
    if not np.isfinite(every).all() or not (every > 0).any():
        return None
    is_super = np.zeros(first.shape, dtype=bool)
    of_seen = is_super[seen]
    np.put_along_axis(of_seen, arrays["neuron_index"][seen].astype(int), arrays["neuron_is_super"][seen] > 0, axis=1)
    is_super[seen] = of_seen
    silent = max(float(every[every > 0].min()), 1e-4 * float(every.max()))
    numbers, dots = [], []
    for layer in (block for block in blocks if seen[block]):
        n_super = int(arrays["super_neurons"][layer])
        title = f"block {layer + 1}: {n_super} super" if n_super else f"block {layer + 1}"
        shown = _not_hidden(first[layer], others[layer], is_super[layer], silent)
        for name, units in (("activation_first", first[layer]), ("activation_others", others[layer])):
            numbers.append(LabelledArray(name, units[shown], [{"unit": shown.tolist()}], {"layer": layer + 1}))
        for name, run, of_kind in (("unit", None, ~is_super[layer]), ("super neuron", 0, is_super[layer])):
            held = shown[of_kind[shown]]
            x, y = np.maximum(others[layer][held], silent), np.maximum(first[layer][held], silent)
            dots.append(Series(y, {"elsewhere": x.tolist()}, run, name, "dots", facet=title))
    if not numbers:
        return None
    ends = np.array([silent, float(every.max())])
    guides = [
        Series(ends, {"elsewhere": (ends / ratio).tolist()}, None, name, "control")
        for name, ratio in (("equal", 1.0), (f"{_RATIO:g} times", _RATIO))
    ]
    panel = CurvePanel("", "", [*dots, *guides], "elsewhere", "at position 0", log=True, x_log=True)
    return Drawn(numbers, made=panel)


def _not_hidden(
    first: np.ndarray, others: np.ndarray, is_super: np.ndarray, silent: float, cells: float = 30
) -> np.ndarray:
    r"""Return the indices of units that no other hides: one per cell of a grid of so many cells per decade.

    Args:
        first: ``[F]``, mean \|activation\| at position 0.
        others: ``[F]``, at the others.
        is_super: ``[F]`` bool.
        silent: activations below it are drawn there: a logarithmic axis has no 0.
        cells: cells per decade.
    """
    places = np.round(cells * np.log10(np.maximum([others, first], silent)), 0)
    # Super neurons first, so that none of them is the one that is left out.
    order = np.argsort(~is_super, kind="stable")
    _, kept = np.unique(places[:, order], axis=1, return_index=True)
    return np.sort(order[kept])


#: Columns of the list of units: array, heading, format.
_UNIT_COLUMNS = (
    ("neuron_first", "at position 0", ".4g"),
    ("neuron_others", "elsewhere", ".4g"),
    ("neuron_ratio", "ratio", "ratio"),
    ("neuron_z", "robust z", ".1f"),
    ("neuron_gate_norm", "gate norm", ".2f"),
    ("neuron_up_norm", "up norm", ".2f"),
    ("neuron_down_sparsity", "down max/mean", ".1f"),
    ("neuron_down_dimension", "writes channel", "d"),
)


def _list_units(view: SnapshotView, section: Section, prefix: str) -> None:
    arrays = arrays_of(view.snapshot, prefix)
    if "neuron_index" not in arrays or any(name not in arrays for name, _, _ in _UNIT_COLUMNS):
        return
    index, z, is_super = arrays["neuron_index"], arrays["neuron_z"], arrays["neuron_is_super"]
    order = np.argsort(-np.nan_to_num(z, nan=-np.inf).ravel(), kind="stable")[:LISTED]
    order = order[~np.isnan(index.ravel()[order].astype(float))]
    shown = [column for column in _UNIT_COLUMNS if not np.isnan(arrays[column[0]].astype(float)).all()]
    rows, units = [], []
    for layer, place in zip(*np.unravel_index(order, z.shape), strict=True):
        values = [float(arrays[name][layer, place]) for name, _, _ in shown]
        units.append((int(layer) + 1, int(index[layer, place])))
        rows.append([*units[-1], *values, "yes" if is_super[layer, place] > 0 else "no"])
    axis = {"layer": [layer for layer, _ in units], "unit": [unit for _, unit in units]}
    numbers = [LabelledArray(name, arrays[name].ravel()[order], [axis], view.at(prefix)) for name, _, _ in shown]
    probe, of_units = PROBES[prefix], [Column(title, format=spec) for _, title, spec in shown]
    columns = [Column("block"), Column("unit"), *of_units, Column("super")]
    section.listings.append(
        Listing(
            "Units of largest z" + (f", {probe} probe" if prefix else ""),
            Table(columns, rows),
            f"neurons-list{'-' + probe if prefix else ''}.csv",
            numbers,
        )
    )


NEURONS = Link(
    "neurons",
    "Super neurons",
    "Hidden units of the MLP that answer to the first token far more than their neighbours (robust z of at least "
    f"{_Z:g}) and far more than to other tokens (at least {_RATIO:g} times) carry its difference on.",
    _over_training,
    "Hidden units of the MLP at position 0 against the other positions. A super neuron is excited there far more "
    f"than its layer's other units (robust z of at least {_Z:g}), and at least {_RATIO:g} times as much as elsewhere.",
    _in_snapshot,
    quantities=(
        "super_neurons", "activation_first", "activation_others", "neuron_index", "neuron_is_super",
        *(name for name, _, _ in _UNIT_COLUMNS),
    ),
)  # fmt: skip
