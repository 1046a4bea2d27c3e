"""How sections draw quantities over training: curves of runs, lines of blocks, small multiples of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..history import PROBES, Story, arrays_of, number, of_probe
from ..pictures import curves as pictures
from ..pictures import layers as layer_pictures
from ..pictures.layers import Heights, Panel
from ..pictures.panels import same_scale, spread
from ..pictures.style import step_axis
from .section import Cube, Drawn, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SOLID: Mapping[str, Any] = {}
FAINT: Mapping[str, Any] = {"alpha": 0.45, "linewidth": 0.9}
DASHED: Mapping[str, Any] = {"linestyle": (0, (4, 1.6))}
DOTTED: Mapping[str, Any] = {"linestyle": (0, (1, 1.3))}
_MAX_POINTS = 600  # per loss curve; more than a picture has pixels says nothing more

Roles = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Name of a quantity → (what a legend calls it, its line style)."""
Draw = Callable[[Story], Drawn]


@dataclass(frozen=True)
class Quantity:
    """Something that every block, or every head, has one of in a snapshot."""

    name: str
    """In the CSV."""
    array: str
    """The array that it is read from."""
    read: Callable[[np.ndarray], np.ndarray] = lambda array: array
    """The array to ``[blocks]`` or ``[blocks, H]``."""
    title: str = ""
    """Above its panel, where a picture has several."""
    reference: tuple[str, Callable[[Mapping[str, Any], np.ndarray], float]] | None = None
    """(label, summary and array to the level that it is judged against)."""


@dataclass(frozen=True)
class Timeline:
    """The runs of a page over training."""

    stories: Sequence[Story]

    @property
    def linear(self) -> float | None:
        """First step of snapshots that lie close early and wide late; None if they are spaced evenly."""
        steps = sorted({snapshot.step for story in self.stories for snapshot in story.dated} - {0})
        return steps[0] if steps and steps[len(steps) // 2] < steps[-1] / 4 else None

    def legend_name(self, story: Story) -> str:
        """One run needs no name in every legend: the page is its own."""
        return story.name if len(self.stories) > 1 else ""

    def or_why_not(self, section: Section) -> Section:
        """``section``, which says why it is empty if it is."""
        if not section.plates:
            grown = any(len(story.dated) > 1 for story in self.stories)
            section.notes.append(
                "The snapshots do not hold it." if grown else "Curves appear once there is a snapshot after birth."
            )
        return section

    # ── curves of runs ───────────────────────────────────────────────────────────────────────────────────────────

    def logged(self, roles: Roles) -> list[pictures.Curve]:
        """Curves of metrics.jsonl keys."""
        found = []
        for story in self.stories:
            for key, (role, style) in roles.items():
                steps, values = story.series(key)
                if np.isfinite(values).any():
                    x, y = _thin(steps, values)
                    name, few = self.legend_name(story), len(x) < 25
                    found.append(pictures.Curve(story.index, name, x, y, role, style, markers=few, quantity=key))
        return found

    def measured(self, roles: Roles, group: str = "bias") -> list[pictures.Curve]:
        """Curves of snapshot scalars; ``group`` names the probe's."""
        found = []
        for story in self.stories:
            steps = [snapshot.step for snapshot in story.dated]
            for key, (role, style) in roles.items():
                values = [number(snapshot.summary.get(group, {}).get(key)) for snapshot in story.dated]
                if np.isfinite(values).any():
                    name, quantity = self.legend_name(story), f"{group}/{key}"
                    found.append(pictures.Curve(story.index, name, steps, values, role, style, quantity=quantity))
        return found

    def control(self, key: str, label: str, band: bool = True) -> list[pictures.Control]:
        """The snapshot scalar that others are judged against."""
        return [
            pictures.Control(label, curve.steps, curve.values, band, curve.quantity, curve.run)
            for curve in self.measured({key: ("", SOLID)})
        ]

    def add_curves(
        self,
        section: Section,
        key: str,
        caption: str,
        curves: Sequence[pictures.Curve],
        ylabel: str,
        controls: Sequence[pictures.Control] = (),
        *,
        from_zero: bool = True,
    ) -> None:
        """Add a picture of curves, if at least one run has more than one point to draw."""
        if not any(len(curve.steps) > 1 for curve in curves):
            return
        figure = pictures.over_training(
            curves, ylabel=ylabel, controls=controls, linear_until=self.linear, from_zero=from_zero
        )
        told: list[pictures.Curve | pictures.Control] = [*curves, *controls]
        cubes = [
            Cube(
                curve.quantity,
                np.asarray(curve.values, dtype=float),
                [{"step": curve.steps}],
                {} if curve.run is None else {"run": self.stories[curve.run].name},
            )
            for curve in told
        ]
        section.add(figure, key, caption, cubes)

    # ── pictures of one run ──────────────────────────────────────────────────────────────────────────────────────

    def add_per_run(self, section: Section, key: str, caption: str, draw: Draw) -> None:
        """Add one picture per run that has something to draw; their numbers share a file."""
        self._add([(section, key, caption, draw)], one_scale=False)

    def add_probes(self, section: Section, key: str, caption: str, draw: Callable[[Story, str], Drawn]) -> None:
        """Add what ``draw`` makes of each run's random probe, and of its text probe where it has one."""
        wanted = []
        for prefix, probe in PROBES.items():

            def draw_probe(story: Story, prefix: str = prefix, probe: str = probe) -> Drawn:
                drawn = draw(story, prefix)
                return drawn and (drawn[0], [cube.within({"probe": probe}) for cube in drawn[1]])

            wanted.append((section, *of_probe(prefix, key, caption), draw_probe))
        self._add(wanted, one_scale=True)

    def _add(self, wanted: Sequence[tuple[Section, str, str, Draw]], one_scale: bool) -> None:
        """Add pictures of one kind."""
        made = []
        for section, key, caption, draw in wanted:
            for story in self.stories:
                if (drawn := draw(story)) is not None:
                    made.append((section, key, caption, story, *drawn))
        if one_scale:
            same_scale([figure for *_, figure, _ in made])
        for section, key, caption, story, figure, cubes in made:
            text = caption if len(self.stories) == 1 else f"{story.name}. {caption}"
            section.add(figure, key, text, [cube.within({"run": story.name}) for cube in cubes], story.index)

    def add_depth(
        self,
        section: Section,
        key: str,
        caption: str,
        quantities: Sequence[Quantity],
        heights: Heights,
        *,
        embeddings: bool = False,
    ) -> None:
        """Add a line per block over training, a panel per quantity, a picture per run and probe."""

        def draw(story: Story, prefix: str) -> Drawn:
            panels, cubes = [], []
            for quantity in quantities:
                steps, values = _read(story, prefix, quantity)
                if len(steps) < 2:
                    return None
                panels.append(Panel(quantity.title, steps, values.T, _references(story, prefix, quantity, steps)))
                layers = range(0 if embeddings else 1, values.shape[1] + (not embeddings))
                cubes.append(Cube(quantity.name, values, [{"step": steps.tolist()}, {"layer": layers}]))
            if not any(np.isfinite(panel.lines).any() for panel in panels):
                return None
            axis = _steps(panels, self.linear)
            figure = layer_pictures.depth(
                panels, heights=heights, x_axis=axis, embeddings=embeddings, markers=len(panels[0].x) < 25
            )
            return figure, cubes

        self.add_probes(section, key, caption, draw)

    def add_heads(self, section: Section, key: str, caption: str, quantity: Quantity, heights: Heights) -> None:
        """Add small multiples over training, one panel per block and a line per head; a picture per run and probe."""

        def draw(story: Story, prefix: str) -> Drawn:
            steps, values = _read(story, prefix, quantity)
            # One head of one block is what the picture of blocks shows already.
            if len(steps) < 2 or values.shape[1:] == (1, 1) or not np.isfinite(values).any():
                return None
            references = _references(story, prefix, quantity, steps)
            shown = spread(values.shape[1])
            panels = [Panel(f"block {layer + 1}", steps, values[:, layer].T, references) for layer in shown]
            axis = _steps(panels, self.linear)
            figure = layer_pictures.heads(
                panels, run=story.index, heights=heights, x_axis=axis, markers=len(steps) < 25
            )
            axes = [
                {"step": steps.tolist()},
                {"layer": [layer + 1 for layer in shown]},
                {"head": range(values.shape[2])},
            ]
            return figure, [Cube(quantity.name, values[:, shown], axes)]

        self.add_probes(section, key, caption, draw)


def _read(story: Story, prefix: str, quantity: Quantity) -> tuple[np.ndarray, np.ndarray]:
    """Steps ``[S]`` and values ``[S, blocks]`` or ``[S, blocks, H]`` of the snapshots that hold the array."""
    name = prefix + quantity.array
    held = [snapshot for snapshot in story.dated if name in snapshot.arrays]
    values = [np.asarray(quantity.read(snapshot.arrays[name]), dtype=float) for snapshot in held]
    return np.array([snapshot.step for snapshot in held]), np.array(values)


def _references(story: Story, prefix: str, quantity: Quantity, steps: np.ndarray) -> dict[str, np.ndarray]:
    if quantity.reference is None:
        return {}
    label, level = quantity.reference
    last = next(s for s in reversed(story.dated) if prefix + quantity.array in s.arrays)
    value = level(last.summary, last.arrays[prefix + quantity.array])
    return {label: np.full(len(steps), value)} if np.isfinite(value) else {}


def _steps(panels: Sequence[Panel], linear: float | None) -> Callable[[Axes], None]:
    last = max(float(panel.x.max()) for panel in panels)
    return lambda axes: step_axis(axes, last, linear)


def _thin(steps: list[int], values: list[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Means of neighbours, where there are more points than a picture can show."""
    if len(steps) <= _MAX_POINTS:
        return steps, values
    # Cuts spaced evenly and cuts spaced logarithmically, so that either axis shows all that it can.
    half = _MAX_POINTS // 2
    cuts = np.concatenate([np.geomspace(1, len(steps) - 1, half), np.linspace(1, len(steps) - 1, half)])
    groups = np.split(np.arange(len(steps)), np.unique(cuts.astype(int)))
    x, y = np.asarray(steps, dtype=float), np.asarray(values)
    return [x[g].mean() for g in groups], [y[g].mean() for g in groups]


def arrays_at(story: Story, prefix: str, *names: str) -> list[tuple[str, int, dict[str, np.ndarray]]]:
    """(when, step, arrays) of birth and of now, where all these arrays were measured."""
    found = []
    for now, snapshot in story.moments:
        arrays = arrays_of(snapshot, prefix)
        if all(name in arrays for name in names):
            title = "at birth" if not now else f"now, step {snapshot.step:,}" if snapshot.step > 0 else "now"
            found.append((title, snapshot.step, arrays))
    return found
