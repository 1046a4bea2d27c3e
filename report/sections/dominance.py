"""Dominant channels: super neurons concentrate the first token's state in few channels [SO]."""

from __future__ import annotations

import numpy as np

from ...findings.formatting import format_value
from ...findings.massive_channel import massive_pairs
from ...findings.quantities_by_block import blocks_in_words, in_block
from ...findings.run_history import PROBES, measured_probes
from ...findings.verdict import Group
from ...metrics.quantities import MEASURED
from ..charts.specs import CurvePanel, Drawn, Series
from ..csv_files import LabelledArray
from ..table import Column, Table
from .declared import Link
from .section import Listing, Section
from .snapshot_view import LISTED, Arrays, SnapshotView, draw_by_block, drawn_positions
from .training_view import BlockValues, TrainingView

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


def _over_training(view: TrainingView, section: Section) -> None:
    unit = MEASURED["dominance"].axis_label
    view.add_blocks(section, "ratio", "Dominance ratio by block.", _FIRST, _MEDIAN, unit=unit, embeddings=True)
    caption = "Largest absolute value in the residual stream, by block."
    view.add_blocks(section, "massive", caption, _MASSIVE, embeddings=True)
    caption = "Effective rank of the residual stream, by block."
    view.add_blocks(section, "rank", caption, _EFFECTIVE_RANK, embeddings=True)


# ── in one snapshot ──────────────────────────────────────────────────────────────────────────────────────────────────


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    view.add(section, "position", "Dominance ratio by position and block.", ["dominance"], _draw_by_position)
    caption = "The ten largest absolute values after every block, one per position and channel."
    needs = ["massive_value", "massive_position", "massive_channel"]
    view.add(section, "massive", caption, needs, _draw_massive)
    view.add(
        section, "spectrum", "Singular values of the hidden states, by block.", ["singular_values"], _draw_spectrum
    )

    def effective(arrays: Arrays) -> Drawn | None:
        quantity = MEASURED["effective_rank"]
        return draw_by_block({quantity.name: arrays[quantity.name]}, quantity.axis_label, 0)

    view.add(section, "rank", "Effective rank of the hidden states by block.", ["effective_rank"], effective)
    for prefix in measured_probes(view.snapshot):
        _list_massive(view, section, prefix)


def _draw_by_position(arrays: Arrays) -> Drawn | None:
    ratio = arrays["dominance"]
    if not np.isfinite(ratio).any():
        return None
    t = drawn_positions(ratio.shape[1])
    return Drawn([LabelledArray("dominance", ratio[:, t], [{"layer": range(len(ratio))}, {"position": t.tolist()}])])


def _draw_massive(arrays: Arrays) -> Drawn | None:
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
    blocks = np.broadcast_to(np.arange(len(value))[:, None], value.shape)
    dots = [
        Series(value[shown], {"layer": blocks[shown].tolist()}, run, name, "dots")
        for name, run, shown in (("at position 0", 0, position == 0), ("elsewhere", None, position != 0))
    ]
    # The others first, so that they hide none at position 0.
    return Drawn(numbers, made=CurvePanel("", "", dots[::-1], "layer", "|h|, the ten largest", log=True))


def _draw_spectrum(arrays: Arrays) -> Drawn | None:
    values = arrays["singular_values"]
    rank = np.unique(np.geomspace(1, values.shape[1], 128).round().astype(int))
    # Mere rounding errors are no singular values.
    shown = np.where(values > 1e-6 * values.max(), values, np.nan)[:, rank - 1]
    if not np.isfinite(shown).any():
        return None
    axes = [{"layer": range(len(values))}, {"rank": rank.tolist()}]
    unit = MEASURED["singular_values"].axis_label
    lines = Series(shown, {"layer": range(len(values)), "rank": rank.tolist()}, 0)
    panel = CurvePanel("", "", [lines], "rank", unit, log=True, x_log=True)
    return Drawn([LabelledArray("singular_value", values[:, rank - 1], axes)], made=panel)


def _list_massive(view: SnapshotView, section: Section, prefix: str) -> None:
    group: Group = "bias_text" if prefix else "bias"
    pairs = massive_pairs(view.snapshot, group)[:LISTED]
    if not pairs:
        return
    rows = [
        [
            pair.position,
            pair.channel,
            format_value(pair.value, ".2f" if pair.value < 1000 else ",.0f"),
            in_block(pair.block).removeprefix("block "),
            blocks_in_words(pair.blocks).removeprefix("blocks ").removeprefix("block "),
        ]
        for pair in pairs
    ]
    probe, titles = PROBES[prefix], ("position", "channel", "largest |h|", "after block", "listed in blocks")
    section.listings.append(
        Listing(
            "Massive activations" + (f", {probe} probe" if prefix else ""),
            Table(list(map(Column, titles)), rows),
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
