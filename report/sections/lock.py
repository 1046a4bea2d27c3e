"""QK lock: the first token's key meets a direction that all queries of a head share [SO]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..csv_files import LabelledArray
from ..pictures.heads import draw_head_maps
from ..pictures.panels import Heights
from .link import Link
from .section import Drawing, Section
from .snapshot_view import Arrays, SnapshotView, block_and_head
from .training_view import BlockValues, TrainingView


def _head_width(summary: Mapping[str, Any]) -> float:
    """Channels of a head; NaN where the snapshot does not say."""
    model = summary.get("model") or {}
    width = model.get("d_head") or model.get("head_dim")
    if width is None and model.get("d_model") and model.get("n_heads"):
        width = model["d_model"] // model["n_heads"]
    return float(width) if width else float("nan")


_COSINE = BlockValues(
    "qk_cosine", "qk_cosine", lambda a: a.mean(1), reference=("chance", lambda s, a: _head_width(s) ** -0.5)
)
_OF_HEADS = BlockValues("qk_cosine", "qk_cosine", reference=_COSINE.reference)
_POSITIVE = BlockValues("qk_positive", "qk_positive", lambda a: a.mean(1), reference=("half", lambda s, a: 0.5))


def _over_training(view: TrainingView, section: Section) -> None:
    heights = Heights("|cos(k₀, u)|", least=0)
    view.add_blocks(section, "cosine", "Root mean square cosine, mean over the heads of a block.", [_COSINE], heights)
    caption = "Share of the queries with a positive dot product with the first key."
    view.add_blocks(section, "positive", caption, [_POSITIVE], Heights("share of queries", least=0, most=1))
    view.add_heads(section, "cosine-heads", "Root mean square cosine of every head.", _OF_HEADS, heights)
    view.explain_if_empty(section)


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    width = _head_width(view.snapshot.summary)
    chance = f" Chance level of the cosine: {width**-0.5:.2f}." if np.isfinite(width) else ""
    caption = f"Cosine of the first key with the queries' direction, and share of positive dot products.{chance}"
    view.add(section, "map", caption, ["qk_cosine", "qk_positive"], _draw_maps)


def _draw_maps(arrays: Arrays) -> Drawing:
    names = {"qk_cosine": "|cos(k₀, u)|", "qk_positive": "share of queries"}
    figure = draw_head_maps([(title, arrays[name]) for name, title in names.items()], "")
    return figure, [LabelledArray(name, arrays[name], block_and_head(arrays[name])) for name in names]


LOCK = Link(
    "lock",
    "QK lock",
    "chain",
    "A first token that looks the same in every sequence has one key; heads whose queries share a direction can "
    "turn it towards that key. Cosine of the first key with the first principal direction of the queries.",
    _over_training,
    "How well the first token's key meets the queries of a head: the root mean square cosine with the first "
    "principal direction of the queries, and the share of the queries that have a positive dot product with it.",
    _in_snapshot,
    headline=("qk_cosine", "cos", ".3f"),
)
