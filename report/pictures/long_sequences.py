"""Picture of `birthmark length`: loss by position, a panel for each model, a line for each number of keys gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...files import write_text
from ...measure.loss_by_position import LengthResult
from ..csv_files import LabelledArray, to_csv
from ..text import without_shared_folder
from .axes import token_axis
from .panels import Heights, Panel, fit_heights, label_outer_panels, small_multiples
from .saving import save_png
from .style import REFERENCE, add_legend, in_our_style, legend_line, run_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Points of a line: means over positions, wider apart behind the first ones.
_POINTS = 48
#: Characters above a panel.
_TITLE = 28


def write_picture(found: Sequence[LengthResult], out: Path) -> None:
    """Write the picture to ``out`` and its numbers, by single position, beside it as a CSV of the same name."""
    save_png(draw_loss_by_position(found), out)
    write_text(out.with_suffix(".csv"), to_csv(_numbers(found)))


def _numbers(found: Sequence[LengthResult]) -> list[LabelledArray]:
    return [
        LabelledArray(
            "loss", arm.by_position, [{"position": range(result.length)}], {"run": result.model, "evicted": arm.evict}
        )
        for result in found
        for arm in result.arms
    ]


def _panel(result: LengthResult) -> Panel:
    """Build the lines of a model's arms over positions t + 1, each point a mean over those up to the next.

    No mean reaches across the end of the prefix.
    """
    spaced = np.geomspace(1, result.length + 1, _POINTS + 1).round().astype(int) - 1
    edges = np.unique([*spaced, min(result.prefix, result.length)])
    counts = np.diff(edges)
    lines = [np.add.reduceat(arm.by_position, edges[:-1]) / counts for arm in result.arms]
    return Panel(result.model, (edges[:-1] + edges[1:] + 1) / 2, np.array(lines))


@in_our_style
def draw_loss_by_position(found: Sequence[LengthResult]) -> Figure:
    """Draw the loss of every arm; dashed: the end of the prefix, where keys are dropped."""
    panels = [_panel(result) for result in found]
    figure, axes_of_panels = small_multiples(len(found), (230, 190, 160))
    evicted = list(dict.fromkeys(arm.evict for result in found for arm in result.arms))
    names = without_shared_folder([result.model for result in found])
    for axes, name, result, panel in zip(axes_of_panels, names, found, panels, strict=True):
        axes.axvline(result.prefix + 0.5, **REFERENCE)
        # Before the end of the prefix they are one line: the first of them on top.
        for arm, line in reversed(list(zip(result.arms, panel.lines, strict=True))):
            axes.plot(panel.x, line, color=run_colour(evicted.index(arm.evict)), linewidth=1.4)
        token_axis(axes, max(result.length for result in found))
        # Names differ at the end of their path.
        axes.set_title(name if len(name) <= _TITLE else f"…{name[1 - _TITLE :]}", parse_math=False)
        fit_heights(axes, Heights("loss (nats)"), panels)
    label_outer_panels(axes_of_panels, "t + 1", "loss (nats)")
    entries = [(f"{n} evicted" if n else "every key", legend_line(color=run_colour(i))) for i, n in enumerate(evicted)]
    add_legend(figure, [*entries, ("end of the prefix", legend_line(**REFERENCE))])
    return figure
