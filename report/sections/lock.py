"""QK lock: the first token's key meets a direction that all queries of a head share [SO]."""

from __future__ import annotations

import numpy as np

from ...metrics.quantities import MEASURED
from ..csv_files import LabelledArray
from ..pictures.heads import draw_head_maps
from ..pictures.later import later
from .link import Link
from .section import Drawing, Section
from .snapshot_view import Arrays, SnapshotView, block_and_head
from .training_view import BlockValues, TrainingView, heights_of

_COSINE, _POSITIVE = MEASURED["qk_cosine"], MEASURED["qk_positive"]


def _over_training(view: TrainingView, section: Section) -> None:
    heights = heights_of(_COSINE, least=0)
    caption = "Root mean square cosine, mean over the heads of a block."
    view.add_blocks(section, "cosine", caption, [BlockValues(_COSINE)], heights)
    caption = "Share of the queries with a positive dot product with the first key."
    view.add_blocks(section, "positive", caption, [BlockValues(_POSITIVE)], heights_of(_POSITIVE, least=0, most=1))
    of_heads = BlockValues(_COSINE, np.asarray)
    view.add_heads(section, "cosine-heads", "Root mean square cosine of every head.", of_heads, heights)


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    level = _COSINE.level(view.snapshot.summary)
    chance = f" Chance level of the cosine: {level:.2f}." if np.isfinite(level) else ""
    caption = f"Cosine of the first key with the queries' direction, and share of positive dot products.{chance}"
    view.add(section, "map", caption, ["qk_cosine", "qk_positive"], _draw_maps)


def _draw_maps(arrays: Arrays) -> Drawing:
    shown = (_COSINE, _POSITIVE)
    figure = later(draw_head_maps, [(quantity.label, arrays[quantity.name]) for quantity in shown], "")
    return figure, [LabelledArray(q.name, arrays[q.name], block_and_head(arrays[q.name])) for q in shown]


LOCK = Link(
    "lock",
    "QK lock",
    "A first token that looks the same in every sequence has one key; heads whose queries share a direction can "
    "turn it towards that key. Cosine of the first key with the first principal direction of the queries.",
    _over_training,
    "How well the first token's key meets the queries of a head: the root mean square cosine with the first "
    "principal direction of the queries, and the share of the queries that have a positive dot product with it.",
    _in_snapshot,
    quantities=("qk_cosine", "qk_positive", "qk_cosine_signed"),
)
