"""Picture of an intervention: by block, the attention to the key and to key 0, and the norm of the key's state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...files import write_text
from ...findings.interventions import dose_in_words, intervention_in_words
from ...measure.interventions import Intervened
from ..csv_files import LabelledArray, to_csv
from .axes import log_heights
from .panels import block_colours
from .saving import save_png
from .style import INK, MUTED, REFERENCE, add_legend, in_our_style, legend_line, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Letters that a title has room for.
_TITLE = 60
_ALONE: dict[str, Any] = {"color": INK, "linewidth": 1.3}
#: Figures by block and key, and by head.
_BY_KEY = ("state_norm", "channel", "channel_value", "norm_before", "norm_after")
_BY_HEAD = ("attention", "attention_to_first")


def write_picture(found: Intervened, model: str, probe: str, out: Path) -> None:
    """Write the picture to ``out`` and its numbers beside it, as a CSV of the same name; same input, same bytes."""
    save_png(draw_dose_response(found, model), out)
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


@in_our_style
def draw_dose_response(found: Intervened, model: str) -> Figure:
    """Draw a line for each dose over the blocks, means over heads and keys; black: unchanged; dashed: uniform
    attention.

    Grey behind the lines: the blocks that are changed.
    """
    keys = ", ".join(map(str, found.keys))
    rows: list[tuple[str, np.ndarray]] = [(f"attention to {keys}", found.stacked("attention").mean((2, 3)))]
    if found.keys != (0,):
        rows.append(("attention to 0", found.stacked("attention_to_first").mean((2, 3))))
    rows.append((f"norm of state {keys}", found.stacked("state_norm").mean(2)))
    figure, panels = new_figure(360, 24 + 96 * len(rows), len(rows), 1, squeeze=False, sharex=True)
    axes: list[Axes] = list(panels.flat)
    blocks = np.arange(1, found.passes[0].attention.shape[0] + 1)
    colours = block_colours(len(found.passes) - 1)
    marker: dict[str, Any] = {"marker": "o", "markersize": 2.5} if len(blocks) <= 40 else {}
    looks = [_ALONE, *({"color": colour, "linewidth": 1.4} for colour in colours)]
    highest = max(float(np.nanmax(values)) for _, values in rows[:-1])
    for panel, (label, lines) in zip(axes, rows, strict=True):
        for layer in found.what.layers:
            panel.axvspan(layer - 0.5, layer + 0.5, color=MUTED, alpha=0.12, linewidth=0, zorder=0)
        for number, (line, look) in enumerate(zip(lines, looks, strict=True)):
            panel.plot(blocks, line, zorder=3 + number, **look, **marker)
        panel.set_ylabel(label)
        panel.set_xlim(0.5, len(blocks) + 0.5)
    for panel in axes[:-1]:
        panel.axhline(float(found.uniform.mean()), zorder=2, **REFERENCE)
        # One scale: the key is judged beside key 0.
        panel.set_ylim(-0.03 * highest, 1.07 * highest)
    if (rows[-1][1] > 0).all():
        log_heights(axes[-1], [rows[-1][1]])
    axes[-1].set_xlabel("block")
    what = intervention_in_words(found.what)
    room = max(_TITLE - len(what), 12)  # the end of a long name says more
    axes[0].set_title(f"{what}: {model if len(model) <= room else '…' + model[1 - room :]}", parse_math=False)
    entries = [(dose_in_words(found, number), legend_line(**look, **marker)) for number, look in enumerate(looks)]
    add_legend(figure, [*entries, ("uniform attention", legend_line(**REFERENCE))])
    return figure
