"""Dominant channels: super neurons concentrate the first token's state in few channels [SO]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...findings.along_depth import blocks_in_words, in_block
from ...findings.massive_channel import massive_pairs
from ...findings.verdict import Group
from ...metrics.quantities import MEASURED
from ..csv_files import LabelledArray
from ..pictures.axes import log_ticks, position_axis
from ..pictures.hidden_units import draw_massive
from ..pictures.layers_and_heads import draw_blocks
from ..pictures.panels import Panel
from ..pictures.saving import later
from ..pictures.style import SOLID
from ..run_history import PROBES, measured_probes
from ..text import format_value
from .declared import Link
from .section import Drawing, Listing, Section
from .snapshot_view import LISTED, Arrays, SnapshotView, draw_by_block, drawn_positions
from .training_view import BlockValues, TrainingView, heights_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


OUTLIERS = Link(
    "outliers",
    "Outliers",
    "Kurtosis of activations, 3 for a normal distribution; their ∞-norm; and the share of channels with a value more "
    "than 6 standard deviations from the mean. By position: which tokens make the kurtosis.",
    quantities=(
        # Tables have these.
        *(f"{place}_kurtosis_published" for place in ("residual", "attention", "mlp")),
        *(f"{place}_{what}" for place in ("attention", "mlp") for what in ("inf_norm", "outlier_channels")),
        "residual_inf_norm_by_position",
    ),
    optional=True,
)


# ---------------------------------------------------------------- dominant channels
# Super neurons concentrate the first token's state in few channels [SO].

# ── over training ────────────────────────────────────────────────────────────────────────────────────────────────────

_FIRST = BlockValues(MEASURED["dominance_first"], title="position 0")
_MEDIAN = BlockValues(MEASURED["dominance_median"], title="median position")
_MASSIVE = BlockValues(MEASURED["massive_max"])
_EFFECTIVE_RANK = BlockValues(MEASURED["effective_rank"])
_RATIO = heights_of(MEASURED["dominance"], least=1)


def _over_training(view: TrainingView, section: Section) -> None:
    view.add_blocks(section, "ratio", "Dominance ratio by block.", [_FIRST, _MEDIAN], _RATIO, embeddings=True)
    caption = "Largest absolute value in the residual stream, by block."
    heights = heights_of(_MASSIVE.quantity)
    view.add_blocks(section, "massive", caption, [_MASSIVE], heights, embeddings=True)
    caption = "Effective rank of the residual stream, by block."
    heights = heights_of(_EFFECTIVE_RANK.quantity, least=0)
    view.add_blocks(section, "rank", caption, [_EFFECTIVE_RANK], heights, embeddings=True)


# ── in one snapshot ──────────────────────────────────────────────────────────────────────────────────────────────────


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    view.add(section, "position", "Dominance ratio by position and block.", ["dominance"], _draw_by_position)
    caption = "The ten largest absolute values after every block, one per position and channel."
    needs = ["massive_value", "massive_position", "massive_channel"]
    view.add(section, "massive", caption, needs, _draw_massive)
    view.add(
        section, "spectrum", "Singular values of the hidden states, by block.", ["singular_values"], _draw_spectrum
    )

    def effective(arrays: Arrays) -> Drawing | None:
        found = {"effective_rank": arrays["effective_rank"]}
        return draw_by_block(
            found, {"effective_rank": ("", SOLID)}, MEASURED["effective_rank"].axis_label, 0, from_zero=True
        )

    view.add(section, "rank", "Effective rank of the hidden states by block.", ["effective_rank"], effective)
    for prefix in measured_probes(view.snapshot):
        _list_massive(view, section, prefix)


def _draw_by_position(arrays: Arrays) -> Drawing | None:
    ratio = arrays["dominance"]
    if not np.isfinite(ratio).any():
        return None
    t = drawn_positions(ratio.shape[1])
    figure = later(
        draw_blocks,
        [Panel("", t, ratio[:, t])],
        heights=_RATIO,
        x_axis=lambda axes: position_axis(axes, int(t[-1]) + 1),
        embeddings=True,
    )
    axes = [{"layer": range(len(ratio))}, {"position": t.tolist()}]
    return figure, [LabelledArray("dominance", ratio[:, t], axes)]


def _draw_massive(arrays: Arrays) -> Drawing | None:
    value, position, channel = (arrays[f"massive_{name}"] for name in ("value", "position", "channel"))
    if not (np.isfinite(value) & (value > 0)).all():
        return None
    numbers = []
    for layer in range(len(value)):
        axis = {
            "rank": range(1, value.shape[1] + 1),
            "position": position[layer].tolist(),
            "channel": channel[layer].tolist(),
        }
        numbers.append(LabelledArray("massive_value", value[layer], [axis], {"layer": layer}))
    return later(draw_massive, value, position, run=0), numbers


def _draw_spectrum(arrays: Arrays) -> Drawing | None:
    values = arrays["singular_values"]
    rank = np.unique(np.geomspace(1, values.shape[1], 128).round().astype(int))

    def axis(axes: Axes) -> None:
        axes.set_xscale("log")
        log_ticks(axes.xaxis, 1, values.shape[1])
        axes.set_xlabel("direction, by singular value")

    shown = np.where(values > 1e-6 * values.max(), values, np.nan)[:, rank - 1]
    if not np.isfinite(shown).any():
        return None
    figure = later(
        draw_blocks,
        [Panel("", rank, shown)],
        heights=heights_of(MEASURED["singular_values"]),
        x_axis=axis,
        embeddings=True,
    )
    axes = [{"layer": range(len(values))}, {"rank": rank.tolist()}]
    return figure, [LabelledArray("singular_value", values[:, rank - 1], axes)]


def _list_massive(view: SnapshotView, section: Section, prefix: str) -> None:
    group: Group = "bias_text" if prefix else "bias"
    pairs = massive_pairs(view.snapshot, group)[:LISTED]
    if not pairs:
        return
    rows = [
        [
            str(pair.position),
            str(pair.channel),
            format_value(pair.value, ".2f" if pair.value < 1000 else ",.0f"),
            in_block(pair.block).removeprefix("block "),
            blocks_in_words(pair.blocks).removeprefix("blocks ").removeprefix("block "),
        ]
        for pair in pairs
    ]
    probe = PROBES[prefix]
    section.listings.append(
        Listing(
            "Massive activations" + (f", {probe} probe" if prefix else ""),
            ["position", "channel", "largest |h|", "after block", "listed in blocks"],
            rows,
            f"dominance-massive{'-' + probe if prefix else ''}.csv",
            [],  # the picture's file holds them
        )
    )


DOMINANCE = Link(
    "dominance",
    "Dominant channels",
    "What super neurons write concentrates the first token's state in few channels. Dominance is the largest "
    "channel over the mean one, 1 to d; effective rank is how many directions all states spread over.",
    _over_training,
    "Dominance is the largest channel of a state over its mean one, 1 to d. Massive activations are the largest "
    "values of the residual stream. The spectrum shows over how many directions all states spread.",
    _in_snapshot,
    quantities=(
        "dominance_first", "dominance_median", "massive_max", "effective_rank", "singular_values", "dominance",
        "massive_value", "massive_position", "massive_channel",
    ),
)  # fmt: skip
