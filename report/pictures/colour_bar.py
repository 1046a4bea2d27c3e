"""Colour bar beside a map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .axes import fix_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_colour_bar(
    panels: Sequence[Axes],
    colours: Any,
    ticks: Sequence[float],
    *,
    limits: tuple[float, float] = (0, 1),
    labels: Sequence[str] | None = None,
    label: str = "",
    share: float = 1.0,
) -> None:
    """Add the bar to the right of maps.

    Args:
        panels: axes of a figure of `new_figure`; the bar goes to their right.
        colours: a colour map, or its name.
        ticks: numbers that the bar shows.
        limits: numbers of the first and the last colour.
        labels: the ticks' texts; by default their numbers.
        label: name of the numbers.
        share: share of the panels' height.
    """
    from .engine.light_axes import LightAxes
    from .engine.measured_layout import layout_of

    figure = panels[0].figure
    axes = figure.add_axes((0, 0, 0.1, 0.1), axes_class=LightAxes)
    ramp = np.linspace(0, 1, 128)[:, None]
    axes.imshow(
        ramp, cmap=colours, vmin=0, vmax=1, aspect="auto", extent=(0, 1, *limits), origin="lower", interpolation="none"
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(False)
    axes.tick_params(length=0, bottom=False, labelbottom=False, labelleft=False, labelright=True)
    axes.yaxis.set_label_position("right")
    fix_ticks(axes.yaxis, ticks, labels or [f"{tick:.3g}" for tick in ticks])
    axes.set_ylabel(label)
    layout_of(figure).add_bar(axes, panels, share)
