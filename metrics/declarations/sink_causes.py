"""Quantities that lead to a sink: aggregation, hidden units, experts, states, lock (definitions §6, §7)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ..quantity import ROWS_NOT_ONE, Column, Quantity, unlisted

_DISCREPANCY = partial(
    unlisted,
    axes=("layer",),
    label="σ²(0) / σ²(late)",
    format="ratio",
    section="aggregation",
    symbol="σ²(0)/σ²",
    scale="log",
    scalar="mean",
    control=1.0,
    control_label="equal variance",
)
_N_EFF = Quantity(
    "n_eff",
    ("layer", "head", "position"),
    label="n_eff",
    definition="Effective number of tokens that a position averages over, mean over sequences; as a scalar at the last "
    "position, rows normalised, mean over layers and heads (definitions §6).",
    format="ratio",
    section="aggregation",
    scale="log",
    scalar="mean",
    per_block="last_mean",
    control="seq_len",
    control_label="uniform attention",
    over_training=None,
    by_block=Column("n_eff\nat T", 7, 0),
)

AGGREGATION = (
    _DISCREPANCY(
        "variance_discrepancy",
        definition="σ²(0) over its mean at t ≥ T/2, of the value aggregation; as a scalar the mean over layers "
        "(definitions §6).",
        by_block=Column("variance\ndiscr.", 8, 2),
    ),
    _DISCREPANCY(
        "variance_discrepancy_out",
        definition="The same of what enters the output projection, after norm, calibration and gate (definitions §6).",
    ),
    _N_EFF,
    replace(
        _N_EFF,
        name="n_eff_normalised",
        label="n_eff (shares of the row)",
        definition="The same of weights over their row's sum (definitions §6).",
        scalar="",
        when=ROWS_NOT_ONE,
        by_block=Column("n_eff\nat T\nof row", 7, 0),
    ),
    *(
        unlisted(
            f"positional_variance{suffix}",
            ("layer", "head", "position"),
            label="σ²(t)",
            definition=f"Variance over sequences of {what}, mean over the head's channels (definitions §6).",
            format=".3g",
            section="aggregation",
            scale="log",
            per_block="first",
        )
        for suffix, what in (("", "the value aggregation"), ("_out", "what enters the output projection"))
    ),
)

_unit = partial(unlisted, axes=("layer", "unit"), section="neurons", format=".3g", scale="log", per_block="max")
_listed_unit = partial(unlisted, axes=("layer", "rank"), section="neurons", format=".3g", per_block="first")
NEURONS = (
    unlisted(
        "super_neurons",
        ("layer",),
        definition="How many hidden units are super neurons (int64); as a scalar in all layers (definitions §7).",
        format=",d",
        section="neurons",
        scalar="sum",
        by_block=Column("super\nneurons", 9, 0),
    ),
    _unit(
        "activation_first",
        label="|activation| at position 0",
        definition="Mean absolute activation of every hidden unit at position 0 (definitions §7).",
    ),
    _unit(
        "activation_others",
        label="|activation| elsewhere",
        definition="Mean absolute activation of every hidden unit at the other positions (definitions §7).",
    ),
    _listed_unit(
        "neuron_index",
        label="unit",
        definition="The units of largest robust z at position 0, largest first (int64, definitions §7).",
        format="d",
    ),
    _listed_unit(
        "neuron_first",
        label="|activation| at position 0",
        definition="Mean absolute activation of these units at position 0 (definitions §7).",
    ),
    _listed_unit(
        "neuron_others",
        label="|activation| elsewhere",
        definition="Mean absolute activation of these units at the other positions (definitions §7).",
    ),
    _listed_unit(
        "neuron_z",
        label="robust z",
        definition="Robust z of these units' activation at position 0 (definitions §7).",
        scale="log",
        control=10.0,
        control_label="threshold",
    ),
    _listed_unit(
        "neuron_ratio",
        label="ratio",
        definition="Activation of these units at position 0 over that at the others; inf if silent elsewhere "
        "(definitions §7).",
        scale="log",
        control=5.0,
        control_label="threshold",
    ),
    _listed_unit(
        "neuron_is_super",
        label="super",
        definition="True for super neurons among these units (bool, definitions §7).",
        format="d",
    ),
    _listed_unit(
        "neuron_gate_norm",
        label="norm of the gate column",
        definition="Norm of these units' gate column; NaN without a gate (definitions §7).",
    ),
    _listed_unit(
        "neuron_up_norm",
        label="norm of the up column",
        definition="Norm of these units' up column (definitions §7).",
    ),
    _listed_unit(
        "neuron_down_sparsity",
        label="sparsity of the down row",
        definition="Max/mean of these units' absolute down row (definitions §7).",
    ),
    _listed_unit(
        "neuron_down_dimension",
        label="channel of the down row",
        definition="Residual channel into which these units' down row writes most (int64, definitions §7).",
        format="d",
    ),
)

_massive = partial(unlisted, axes=("state", "rank"), section="dominance", per_block="first")
STATES = (
    unlisted(
        "dominance_first",
        label="dominance of position 0",
        definition="Dominance ratio of position 0, in the block where that is largest: 1 … d (definitions §7).",
        format="ratio",
        section="dominance",
        symbol="max/mean",
        scale="log",
        of="dominance",
        per_block="first",
        by_block=Column("domi-\nnance", 10, 4),
    ),
    unlisted(
        "dominance_median",
        label="dominance of the median position",
        definition="Dominance ratio of the median position, in the same block (definitions §7).",
        format="ratio",
        section="dominance",
        symbol="max/mean",
        scale="log",
        of="dominance",
        per_block="median",
    ),
    unlisted(
        "massive_max",
        label="largest |h|",
        definition="Largest absolute value of the residual stream after any MLP, or the embeddings (definitions §7).",
        format="ratio",
        section="dominance",
        scale="log",
        of="massive_value",
        per_block="first",
        by_block=Column("largest\n|h|", 11, 0, key="massive"),
    ),
    unlisted(
        "effective_rank",
        ("state",),
        definition="Effective rank of the hidden states over all sequences and positions, 1 … d; as a scalar that of "
        "the last block's output (definitions §7).",
        format="ratio",
        section="dominance",
        scalar="last",
        by_block=Column("eff.\nrank", 12, 5),
    ),
    unlisted(
        "singular_values",
        ("state", "direction"),
        label="singular value",
        definition="Singular values of the hidden states over the root of their number, falling: their squares add up "
        "to the mean squared norm (definitions §7).",
        format=".3g",
        section="dominance",
        scale="log",
        per_block="first",
    ),
    unlisted(
        "dominance",
        ("state", "position"),
        label="dominance ratio",
        definition="Dominance ratio by position, mean over sequences (definitions §7).",
        format="ratio",
        section="dominance",
        scale="log",
        per_block="first",
    ),
    _massive(
        "massive_value",
        label="|h|",
        definition="Largest absolute values, one for each position and channel, largest first (definitions §7).",
        format="ratio",
        scale="log",
    ),
    _massive("massive_position", definition="Their positions (int64, definitions §7).", label="position", format="d"),
    _massive("massive_channel", definition="Their channels (int64, definitions §7).", label="channel", format="d"),
)

_lock = partial(unlisted, axes=("layer", "head"), section="lock", per_block="mean")
LOCK = (
    _lock(
        "qk_cosine",
        label="|cos(k₀, u)|",
        definition="Root mean square cosine of k₀ with u, the first principal direction of the head's queries; as a "
        "scalar the mean over layers and heads (definitions §7).",
        symbol="cos",
        scalar="mean",
        control="1/sqrt(d_head)",
        control_label="chance",
        by_block=Column("QK\nlock", 13, 3),
    ),
    _lock(
        "qk_positive",
        label="share of queries",
        definition="Share of the queries t ≥ 1 with a positive dot product with k₀; as a scalar the mean over layers "
        "and heads (definitions §7).",
        scalar="mean",
        control=0.5,
        control_label="half",
    ),
    _lock(
        "qk_cosine_signed",
        label="cos(k₀, u)",
        definition="Mean cosine of k₀ with u, on the side of the mean query (definitions §7).",
    ),
)


# ---------------------------------------------------------------- experts of a mixture
# Routing of the first position by a mixture of experts (definitions §7).

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
