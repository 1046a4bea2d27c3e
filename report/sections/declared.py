"""Pictures of a quantity from its declaration alone, and links of the causal chain, each a section in both pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...files import finite_or_nan
from ...findings.formatting import format_value
from ...findings.run_history import GROUPS, RunHistory, measured_probes
from ...metrics.quantities import LOGGED
from ...metrics.quantity import AXES, Quantity
from ..charts.specs import Drawn
from ..csv_files import LabelledArray
from ..table import Column, Table
from .section import Listing, Section
from .snapshot_view import Arrays, SnapshotView, draw_by_block, drawn_positions, levels
from .training_view import BlockValues, TrainingView, arrays_at, control_label

# ---------------------------------------------------------------- declared
# Pictures of a quantity that no link draws itself, from its declaration alone: chosen by its axes.
#
# A scalar is a curve over training beside its control; a value per block is a line per block; a value per head is
# small multiples and a map; values along positions, or along another index, are lines over it.

_BLOCKS = ("layer", "state")
Moment = tuple[Mapping[str, Any], np.ndarray]
"""Columns of the numbers at a time, and the array."""


def draw_over_training(view: TrainingView, section: Section, quantities: Iterable[Quantity]) -> None:
    """Add the pictures of ``quantities`` to a section of the page of runs."""
    every = list(quantities)
    controls_of_others = {quantity.control for quantity in every}
    for quantity in every:
        key, caption = _key(section, quantity), _caption(quantity)
        if quantity.name in controls_of_others:
            curves = []  # they stand beside what they control
        elif quantity.name in LOGGED:
            curves = view.logged({quantity.name: ""})
        else:
            curves = view.by_probe(quantity.name) if quantity.has_scalar else []
        controls = view.controls(quantity, curves)
        view.add_curves(section, key, caption, curves, quantity.axis_label, controls)
        if not quantity.axes:
            continue
        values = BlockValues(quantity)
        if _has_blocks(quantity):
            embeddings = quantity.axes[0] == "state"
            view.add_blocks(section, f"{key}-blocks", f"{caption} By block.", values, embeddings=embeddings)
        if quantity.axes == ("layer", "head"):
            heads = replace(values, read=np.asarray)
            view.add_heads(section, f"{key}-heads", f"{caption} Every head.", heads)
            view.add_per_probe(section, f"{key}-map", f"{caption} By block and head.", partial(_map_of_run, quantity))
        elif _has_lines(quantity):
            over = AXES[quantity.axes[-1]].column
            view.add_per_probe(section, f"{key}-{over}", f"{caption} By {over}.", partial(_lines_of_run, quantity))
        elif not _has_blocks(quantity) and any(quantity.name in s.arrays for run in view.runs for s in run.snapshots):
            section.notes.append(_without_picture(quantity))


def draw_in_snapshot(view: SnapshotView, section: Section, quantities: Iterable[Quantity]) -> None:
    """Add the pictures of ``quantities``, and a list of their scalars, to a section of the page of a snapshot."""
    every = list(quantities)
    for quantity in every:
        if not quantity.axes:
            continue
        key, caption, name = _key(section, quantity), _caption(quantity), quantity.name
        if quantity.axes == ("layer", "head"):
            # A block is a row of it.
            view.add(section, f"{key}-map", f"{caption} By block and head.", [name], partial(_draw_map, quantity))
            continue
        if _has_blocks(quantity):
            draw = partial(_draw_blocks, view, quantity)
            view.add(section, f"{key}-blocks", f"{caption} By block.", [name], draw)
        if _has_lines(quantity):
            over = AXES[quantity.axes[-1]].column
            blocks: list[int] = []
            text = f"{caption} By {over}."
            if len(quantity.axes) == 3:
                blocks, text = view.some_blocks(text, name)
            view.add(section, f"{key}-{over}", text, [name], partial(_draw_lines, quantity, blocks))
        elif not _has_blocks(quantity) and name in view.snapshot.arrays:
            section.notes.append(_without_picture(quantity))
    _list_scalars(view, section, [quantity for quantity in every if quantity.has_scalar])


def _key(section: Section, quantity: Quantity) -> str:
    """Return the name of its pictures in their section: its name, unless the link has a picture of that name."""
    key = quantity.name.replace("/", "-")
    taken = {picture.file for picture in section.pictures} | {listing.file for listing in section.listings}
    clash = any(file.removesuffix(".csv").startswith(f"{section.id}-{key}") for file in taken)
    return f"own-{key}" if clash else key


def _caption(quantity: Quantity) -> str:
    label = quantity.label[:1].upper() + quantity.label[1:]
    return f"{label}: {quantity.definition.rstrip('.')}."


def _without_picture(quantity: Quantity) -> str:
    return f"No picture is made of {quantity.label} {quantity.shape}: arrays.safetensors holds it as {quantity.name}."


def _has_blocks(quantity: Quantity) -> bool:
    """Return True if every block has one number of it."""
    return quantity.axes[0] in _BLOCKS and (len(quantity.axes) == 1 or bool(quantity.per_block))


def _has_lines(quantity: Quantity) -> bool:
    """Return True if it is an array of lines: one, one for each block, or one for each head of every block."""
    *lead, _ = quantity.axes
    return tuple(lead) in ((), ("layer",), ("state",), ("layer", "head")) and quantity.axes[-1] not in (
        *_BLOCKS,
        "head",
    )


def _labels(quantity: Quantity, shape: Sequence[int]) -> list[dict[str, Sequence[int]]]:
    """Return the columns of its array's axes."""
    axes = [AXES[name] for name in quantity.axes]
    return [{axis.column: range(axis.first, axis.first + n)} for axis, n in zip(axes, shape, strict=True)]


# ── maps of heads ────────────────────────────────────────────────────────────────────────────────────────────────────


def _maps(quantity: Quantity, moments: Sequence[Moment]) -> Drawn | None:
    if not any(np.isfinite(array).any() for _, array in moments):
        return None
    return Drawn([LabelledArray(quantity.name, array, _labels(quantity, array.shape), at) for at, array in moments])


def _map_of_run(quantity: Quantity, run: RunHistory, prefix: str) -> Drawn | None:
    return _maps(quantity, _moments(quantity, run, prefix))


def _draw_map(quantity: Quantity, arrays: Arrays) -> Drawn | None:
    return _maps(quantity, [({}, arrays[quantity.name].astype(float))])


def _moments(quantity: Quantity, run: RunHistory, prefix: str) -> list[Moment]:
    return [
        ({"step": step}, arrays[quantity.name].astype(float))
        for _, step, arrays in arrays_at(run, prefix, quantity.name)
        if arrays[quantity.name].ndim == len(quantity.axes)
    ]


# ── lines over an index ──────────────────────────────────────────────────────────────────────────────────────────────


def _lines_of_run(quantity: Quantity, run: RunHistory, prefix: str) -> Drawn | None:
    """Build the lines at birth and now; for heads their mean."""
    moments = _moments(quantity, run, prefix)
    if not any(np.isfinite(array).any() for _, array in moments):
        return None
    if len(quantity.axes) == 3:
        quantity = replace(quantity, axes=(quantity.axes[0], quantity.axes[2]))
        moments = [(at, array.mean(1)) for at, array in moments]
    return _lines(quantity, moments)


def _lines(quantity: Quantity, moments: Sequence[Moment], blocks: Sequence[int] | None = None) -> Drawn:
    """Draw lines over the last axis; of ``blocks`` alone, if they are given."""
    shown = drawn_positions(max(array.shape[-1] for _, array in moments))
    last, numbers = AXES[quantity.axes[-1]], []
    for at, array in moments:
        kept = shown[shown < array.shape[-1]]
        labels = _labels(quantity, array.shape)
        labels[-1] = {last.column: (kept + last.first).tolist()}
        if blocks is not None:
            labels[0], array = {"layer": [layer + 1 for layer in blocks]}, array[blocks]
        numbers.append(LabelledArray(quantity.name, array[..., kept], labels, at))
    return Drawn(numbers, unit=quantity.axis_label)


def _draw_lines(quantity: Quantity, blocks: Sequence[int], arrays: Arrays) -> Drawn | None:
    array = arrays[quantity.name].astype(float)
    if not np.isfinite(array).any():
        return None
    return _lines(quantity, [({}, array)], blocks if len(quantity.axes) == 3 else None)


# ── blocks and scalars of a snapshot ─────────────────────────────────────────────────────────────────────────────────


def _draw_blocks(view: SnapshotView, quantity: Quantity, arrays: Arrays) -> Drawn | None:
    values = np.asarray(quantity.blocks(arrays[quantity.name]), dtype=float)
    start = AXES[quantity.axes[0]].first
    controls = []
    control = arrays.get(quantity.control) if isinstance(quantity.control, str) else None
    level = quantity.level(view.snapshot.summary)
    if control is not None and control.shape == values.shape:
        controls = [levels(str(quantity.control), control.tolist(), range(start, start + len(values)))]
    elif np.isfinite(level):
        controls = [levels("level", [level, level], [start, start + len(values) - 1])]
    names = {array.quantity: control_label(quantity) for array in controls}
    return draw_by_block({quantity.name: values}, quantity.axis_label, start, controls, {quantity.name: "", **names})


def _list_scalars(view: SnapshotView, section: Section, quantities: Sequence[Quantity]) -> None:
    """Add a list of scalars on each probe, beside their controls."""
    summary = view.snapshot.summary
    probes = [prefix for prefix in measured_probes(view.snapshot) if GROUPS[prefix] in summary] or [""]
    rows, numbers = [], []
    for quantity in quantities:
        values = {prefix: summary.get(GROUPS[prefix], {}).get(quantity.name) for prefix in probes}
        if all(value is None for value in values.values()):
            continue
        level = quantity.level(summary)
        control = f"{control_label(quantity)} {format_value(level, quantity.format)}" if np.isfinite(level) else ""
        cells = [format_value(finite_or_nan(value), quantity.format) for value in values.values()]
        rows.append([quantity.axis_label, *cells, control])
        for prefix, value in values.items():
            numbers.append(LabelledArray(quantity.name, np.array(finite_or_nan(value)), [], view.at(prefix)))
    if rows:
        titles = ["", *(view.at(prefix)["probe"] for prefix in probes), "against"]
        table = Table([Column(title) for title in titles], rows)
        section.listings.append(Listing("Scalars", table, f"{section.id}-scalars.csv", numbers))


# ---------------------------------------------------------------- a link of the causal chain
# A section in both pages, over training and in one snapshot.


@dataclass(frozen=True)
class Link:
    """A link of the causal chain, or a trace of the seed: a section in both pages (`chain.LINKS` lists them)."""

    id: str
    """Id of the section, with which the names of its CSV files begin."""
    title: str
    lede: str
    """Introduction to the pictures over training."""
    over_training: Callable[[TrainingView, Section], None] = lambda view, section: None
    """Function that draws the link's own pictures for the page of runs."""
    snapshot_lede: str = ""
    """Lede of the section on the page of one snapshot; by default ``lede``."""
    in_snapshot: Callable[[SnapshotView, Section], None] = lambda view, section: None
    """Function that draws the link's own pictures for the page of a snapshot."""
    quantities: Sequence[str] = ()
    """Quantities that the link draws itself or leaves to tables and lists; all other quantities of its section are
    drawn as declared.
    """
    optional: bool = False
    """True if the page of runs leaves the section out when nothing is drawn."""
    explains: bool = True
    """True if a section without a drawing says why."""

    def section_over_training(self, view: TrainingView, declared: Sequence[Quantity]) -> Section | None:
        """Build the link's section of the page of runs, with further ``declared`` quantities; None if it has none."""
        section = Section(self.id, self.title, self.lede)
        self.over_training(view, section)
        draw_over_training(view, section, declared)
        if self.optional:
            return section if section.pictures or section.notes else None
        if self.explains:
            view.explain_if_empty(section)
        return section

    def section_in_snapshot(self, view: SnapshotView, declared: Sequence[Quantity]) -> Section | None:
        """Build the link's section of the page of a snapshot; None if there is nothing to show."""
        section = Section(self.id, self.title, self.snapshot_lede or self.lede)
        self.in_snapshot(view, section)
        draw_in_snapshot(view, section, declared)
        return section if section.pictures or section.listings else None
