"""Figure of a study: sinks over training; and in a row for each arm sink, loss, and variance before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...findings.formatting import shorten
from ...report.pictures.axes import count_formatter, log_axis, no_ticks
from ...report.pictures.saving import save_both
from ...report.pictures.style import (
    MUTED,
    PAPER,
    REFERENCE,
    RUN_COLOURS,
    in_figure_style,
    legend_line,
    run_colour,
)
from .results import ArmResult, Spread, task_loss, uniform_levels
from .trials import ArmStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 540  # points: the text of a page with small margins
_COLUMNS = 4
_MARKERS = "osD^vPXph<"
_SMALL = 7
_OF_SEEDS = "bar: range over seeds"
#: A mass above which sinks are drawn on an axis from 0 to 1.
_A_SINK = 0.3


class Family(NamedTuple):
    """Arms that share a panel and the colours among them: those of one title, with one marker, or a part of them."""

    title: str
    arms: list[ArmResult]
    part: str = ""
    """Places of its arms among those of the title, ``1 to 3``; "" for all."""

    @property
    def heading(self) -> str:
        """Heading of its panel."""
        return self.title if not self.part else f"{self.title}, {self.part}" if self.title else f"arms {self.part}"


class Look(NamedTuple):
    """Look of an arm in every panel of the figure and of the page."""

    place: int
    """Place of its colour among those of runs."""
    marker: str

    @property
    def colour(self) -> str:
        """Colour of its lines and points."""
        return run_colour(self.place)

    @property
    def size(self) -> int:
        """Size of its marker in a row, in points."""
        return 6 if self.marker == "*" else 4


def families(study: ArmStudy, results: Sequence[ArmResult]) -> list[Family]:
    """Return the study's families, then the remaining arms, at most as many together as there are colours.

    The first arm, which all panels show, is separate.
    """
    by_name = {result.arm: result for result in results}
    named = [Family(title, [by_name[arm] for arm in arms if arm in by_name]) for title, arms in study.families.items()]
    inside = {result.arm for family in named for result in family.arms}
    left = [result for result in results if result.arm not in inside and result.arm != next(iter(study.arms))]
    return [
        *(part for family in named for part in _in_parts(family)),
        *_in_parts(Family("other arms" if named else "", left)),
    ]


def _in_parts(family: Family) -> list[Family]:
    """Split a family into as few parts as have a colour for each arm, beside the first arm's."""
    n_arms = len(family.arms)
    n_parts = -(-n_arms // (len(RUN_COLOURS) - 1))
    # Evenly: 6 arms are 3 and 3, not 5 and 1.
    chunks = np.array_split(np.arange(n_arms), n_parts) if n_arms else []
    return [
        Family(
            family.title,
            [family.arms[i] for i in chunk],
            f"{chunk[0] + 1} to {chunk[-1] + 1}" if n_parts > 1 else "",
        )
        for chunk in chunks
    ]


def looks_of(study: ArmStudy, grouped: Sequence[Family]) -> dict[str, Look]:
    """Return the look of each arm: a marker for its family, a colour within it; the first arm's is its alone."""
    titles = list(dict.fromkeys(family.title for family in grouped))
    looks = {
        result.arm: Look(1 + i, _MARKERS[titles.index(family.title) % len(_MARKERS)])
        for family in grouped
        for i, result in enumerate(family.arms)
    }
    return looks | {next(iter(study.arms)): Look(0, "*")}


def draw_study(study: ArmStudy, results: Sequence[ArmResult], out: Path) -> list[str]:
    """Write ``figure.png`` and ``figure.svg`` into ``out``; return their names. The same results give the same
    bytes.
    """
    return save_both(study_figure(study, results), out, "figure")


@in_figure_style
def study_figure(study: ArmStudy, results: Sequence[ArmResult]) -> Figure:
    """Draw the figure; see the module."""
    from matplotlib.figure import Figure

    grouped = families(study, results)
    first = next((result for result in results if result.arm == next(iter(study.arms))), None)
    looks = looks_of(study, grouped)
    panels = grouped or [Family("", [])]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    longest = [max(len(family.arms) for family in panels[i * columns : (i + 1) * columns]) for i in range(rows)]
    # Below each panel stand its names; a panel alone has them beside it.
    upper = [110 + (10 * (n + (first is not None)) if len(panels) > 1 else 20) for n in longest]
    lower = max(235, 62 + 10.5 * len(results))
    figure = Figure(figsize=(_WIDTH / 72, (sum(upper) + lower) / 72), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=[sum(upper), lower])
    above, below = halves
    above.set_facecolor("none")
    below.set_facecolor("none")
    above.suptitle(
        "Sink mass over optimizer steps: mean of the seeds; band: least to largest of them; grey: uniform",
        x=0.01,
        ha="left",
        size=8.5,
    )
    grid = above.subplots(rows, columns, sharex=True, sharey=True, squeeze=False, height_ratios=upper)
    _sinks_over_training(grid, panels, first, looks)
    ordered = ([first] if first is not None else []) + [
        result for family in grouped for result in family.arms if result is not first
    ]
    by_arm = below.subplots(1, 3, sharey=True)
    for axes, draw in zip(by_arm, (_sink_at_the_end, _task_loss, _variance), strict=True):
        draw(axes, ordered, looks)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=_SMALL)
        axes.grid(axis="y", linewidth=0.3)
    names = [shorten(result.arm, 26) for result in ordered]
    by_arm[0].set_yticks(range(len(ordered)), labels=names, fontsize=_SMALL, parse_math=False)
    by_arm[0].set_ylim(len(ordered) - 0.4, -0.6)
    return figure


# ── upper panels: a family each ──────────────────────────────────────────────────────────────────────────────────────


def _sinks_over_training(grid: Any, panels: Sequence[Family], first: ArmResult | None, looks: dict[str, Look]) -> None:
    # Raw weights of similarities may be negative or add up to more than 1.
    drawn = [*([first] if first is not None else []), *(r for family in panels for r in family.arms)]
    ends = [end for r in drawn if r.steps for end in (r.sinks.min(), r.sinks.max())]
    lowest, highest = min(ends, default=0), max(ends, default=1)
    # Without a sink in any arm, the whole figure would be a line along the axis.
    top = 1.02 if highest > _A_SINK else 1.3 * highest
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        family = panels[place]
        shown = [first, *family.arms] if first is not None and first not in family.arms else family.arms
        entries = []
        for result in shown:
            look = looks[result.arm]
            style: dict[str, Any] = {"color": look.colour, "linewidth": 1.2}
            if result is first:
                style |= {"linestyle": (0, (4, 1.6)), "linewidth": 1.0}
            if result.steps:
                axes.fill_between(
                    result.steps, result.sinks.min(0), result.sinks.max(0), color=look.colour, alpha=0.15, linewidth=0
                )
                axes.plot(result.steps, result.sinks.mean(0), **style)
                axes.plot(
                    result.steps[-1:], result.sinks.mean(0)[-1:], look.marker, color=look.colour, clip_on=False,
                    markersize=5 if look.marker == "*" else 3,
                )  # fmt: skip
            entries.append((result.arm, legend_line(**style, marker=look.marker, markersize=3)))
        for uniform in uniform_levels(shown):
            axes.axhline(uniform, **REFERENCE | {"linewidth": 0.8}, zorder=1)
        axes.set_title(family.heading)
        axes.set_ylim(min(-0.02 * top, 1.05 * lowest), max(top, 1.05 * highest))
        axes.margins(x=0.03)
        axes.xaxis.set_major_formatter(count_formatter())
        axes.xaxis.get_major_locator().set_params(nbins=4)
        axes.tick_params(labelbottom=True)
        if highest > _A_SINK:
            axes.set_yticks([0, 0.5, 1])
        else:
            axes.yaxis.get_major_locator().set_params(nbins=3)
        axes.tick_params(labelsize=_SMALL)
        _legend(axes, entries, (1.01, 1) if len(panels) == 1 else (-0.03, -0.22))


def _legend(axes: Axes, entries: Sequence[tuple[str, Any]], anchor: tuple[float, float]) -> None:
    legend = axes.legend(
        [handle for _, handle in entries], [str(i) for i in range(len(entries))], loc="upper left",
        bbox_to_anchor=anchor, fontsize=_SMALL, handlelength=1.8, labelspacing=0.2, borderpad=0, borderaxespad=0,
    )  # fmt: skip
    for text, (label, _) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(shorten(label, 26))


# ── lower panels: a row per arm ──────────────────────────────────────────────────────────────────────────────────────


def _means(
    axes: Axes, results: Sequence[ArmResult], looks: dict[str, Look], of: Callable[[ArmResult], Spread]
) -> np.ndarray:
    """Draw a figure of each arm: the mean over its seeds on their range, or a dash; return the means."""
    spreads = [of(result) for result in results]
    for row, (result, seen) in enumerate(zip(results, spreads, strict=True)):
        look = looks[result.arm]
        if not seen.n:
            _dash(axes, row)
            continue
        axes.plot([seen.min, seen.max], [row, row], color=look.colour, linewidth=0.9, zorder=2)
        axes.plot(seen.mean, row, look.marker, color=look.colour, markersize=look.size, zorder=3)
    return np.array([seen.mean for seen in spreads if seen.n])


def _dash(axes: Axes, row: int) -> None:
    """Draw a dash in place of a missing figure."""
    axes.text(
        0.5, row, "–", transform=axes.get_yaxis_transform(), ha="center", va="center", color=MUTED,
        backgroundcolor=PAPER,
    )  # fmt: skip


def _sink_at_the_end(axes: Axes, results: Sequence[ArmResult], looks: dict[str, Look]) -> None:
    means = _means(axes, results, looks, lambda result: result.sink)
    for uniform in uniform_levels(results):
        axes.axvline(uniform, **REFERENCE | {"linewidth": 0.8}, zorder=1)
    axes.set_title("Sink mass at the end")
    axes.set_xlabel(f"share of the row; grey: uniform\n{_OF_SEEDS}")
    axes.set_xscale("symlog", linthresh=0.01, linscale=0.35)
    axes.set_xticks([0, 0.01, 0.1, 1], labels=["0", "0.01", "0.1", "1"])
    axes.xaxis.set_minor_locator(no_ticks())
    axes.set_xlim(min([-0.0025, *(1.3 * means)]), max([2, *(1.5 * means)]))


def _task_loss(axes: Axes, results: Sequence[ArmResult], looks: dict[str, Look]) -> None:
    name = task_loss(results)
    means = _means(axes, results, looks, lambda result: result.figures[name])
    axes.set_title("Is the task learned?" if name == "trigger_loss" else "Loss")
    words = "loss on triggers (nats)" if name == "trigger_loss" else "validation loss (nats)"
    axes.set_xlabel(f"{words}\n{_OF_SEEDS}")
    if len(means) and means.max() > 4 * means.min() > 0:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        steps = (1,) if high > 100 * low else (1, 3)
        ticks = [step * decade for decade in (0.001, 0.01, 0.1, 1, 10) for step in steps]
        axes.set_xticks([tick for tick in ticks if low <= tick <= high])
        axes.xaxis.set_major_formatter(count_formatter())
        axes.xaxis.set_minor_locator(no_ticks())
        axes.set_xlim(low, high)


def _variance(axes: Axes, results: Sequence[ArmResult], looks: dict[str, Look]) -> None:
    """Draw variance, hollow at birth, filled at the end: the geometric mean over blocks on their range."""
    for row, result in enumerate(results):
        look, ends = looks[result.arm], []
        for moment, offset in (("birth", 0.13), ("end", -0.13)):
            layers = np.array([layer.mean for layer in result.layers(moment)])
            layers = layers[np.isfinite(layers) & (layers > 0)]
            if not len(layers):
                continue
            middle = float(np.exp(np.log(layers).mean()))
            ends.append(middle)
            y = row - offset if len(layers) > 1 else row
            axes.plot([layers.min(), layers.max()], [y, y], color=look.colour, linewidth=0.7, alpha=0.6, zorder=2)
            axes.plot(
                middle, y, look.marker, color=look.colour, markersize=look.size, zorder=3,
                markerfacecolor=look.colour if moment == "end" else PAPER, markeredgewidth=0.8,
            )  # fmt: skip
        if len(ends) == 2:
            axes.plot(ends, [row, row], color=look.colour, linewidth=0.9, alpha=0.35, zorder=1)
        elif not ends:
            _dash(axes, row)
    axes.axvline(1, **REFERENCE | {"linewidth": 0.8}, zorder=1)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.3), max(high, 30))
    log_axis(axes.xaxis)
    axes.set_title("Variance of position 0")
    axes.set_xlabel("σ²(0)/σ²(late); hollow: birth\nbar: range over blocks")
