"""Picture of quantisation: the loss under each setting of bits, above that of the unchanged model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...files import write_text
from ...measure.quantised.cost import QuantisedCost
from ..csv_files import LabelledArray, to_csv
from .saving import save_png
from .style import REFERENCE, add_legend, in_our_style, legend_line, new_figure, run_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(found: Sequence[QuantisedCost], model: str, out: Path) -> None:
    """Write the picture to ``out`` and its numbers beside it, as a CSV of the same name; same input, same bytes."""
    save_png(draw_quantised_loss(found, model), out)
    axis = {"bits": [cost.bits for cost in found]}
    names = ("loss", "loss_se", "increase", "increase_se", "preference_ratio", "kl_uniform", "rank_correlation")
    numbers = [
        LabelledArray(name, np.array([getattr(cost, name) for cost in found]), [axis], {"run": model}) for name in names
    ]
    write_text(out.with_suffix(".csv"), to_csv(numbers))


@in_our_style
def draw_quantised_loss(found: Sequence[QuantisedCost], model: str) -> Figure:
    """Draw a point for each setting, with two standard errors of its difference; dashed: the unchanged model, the
    first.
    """
    figure, axes = new_figure(360, 200)
    before, *others = found
    x = np.arange(len(others))
    loss = np.array([cost.loss for cost in others])
    error = 2 * np.nan_to_num([cost.increase_se for cost in others])
    look = {"color": run_colour(0), "marker": "o", "markersize": 4.5}
    axes.errorbar(x, loss, error, linestyle="none", elinewidth=1.2, capsize=3, zorder=3, **look)
    axes.axhline(before.loss, zorder=2, **REFERENCE)
    for place, cost in zip(x, others, strict=True):
        axes.annotate(
            f"{cost.increase:+.3f}", (place, cost.loss), (7, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xticks(x, labels=[cost.bits for cost in others])
    axes.set_xlim(-0.5, len(others) - 0.3)
    axes.margins(y=0.15)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(model if len(model) <= 60 else "…" + model[-59:], parse_math=False)
    entries = [("± 2 standard errors of the difference", legend_line(linestyle="none", **look))]
    add_legend(figure, [*entries, ("as it is", legend_line(**REFERENCE))])
    return figure
