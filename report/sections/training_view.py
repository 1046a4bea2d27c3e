"""Sections of quantities over training: curves of runs, lines of blocks, small multiples of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...findings.run_history import (
    GROUPS,
    PROBES,
    RunHistory,
    Start,
    arrays_of,
    declared_quantities,
    of_probe,
    start_of_all,
)
from ...metrics.quantities import LOGGED, MEASURED
from ...metrics.quantity import Quantity
from ..charts.specs import PICTURED, ChartPanel, Drawn, on_one_scale
from ..csv_files import LabelledArray
from ..pictures.panels import blocks_of_change
from .section import Picture, Section

AVERAGED = "averaged weights"
"""Legend of what ``optim.ema`` measures beside the trained weights."""
_MAX_POINTS = 600  # per loss curve; more than a picture has pixels says nothing more

Curves = Mapping[str, str]
"""Name of a quantity → its name in the legend."""
DrawRun = Callable[[RunHistory], Drawn | None]


@dataclass(frozen=True)
class Curve:
    """A quantity of one run over training, or a level that it is judged against."""

    name: str
    """Name in the legend."""
    numbers: LabelledArray

    @property
    def steps(self) -> Sequence[float]:
        """Steps of its points."""
        return self.numbers.axes[0]["step"]


def curve_of(
    name: str, quantity: str, steps: Sequence[float], values: Sequence[float], run: RunHistory | None = None
) -> Curve:
    """Make a curve of a run, or one common to all."""
    at = {} if run is None else {"run": run.name}
    return Curve(name, LabelledArray(quantity, np.asarray(values, dtype=float), [{"step": steps}], at))


def level_of(name: str, value: float, last: float, quantity: str = "level") -> Curve:
    """Make the curve of a constant level from step 0 to ``last``."""
    return curve_of(name, quantity, [0.0, last], [value, value])


def last_step(curves: Sequence[Curve]) -> float:
    """Return the last step of any of the curves, 0 if there are none."""
    return max((max(curve.steps) for curve in curves), default=0.0)


@dataclass(frozen=True)
class BlockValues:
    """A quantity with a value for every block, or every head, of a snapshot."""

    quantity: Quantity
    """Quantity that names the values and their control."""
    read: Callable[[np.ndarray], np.ndarray] | None = None
    """Reduction of its array to ``[blocks]`` or ``[blocks, H]``; by default the declared one."""
    array: str = ""
    """The array that it is read from; by default the declared one."""
    title: str = ""
    """Title above its panel, if a picture has several."""
    as_share: bool = False
    """True if attention weights are read as shares of their row."""

    def in_run(self, run: RunHistory, prefix: str) -> BlockValues:
        """Return the values to read of a run, on the probe of a prefix."""
        name = run.shown_array(self.quantity.name, prefix) if self.as_share else self.quantity.name
        return self if name == self.quantity.name else replace(self, quantity=MEASURED[name])

    @property
    def name(self) -> str:
        """Name of the values in the CSV."""
        column = self.quantity.by_block
        return (column.key if column else "") or self.quantity.name

    def values(self, array: np.ndarray) -> np.ndarray:
        """Reduce an array of a snapshot to ``[blocks]`` or ``[blocks, H]``."""
        return np.asarray((self.read or self.quantity.blocks)(array), dtype=float)


def control_label(quantity: Quantity) -> str:
    """Return the label of the quantity's control in a legend."""
    control = quantity.control
    if quantity.control_label or control is None:
        return quantity.control_label
    return control.replace("_", " ") if isinstance(control, str) else f"{control:g}"


def shown_of_runs(runs: Sequence[RunHistory], name: str) -> Quantity:
    """Return the quantity that names a scalar of several runs: the share of the row, if one of them has shares. Those
    of runs whose rows sum to 1 are shares as they are.
    """
    names = {run.shown_scalar(name, group) for run in runs for group in GROUPS.values()}
    return MEASURED[next(iter(names - {name}), name)]


def steps_are_wide(runs: Sequence[RunHistory]) -> bool:
    """Return True if measured steps lie close early and wide late, so that panels space them logarithmically."""
    steps = sorted({s.step for run in runs for s in run.dated} - {0})
    return len(steps) > 2 and steps[len(steps) // 2] < steps[-1] / 4


@dataclass(frozen=True)
class TrainingView:
    """The runs of a page over training."""

    runs: Sequence[RunHistory]

    @property
    def start(self) -> Start:
        """Words for the start of these runs."""
        return start_of_all(run.start for run in self.runs)

    def explain_if_empty(self, section: Section) -> None:
        """Make ``section`` say why it has no pictures, if it has none."""
        if not section.pictures:
            grown = any(len(run.dated) > 1 for run in self.runs)
            section.notes.append(
                "The snapshots do not hold it." if grown else "Curves appear once there is a snapshot after birth."
            )

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Declarations of all that the snapshots may hold, by name."""
        return declared_quantities(snapshot for run in self.runs for snapshot in run.snapshots)

    def panel(self, picture: Picture) -> ChartPanel | None:
        """Build the panel of a picture."""
        return picture.drawn.panel(
            f"picture-{picture.id}", [run.name for run in self.runs], {**self.quantities, **LOGGED}
        )

    # ── curves of runs ───────────────────────────────────────────────────────────────────────────────────────────

    def logged(self, curves: Curves) -> list[Curve]:
        """Return the curves of keys of metrics.jsonl."""
        found = []
        for run in self.runs:
            for key, name in curves.items():
                steps, values = run.series(key)
                if np.isfinite(values).any():
                    found.append(curve_of(name, key, *thin(steps, values), run))
        return found

    def measured(self, curves: Curves, group: str = "bias", *, as_shares: bool = False) -> list[Curve]:
        """Return the curves of scalars of snapshots; ``group`` names the group of quantities of a probe.

        With ``as_shares``, attention weights are shares of their row.
        """
        found = []
        for run in self.runs:
            for raw, name in curves.items():
                key = run.shown_scalar(raw, group) if as_shares else raw
                steps, values = run.measured(key, group)
                if np.isfinite(values).any():
                    found.append(curve_of(name, f"{group}/{key}", steps, values, run))
        return found

    def by_probe(self, key: str, *, as_shares: bool = False) -> list[Curve]:
        """Return the curves of a snapshot scalar on the random probe and on the text probe (see `measured`)."""
        text = self.measured({key: "text probe"}, GROUPS["text."], as_shares=as_shares)
        return [*self.measured({key: "random probe" if text else ""}, as_shares=as_shares), *text]

    def controls(self, quantity: Quantity, curves: Sequence[Curve]) -> list[Curve]:
        """Return the controls of a declared quantity, to draw beside its ``curves``: measured levels, or a constant
        one.
        """
        name, label = quantity.control, control_label(quantity)
        if not curves or name is None:
            return []
        if isinstance(name, str) and name in {**LOGGED, **self.quantities}:
            return (self.logged if name in LOGGED else self.measured)({name: label})
        levels = {quantity.level(run.dated[-1].summary if run.dated else {}) for run in self.runs}
        return [level_of(label, level, last_step(curves)) for level in sorted(levels) if np.isfinite(level)]

    def add_curves(
        self,
        section: Section,
        key: str,
        caption: str,
        curves: Sequence[Curve],
        unit: str,
        controls: Sequence[Curve] = (),
    ) -> None:
        """Add a picture of curves, if at least one run has more than one point to draw."""
        if any(len(curve.steps) > 1 for curve in curves):
            every = [*curves, *controls]
            names = {curve.numbers.quantity: curve.name for curve in every}
            section.add(Drawn([curve.numbers for curve in every], names=names, unit=unit), key, caption)

    # ── pictures of one run ──────────────────────────────────────────────────────────────────────────────────────

    def add_per_run(self, section: Section, key: str, caption: str, draw: DrawRun) -> None:
        """Add one picture per run that has something to draw; their numbers share a file."""
        self._add([(section, key, caption, draw)], one_scale=False)

    def add_per_probe(
        self, section: Section, key: str, caption: str, draw: Callable[[RunHistory, str], Drawn | None]
    ) -> None:
        """Add the pictures that ``draw`` makes of each run's random probe, and of its text probe if it has one."""
        wanted = []
        for prefix, probe in PROBES.items():

            def draw_probe(run: RunHistory, prefix: str = prefix, probe: str = probe) -> Drawn | None:
                drawn = draw(run, prefix)
                return drawn and drawn.within({"probe": probe})

            wanted.append((section, *of_probe(prefix, key, caption), draw_probe))
        self._add(wanted, one_scale=True)

    def _add(self, wanted: Sequence[tuple[Section, str, str, DrawRun]], one_scale: bool) -> None:
        """Add pictures of one kind."""
        made: list[tuple[Section, str, str, RunHistory]] = []
        found: list[Drawn] = []
        for section, key, caption, draw in wanted:
            for run in self.runs[:PICTURED]:
                if (drawn := draw(run)) is not None:
                    made.append((section, key, caption, run))
                    found.append(drawn.within({"run": run.name}))
            for run in self.runs[PICTURED:]:
                if (drawn := draw(run)) is not None:
                    section.add_numbers(key, drawn.within({"run": run.name}).numbers)
        if one_scale:
            found = on_one_scale(found)
        for (section, key, caption, run), drawn in zip(made, found, strict=True):
            caption = f"{caption.rstrip('.')}; {drawn.part}." if drawn.part else caption
            section.add(drawn, key, caption if len(self.runs) == 1 else f"{run.name}. {caption}", run.index)

    def add_blocks(
        self,
        section: Section,
        key: str,
        caption: str,
        *quantities: BlockValues,
        unit: str = "",
        embeddings: bool = False,
    ) -> None:
        """Add a line per block over training, a picture per run and probe."""

        def draw(run: RunHistory, prefix: str) -> Drawn | None:
            numbers: list[LabelledArray] = []
            beside: dict[str, LabelledArray] = {}
            for raw in quantities:
                quantity = raw.in_run(run, prefix)
                steps, values = _read(run, prefix, quantity)
                if len(steps) < 2:
                    return None
                layers = range(0 if embeddings else 1, values.shape[1] + (not embeddings))
                numbers.append(LabelledArray(quantity.name, values, [{"step": steps.tolist()}, {"layer": layers}]))
                beside |= {array.quantity: array for array in _references(run, prefix, quantity, steps)}
            if not any(np.isfinite(array.values).any() for array in numbers):
                return None
            names = {quantity.name: quantity.title for quantity in quantities if quantity.title}
            return Drawn(numbers, list(beside.values()), names, unit or quantities[0].quantity.axis_label)

        self.add_per_probe(section, key, caption, draw)

    def add_heads(self, section: Section, key: str, caption: str, raw: BlockValues) -> None:
        """Add small multiples over training, one panel per block and a line per head; a picture per run and probe."""

        def draw(run: RunHistory, prefix: str) -> Drawn | None:
            quantity = raw.in_run(run, prefix)
            steps, values = _read(run, prefix, quantity)
            # The picture of blocks already shows one head of one block.
            if len(steps) < 2 or values.shape[1:] == (1, 1) or not np.isfinite(values).any():
                return None
            shown = _changing_blocks(run, quantity)
            axes = [
                {"step": steps.tolist()},
                {"layer": [layer + 1 for layer in shown]},
                {"head": range(values.shape[2])},
            ]
            numbers = [LabelledArray(quantity.name, values[:, shown], axes)]
            n_blocks = values.shape[1]
            part = f"{len(shown)} of {n_blocks} blocks, where it changes most" if len(shown) < n_blocks else ""
            unit = quantity.quantity.axis_label
            return Drawn(numbers, _references(run, prefix, quantity, steps), unit=unit, part=part)

        self.add_per_probe(section, key, caption, draw)


def _read(run: RunHistory, prefix: str, values: BlockValues) -> tuple[np.ndarray, np.ndarray]:
    """Return steps ``[S]`` and values ``[S, blocks]`` or ``[S, blocks, H]`` of the snapshots that hold the array.

    A user's own metric may change its shape when training is resumed: only snapshots of the latest shape count.
    """
    name = prefix + (values.array or values.quantity.array)
    held = [(s.step, values.values(s.arrays[name])) for s in run.dated if name in s.arrays]
    held = [(step, found) for step, found in held if found.shape == held[-1][1].shape]
    return np.array([step for step, _ in held]), np.array([found for _, found in held])


def _changing_blocks(run: RunHistory, quantity: BlockValues) -> list[int]:
    """Return the indices of the blocks where a per-head quantity changes most along depth, on any probe and at any
    step.
    """
    every = [found for prefix in PROBES if len(found := _read(run, prefix, quantity)[1])]
    means = [values.mean(2).T for values in every]
    if quantity.quantity.scale == "log":
        with np.errstate(divide="ignore", invalid="ignore"):
            means = [np.log(mean) for mean in means]
    return blocks_of_change(means, every[0].shape[1])


def _references(run: RunHistory, prefix: str, values: BlockValues, steps: np.ndarray) -> list[LabelledArray]:
    """Return the level that block values are judged against, by its label."""
    name = prefix + (values.array or values.quantity.array)
    last = next(s for s in reversed(run.dated) if name in s.arrays)
    level = values.quantity.level(last.summary, GROUPS[prefix])
    if not np.isfinite(level):
        return []
    return [LabelledArray(control_label(values.quantity), np.full(len(steps), level), [{"step": steps.tolist()}])]


def thin(steps: list[int], values: list[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Average neighbouring points if there are more than a picture can show (steps and values alike)."""
    if len(steps) <= _MAX_POINTS:
        return steps, values
    # Groups that begin at even and at logarithmic distances, so that either axis shows all that it can.
    half = _MAX_POINTS // 2
    starts = np.concatenate([np.geomspace(1, len(steps) - 1, half), np.linspace(1, len(steps) - 1, half)])
    groups = np.split(np.arange(len(steps)), np.unique(starts.astype(int)))
    x, y = np.asarray(steps, dtype=float), np.asarray(values)
    return [x[g].mean() for g in groups], [y[g].mean() for g in groups]


def arrays_at(run: RunHistory, prefix: str, *names: str) -> list[tuple[str, int, Mapping[str, np.ndarray]]]:
    """Return (when, step, arrays) for the start and for now, where all the named arrays were measured."""
    found = []
    for now, snapshot in run.moments:
        arrays = arrays_of(snapshot, prefix)
        if all(name in arrays for name in names):
            title = run.start.at if not now else f"now, step {snapshot.step:,}" if snapshot.step > 0 else "now"
            found.append((title, snapshot.step, arrays))
    return found
