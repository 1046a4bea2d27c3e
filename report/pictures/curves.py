"""Curves over training or over blocks: colour is the run, line style the role, grey the control.

Figures are about 360 points wide, so that their text stays readable when a page shows them on a phone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .axes import AROUND_ZERO, log_heights, on_axis, step_axis, whole_ticks
from .style import (
    INK,
    MUTED,
    REFERENCE,
    add_legend,
    in_figure_style,
    legend_line,
    new_figure,
    run_colour,
    run_marker,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MOST_NAMES = 24
"""Runs that a legend names."""


@dataclass(frozen=True)
class Curve:
    """A quantity of one run over training."""

    run: int
    """Index of the run on the page, which decides the colour."""
    name: str
    """Name of the run for the legend; empty where there is no other."""
    steps: Sequence[float]
    values: Sequence[float]
    role: str = ""
    """Role of the curve, if a picture holds several per run; each role has one ``style``."""
    style: Mapping[str, Any] = field(default_factory=dict)
    """Line properties beside the colour."""
    markers: bool = True
    quantity: str = ""
    """Name of its numbers."""


@dataclass(frozen=True)
class Control:
    """Grey level for the comparison of a quantity: a line, or the band from −values to +values."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    band: bool = False
    quantity: str = ""
    """Name of its numbers."""
    run: int | None = None
    """Index of its run; None if it is common to all."""


@in_figure_style
def draw_curves(
    shown: Sequence[Curve],
    *,
    ylabel: str,
    x_axis: Callable[[Axes], None],
    controls: Sequence[Control] = (),
    from_zero: bool = False,
    log: bool = False,
) -> Figure:
    """Draw curves over steps, or over blocks: colour is the run, line style the role, grey the control.

    Args:
        shown: the curves.
        ylabel: name of their values.
        x_axis: function that sets scale, ticks and label of x.
        controls: controls of the curves.
        from_zero: show the zero of the quantity.
        log: y is logarithmic.
    """
    figure, axes = new_figure(360, 200)
    numbers = np.concatenate([on_axis(curve.values) for curve in shown] or [np.zeros(0)])
    # Linear where no curve has anything that a logarithmic axis could show.
    log = log and bool((numbers > 0).any())
    several = any(curve.name for curve in shown)
    entries: dict[str, Any] = {}
    # More names than a legend can hold are no legend.
    for curve in shown if several and len({curve.name for curve in shown}) <= _MOST_NAMES else ():
        entries[curve.name] = legend_line(color=run_colour(curve.run), marker=_marker(curve))
    for curve in shown:
        values = on_axis(curve.values)
        look = {"color": run_colour(curve.run), **curve.style}
        every = 1 if curve.markers else max(1, len(values) // 8)
        axes.plot(
            curve.steps,
            values,
            marker=_marker(curve),
            markevery=every,
            zorder=3,
            **look,
        )
        if curve.role:
            entries.setdefault(curve.role, legend_line(**look | ({"color": INK} if several else {})))
    for control in controls:
        values = on_axis(control.values)
        if control.band:
            # Bands of several runs lie on one another: together they should not grow black.
            band = {"color": MUTED, "alpha": 0.25 / len(controls) ** 0.5, "linewidth": 0}
            entries[control.label] = axes.fill_between(control.steps, -values, values, zorder=1, **band)
            axes.axhline(0, color=MUTED, linewidth=0.6, zorder=2)
        else:
            axes.plot(control.steps, values, zorder=1, **REFERENCE)
            entries[control.label] = legend_line(**REFERENCE)
    if from_zero:
        low, high = axes.get_ylim() if any(np.any(curve.values) for curve in shown) else (0.0, 1.0)
        axes.set_ylim(min(low, -0.03 * high), 1.03 * high)
    elif not np.nan_to_num(numbers).any() and not any(np.any(control.values) for control in controls):
        axes.set_ylim(*AROUND_ZERO)
    axes.set_ylabel(ylabel)
    if all(float(value).is_integer() for curve in shown for value in curve.values):
        whole_ticks(axes.yaxis)
    x_axis(axes)
    if log:
        drawn: list[Curve | Control] = [*shown, *controls]
        log_heights(axes, [on_axis(curve.values) for curve in drawn])
    add_legend(figure, list(entries.items()))
    return figure


def draw_over_training(
    shown: Sequence[Curve],
    *,
    ylabel: str,
    controls: Sequence[Control] = (),
    linear_until: float | None = None,
    from_zero: bool = False,
    log: bool = False,
) -> Figure:
    """Draw curves (`draw_curves`) over optimizer steps, which are logarithmic behind ``linear_until``."""
    last = max((max(curve.steps) for curve in shown), default=0)
    return draw_curves(
        shown,
        ylabel=ylabel,
        x_axis=lambda axes: step_axis(axes, last, linear_until),
        controls=controls,
        from_zero=from_zero,
        log=log,
    )


def _marker(curve: Curve) -> str:
    """Return a curve's marker: none for dense curves, unless two runs of one colour differ only in the marker."""
    marker = run_marker(curve.run)
    return marker if curve.markers or marker != run_marker(0) else ""
