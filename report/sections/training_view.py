"""Sections of quantities over training: curves of runs, lines of blocks, small multiples of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...findings.history import Start, start_of_all
from ...metrics.quantities import LOGGED
from ...metrics.quantity import Quantity
from ..csv_files import LabelledArray
from ..pictures.axes import step_axis
from ..pictures.curves import Control, Curve, draw_over_training
from ..pictures.layers_and_heads import draw_blocks, draw_heads
from ..pictures.panels import Heights, Panel, blocks_of_change
from ..pictures.saving import later, on_one_scale
from ..pictures.style import DASHED, SOLID
from ..run_history import GROUPS, PROBES, RunHistory, arrays_of, declared_quantities, of_probe
from ..text import finite_or_nan
from .section import Drawing, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURED = 3
"""Number of runs that get pictures of blocks, heads and maps; further runs have only the numbers."""
AVERAGED = "averaged weights"
"""Legend of what ``optim.ema`` measures beside the trained weights."""
_MAX_POINTS = 600  # per loss curve; more than a picture has pixels says nothing more

Curves = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a quantity → (its name in the legend, its line style)."""
DrawRun = Callable[[RunHistory], Drawing | None]


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


def heights_of(quantity: Quantity, least: float | None = None, most: float | None = None, label: str = "") -> Heights:
    """Return the y axis of a quantity, which covers at least the range from ``least`` to ``most``."""
    return Heights(label or quantity.axis_label, quantity.scale == "log", least, most)


@dataclass(frozen=True)
class TrainingView:
    """The runs of a page over training."""

    runs: Sequence[RunHistory]

    @property
    def linear_until(self) -> float | None:
        """First step of snapshots that lie close early and wide late; None if they are spaced evenly."""
        steps = sorted({snapshot.step for run in self.runs for snapshot in run.dated} - {0})
        return steps[0] if steps and steps[len(steps) // 2] < steps[-1] / 4 else None

    @property
    def start(self) -> Start:
        """Words for the start of these runs."""
        return start_of_all(run.start for run in self.runs)

    def legend_name(self, run: RunHistory) -> str:
        """Return the run's name for legends; "" if the page has only one run."""
        return run.name if len(self.runs) > 1 else ""

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

    # ── curves of runs ───────────────────────────────────────────────────────────────────────────────────────────

    def logged(self, curves: Curves) -> list[Curve]:
        """Return the curves of keys of metrics.jsonl."""
        found = []
        for run in self.runs:
            for key, (role, style) in curves.items():
                steps, values = run.series(key)
                if np.isfinite(values).any():
                    x, y = thin(steps, values)
                    name, few = self.legend_name(run), len(x) < 25
                    found.append(Curve(run.index, name, x, y, role, style, markers=few, quantity=key))
        return found

    def measured(self, curves: Curves, group: str = "bias") -> list[Curve]:
        """Return the curves of scalars of snapshots; ``group`` names the group of quantities of a probe."""
        found = []
        for run in self.runs:
            steps = [snapshot.step for snapshot in run.dated]
            for key, (role, style) in curves.items():
                values = [finite_or_nan(snapshot.summary.get(group, {}).get(key)) for snapshot in run.dated]
                if np.isfinite(values).any():
                    name, quantity = self.legend_name(run), f"{group}/{key}"
                    found.append(Curve(run.index, name, steps, values, role, style, quantity=quantity))
        return found

    def by_probe(self, key: str) -> list[Curve]:
        """Return the curves of a snapshot scalar: solid on the random probe, dashed on the text probe."""
        text = self.measured({key: ("text probe", DASHED)}, GROUPS["text."])
        return [*self.measured({key: ("random probe" if text else "", SOLID)}), *text]

    def control(self, key: str, label: str, band: bool = True) -> list[Control]:
        """Return the snapshot scalar that other curves are judged against."""
        return [
            Control(label, curve.steps, curve.values, band, curve.quantity, curve.run)
            for curve in self.measured({key: ("", SOLID)})
        ]

    def controls(self, quantity: Quantity, curves: Sequence[Curve]) -> list[Control]:
        """Return the controls of a declared quantity, to draw beside its ``curves``: measured levels, or a constant
        one.
        """
        name, label = quantity.control, control_label(quantity)
        if not curves or name is None:
            return []
        if isinstance(name, str) and name in {**LOGGED, **self.quantities}:
            beside = (self.logged if name in LOGGED else self.measured)({name: ("", SOLID)})
            return [Control(label, c.steps, c.values, False, c.quantity, c.run) for c in beside]
        reach = [0.0, max(max(curve.steps) for curve in curves)]
        levels = {quantity.level(run.dated[-1].summary if run.dated else {}) for run in self.runs}
        return [Control(label, reach, [v, v], quantity="level") for v in sorted(levels) if np.isfinite(v)]

    def add_curves(
        self,
        section: Section,
        key: str,
        caption: str,
        curves: Sequence[Curve],
        ylabel: str,
        controls: Sequence[Control] = (),
        *,
        from_zero: bool = True,
        log: bool = False,
    ) -> None:
        """Add a picture of curves, if at least one run has more than one point to draw."""
        if not any(len(curve.steps) > 1 for curve in curves):
            return
        figure = later(
            draw_over_training,
            curves,
            ylabel=ylabel,
            controls=controls,
            linear_until=self.linear_until,
            from_zero=from_zero,
            log=log,
        )
        drawn: list[Curve | Control] = [*curves, *controls]
        numbers = [
            LabelledArray(
                curve.quantity,
                np.asarray(curve.values, dtype=float),
                [{"step": curve.steps}],
                {} if curve.run is None else {"run": self.runs[curve.run].name},
            )
            for curve in drawn
        ]
        section.add(figure, key, caption, numbers)

    # ── pictures of one run ──────────────────────────────────────────────────────────────────────────────────────

    def add_per_run(self, section: Section, key: str, caption: str, draw: DrawRun) -> None:
        """Add one picture per run that has something to draw; their numbers share a file."""
        self._add([(section, key, caption, draw)], one_scale=False)

    def add_per_probe(
        self, section: Section, key: str, caption: str, draw: Callable[[RunHistory, str], Drawing | None]
    ) -> None:
        """Add the pictures that ``draw`` makes of each run's random probe, and of its text probe if it has one."""
        wanted = []
        for prefix, probe in PROBES.items():

            def draw_probe(run: RunHistory, prefix: str = prefix, probe: str = probe) -> Drawing | None:
                drawn = draw(run, prefix)
                return drawn and (drawn[0], [numbers.within({"probe": probe}) for numbers in drawn[1]])

            wanted.append((section, *of_probe(prefix, key, caption), draw_probe))
        self._add(wanted, one_scale=True)

    def _add(self, wanted: Sequence[tuple[Section, str, str, DrawRun]], one_scale: bool) -> None:
        """Add pictures of one kind."""
        made = []
        for section, key, caption, draw in wanted:
            for run in self.runs[:PICTURED]:
                if (drawn := draw(run)) is not None:
                    made.append((section, key, caption, run, *drawn))
            for run in self.runs[PICTURED:]:
                if (drawn := draw(run)) is not None:
                    section.add_numbers(key, [array.within({"run": run.name}) for array in drawn[1]])
        if one_scale:
            on_one_scale([drawing for *_, drawing, _ in made])
        for section, key, caption, run, drawing, numbers in made:
            text = caption if len(self.runs) == 1 else f"{run.name}. {caption}"
            section.add(drawing, key, text, [array.within({"run": run.name}) for array in numbers], run.index)

    def add_blocks(
        self,
        section: Section,
        key: str,
        caption: str,
        quantities: Sequence[BlockValues],
        heights: Heights,
        *,
        embeddings: bool = False,
    ) -> None:
        """Add a line per block over training, a panel per quantity, a picture per run and probe."""

        def draw(run: RunHistory, prefix: str) -> Drawing | None:
            panels, numbers = [], []
            for quantity in quantities:
                steps, values = _read(run, prefix, quantity)
                if len(steps) < 2:
                    return None
                panels.append(Panel(quantity.title, steps, values.T, _references(run, prefix, quantity, steps)))
                layers = range(0 if embeddings else 1, values.shape[1] + (not embeddings))
                numbers.append(LabelledArray(quantity.name, values, [{"step": steps.tolist()}, {"layer": layers}]))
            if not any(np.isfinite(panel.lines).any() for panel in panels):
                return None
            axis = _steps(panels, self.linear_until)
            figure = later(
                draw_blocks, panels, heights=heights, x_axis=axis, embeddings=embeddings, markers=len(panels[0].x) < 25
            )
            return figure, numbers

        self.add_per_probe(section, key, caption, draw)

    def add_heads(self, section: Section, key: str, caption: str, quantity: BlockValues, heights: Heights) -> None:
        """Add small multiples over training, one panel per block and a line per head; a picture per run and probe."""

        def draw(run: RunHistory, prefix: str) -> Drawing | None:
            steps, values = _read(run, prefix, quantity)
            # The picture of blocks already shows one head of one block.
            if len(steps) < 2 or values.shape[1:] == (1, 1) or not np.isfinite(values).any():
                return None
            references = _references(run, prefix, quantity, steps)
            shown = _changing_blocks(run, quantity)
            panels = [Panel(f"block {layer + 1}", steps, values[:, layer].T, references) for layer in shown]
            axis = _steps(panels, self.linear_until)
            figure = later(draw_heads, panels, run=run.index, heights=heights, x_axis=axis, markers=len(steps) < 25)
            axes = [
                {"step": steps.tolist()},
                {"layer": [layer + 1 for layer in shown]},
                {"head": range(values.shape[2])},
            ]
            return figure, [LabelledArray(quantity.name, values[:, shown], axes)]

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


def _references(run: RunHistory, prefix: str, values: BlockValues, steps: np.ndarray) -> dict[str, np.ndarray]:
    """Return the level that block values are judged against, by its label."""
    name = prefix + (values.array or values.quantity.array)
    last = next(s for s in reversed(run.dated) if name in s.arrays)
    level = values.quantity.level(last.summary, GROUPS[prefix])
    return {control_label(values.quantity): np.full(len(steps), level)} if np.isfinite(level) else {}


def _steps(panels: Sequence[Panel], linear_until: float | None) -> Callable[[Axes], None]:
    last = max(float(panel.x.max()) for panel in panels)
    return lambda axes: step_axis(axes, last, linear_until)


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


def arrays_at(run: RunHistory, prefix: str, *names: str) -> list[tuple[str, int, dict[str, np.ndarray]]]:
    """Return (when, step, arrays) for the start and for now, where all the named arrays were measured."""
    found = []
    for now, snapshot in run.moments:
        arrays = arrays_of(snapshot, prefix)
        if all(name in arrays for name in names):
            title = run.start.at if not now else f"now, step {snapshot.step:,}" if snapshot.step > 0 else "now"
            found.append((title, snapshot.step, arrays))
    return found
