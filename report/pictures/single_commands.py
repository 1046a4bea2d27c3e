"""The pictures of `birthmark intervene`, `length` and `quantise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files import write_text
from ...findings.formatting import without_shared_folder
from ...findings.interventions import dose_in_words, intervention_in_words
from ...measure.interventions import Intervened
from ...measure.loss_by_position import LengthResult
from ...measure.quantised.cost import QuantisedCost
from ..charts.specs import CurvePanel, Series
from ..csv_files import LabelledArray, to_csv
from ..figure import save_panel, save_panels
from .saving import save_png
from .style import REFERENCE, add_legend, in_figure_style, legend_line, new_figure, run_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ---------------------------------------------------------------- `birthmark intervene`

#: Letters that a title has room for.
_TITLE = 60
#: Figures by block and key, and by head.
_BY_KEY = ("state_norm", "channel", "channel_value", "norm_before", "norm_after")
_BY_HEAD = ("attention", "attention_to_first")


def write_intervention(found: Intervened, model: str, probe: str, out: Path) -> None:
    """Write the picture to ``out`` and its numbers beside it, as a CSV of the same name; same input, same bytes."""
    save_panels(titled_panels(found, model), out)
    write_text(out.with_suffix(".csv"), to_csv(_numbers(found, model, probe)))


def _numbers(found: Intervened, model: str, probe: str) -> list[LabelledArray]:
    n_layers, n_heads = found.passes[0].attention.shape[:2]
    doses: dict[str, Sequence[Any]] = {
        "lambda": ["" if figures.dose is None else figures.dose for figures in found.passes]
    }
    layers: dict[str, Sequence[Any]] = {"layer": range(1, n_layers + 1)}
    keys: dict[str, Sequence[Any]] = {"position": found.keys}
    heads: dict[str, Sequence[Any]] = {"head": range(n_heads)}
    at = {"run": model, "probe": probe}
    numbers = [LabelledArray(name, found.stacked(name), [doses, layers, heads, keys], at) for name in _BY_HEAD]
    numbers += [LabelledArray(name, found.stacked(name), [doses, layers, keys], at) for name in _BY_KEY]
    numbers.append(LabelledArray("uniform", found.uniform, [keys], at))
    if found.loss(0) is not None:
        losses = [loss for number in range(len(found.passes)) if (loss := found.loss(number)) is not None]
        numbers.append(LabelledArray("loss", np.array([mean for mean, _ in losses]), [doses], at))
    return numbers


def titled_panels(found: Intervened, model: str) -> list[CurvePanel]:
    """Return the panels of an intervention, with the change and the model in the first title."""
    what = intervention_in_words(found.what)
    room = max(_TITLE - len(what), 12)  # the end of a long name says more
    name = model if len(model) <= room else f"…{model[1 - room :]}"
    first, *others = dose_panels(found)
    return [replace(first, title=f"{what}: {name}; {first.title}"), *others]


def dose_panels(found: Intervened) -> list[CurvePanel]:
    """Build the panels of an intervention: a line for each dose over the blocks, means over heads and keys."""
    keys = ", ".join(map(str, found.keys))
    shown = {f"attention to {keys}": found.stacked("attention").mean((2, 3))}
    if found.keys != (0,):
        shown["attention to 0"] = found.stacked("attention_to_first").mean((2, 3))
    shown[f"norm of state {keys}"] = found.stacked("state_norm").mean(2)
    panels = []
    for title, values in shown.items():
        axis = {"layer": range(1, values.shape[1] + 1)}
        series = [Series(line, axis, number, dose_in_words(found, number)) for number, line in enumerate(values)]
        is_norm = title.startswith("norm")
        if not is_norm:
            level = np.full(values.shape[1], float(found.uniform.mean()))
            series.append(Series(level, axis, None, "uniform attention", "control"))
        panels.append(CurvePanel(title.split()[0], title, series, "layer", log=is_norm))
    return panels


# ---------------------------------------------------------------- `birthmark length`

#: Points of a line: means over positions, wider apart behind the first ones.
_POINTS = 48
#: Characters above a panel.
_LENGTH_TITLE = 28


def write_length(found: Sequence[LengthResult], out: Path) -> None:
    """Write the picture to ``out`` and its numbers, by single position, beside it as a CSV of the same name."""
    save_panel(length_panel(found), out)
    write_text(out.with_suffix(".csv"), to_csv(_length_numbers(found)))


def _length_numbers(found: Sequence[LengthResult]) -> list[LabelledArray]:
    return [
        LabelledArray(
            "loss", arm.by_position, [{"position": range(result.length)}], {"run": result.model, "evicted": arm.evict}
        )
        for result in found
        for arm in result.arms
    ]


def length_panel(found: Sequence[LengthResult]) -> CurvePanel:
    """Build the panel of every arm's loss over positions, a small panel for each model.

    A point is the mean over the positions up to the next one; no mean reaches across the end of the prefix.
    """
    evicted = list(dict.fromkeys(arm.evict for result in found for arm in result.arms))
    every = np.concatenate([arm.by_position for result in found for arm in result.arms])
    # The positions of a prefix-LM's prefix predict nothing.
    ends = np.array([np.nanmin(every), np.nanmax(every)])
    series = []
    for name, result in zip(without_shared_folder([result.model for result in found]), found, strict=True):
        # Names differ at the end of their path.
        title = name if len(name) <= _LENGTH_TITLE else f"…{name[1 - _LENGTH_TITLE :]}"
        spaced = np.geomspace(1, result.length + 1, _POINTS + 1).round().astype(int) - 1
        edges = np.unique([*spaced, min(result.prefix, result.length)])
        at = ((edges[:-1] + edges[1:] - 1) / 2).tolist()
        border = {"position": [result.prefix - 0.5] * 2}
        series.append(Series(ends, border, None, "end of the prefix", "control", facet=title))
        # Before the end of the prefix they are one line: the first of them on top.
        for arm in reversed(result.arms):
            line = np.add.reduceat(arm.by_position, edges[:-1]) / np.diff(edges)
            words = f"{arm.evict or 'none'} evicted"
            series.append(Series(line, {"position": at}, evicted.index(arm.evict), words, facet=title))
    return CurvePanel("length", "", series, "position", "loss (nats)", x_log=True)


# ---------------------------------------------------------------- `birthmark quantise`


def write_quantisation(found: Sequence[QuantisedCost], model: str, out: Path) -> None:
    """Write the picture to ``out`` and its numbers beside it, as a CSV of the same name; same input, same bytes."""
    save_png(draw_quantised_loss(found, model), out)
    axis = {"bits": [cost.bits for cost in found]}
    names = ("loss", "loss_se", "increase", "increase_se", "preference_ratio", "kl_uniform", "rank_correlation")
    numbers = [
        LabelledArray(name, np.array([getattr(cost, name) for cost in found]), [axis], {"run": model}) for name in names
    ]
    write_text(out.with_suffix(".csv"), to_csv(numbers))


@in_figure_style
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
