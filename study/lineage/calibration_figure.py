"""Picture of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...report.pictures.style import (
    MUTED,
    REFERENCE,
    RUN_COLOURS,
    add_legend,
    in_our_style,
    legend_line,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .calibration import NullRates


@in_our_style
def draw_rates(found: Sequence[NullRates], level: float, title: str) -> Figure:
    """Draw the shares of strangers and of kin that each null calls kin, with 95 % intervals; the dashed line is the
    level.
    """
    figure, (left, right) = new_figure(460, 60 + 26 * len(found), 1, 2, sharey=True)
    places = np.arange(len(found))
    for axes, what, colour, heading in (
        (left, "strangers", RUN_COLOURS[1], "strangers called kin"),
        (right, "kin", RUN_COLOURS[0], "kin called kin"),
    ):
        for place, rate in zip(places, found, strict=True):
            shown = getattr(rate, what)
            if shown.n_defined:
                axes.plot([shown.low, shown.high], [place, place], color=colour, linewidth=1.6)
                axes.plot([shown.rate], [place], "o", color=colour, markersize=4.5)
            note = f"{shown.n_undefined} of {shown.n} undefined" if shown.n_undefined else ""
            axes.annotate(note, (1, place), xycoords=("axes fraction", "data"), xytext=(0, 5), color=MUTED,
                          textcoords="offset points", ha="right", fontsize=6.5)  # fmt: skip
        axes.set_title(heading)
        axes.set_xlabel("share of defined tests, 95 % interval")
    left.set_xscale("symlog", linthresh=level, linscale=0.5)
    left.set_xlim(-0.0005, 1.05)
    left.set_xticks([0, level, 0.1, 1], labels=["0", f"{level:g}", "0.1", "1"])
    left.axvline(level, **REFERENCE)
    right.set_xlim(-0.03, 1.03)
    left.set_yticks(places, labels=[rate.null for rate in found])
    left.set_ylim(len(found) - 0.4, -0.6)
    add_legend(figure, [(title, legend_line(linestyle="none")), (f"level {level:g}", legend_line(**REFERENCE))])
    return figure
