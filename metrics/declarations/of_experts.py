"""Routing of the first position by a mixture of experts (definitions §7)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..quantity import Column, Quantity
from .unlisted import unlisted

_HAS_EXPERTS = "blocks have experts"
_experts = partial(unlisted, section="neurons", when=_HAS_EXPERTS, format="percent")
_FIRST = Quantity(
    "routing_first",
    ("layer",),
    label="routing of position 0",
    definition="Total variation distance of position 0's shares of experts from those of the positions after it: 0 is "
    "no difference, 1 is experts of its own; as a scalar the mean over layers (definitions §7).",
    section="neurons",
    scalar="mean",
    control="routing_median",
    control_label="the median position",
    when=_HAS_EXPERTS,
    over_training=None,
    by_block=Column("routing\nof 0", 10, 3),
)

EXPERTS = (
    _FIRST,
    replace(
        _FIRST,
        name="routing_median",
        label="routing, median position",
        definition="The same of the median position after the first: what so few sequences show by chance "
        "(definitions §7).",
        control=None,
        control_label="",
        by_block=None,
    ),
    unlisted(
        "routing_distance",
        ("layer", "position"),
        label="distance of routing",
        definition="The same of every position (definitions §7).",
        section="neurons",
        when=_HAS_EXPERTS,
        per_block="first",
    ),
    _experts(
        "expert_share_first",
        ("layer", "expert"),
        label="share at position 0",
        definition="Share of each expert in what position 0 is sent to, over the sequences (definitions §7).",
        per_block="max",
    ),
    _experts(
        "expert_share_others",
        ("layer", "expert"),
        label="share elsewhere",
        definition="The same of the positions after the first (definitions §7).",
        per_block="max",
    ),
)

EXPERT_UNITS = (
    unlisted(
        "expert_super_neurons",
        ("layer", "expert"),
        label="super neurons by expert",
        definition="How many hidden units of each expert are super neurons among its own, over the tokens that it is "
        "sent; as a scalar in all experts (definitions §7).",
        section="neurons",
        scalar="sum",
        when=_HAS_EXPERTS,
        per_block="max",
    ),
    unlisted(
        "expert_dead_units",
        ("layer", "expert"),
        label="dead units by expert",
        definition="How many hidden units of each expert are 0 for every token that it is sent; NaN where it is sent "
        "none; as a scalar in all experts (definitions §7).",
        section="neurons",
        scalar="sum",
        when=_HAS_EXPERTS,
        per_block="max",
    ),
)
