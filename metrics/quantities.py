"""Every quantity that a snapshot or the training log holds, declared once (docs/run-directory.md is made of it).

A new quantity is a metric and its declaration here: a metric's key is ``module:Class`` in this folder, and its class
observes the pass itself (docs/extending.md). Keys without a class are those that ``measure/observed.py`` feeds.
Names, and their order in ``summary.json``, are a file format. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from .quantity import AxisName, Column, Quantity

# What stands in no table.
_unlisted = partial(Quantity, over_training=None, by_block=None)

_BIRTH = "the model's birth is known"
_STRANGERS = "births of other seeds are measured"
_NOT_ONE = "rows of weights need not sum to 1"


@dataclass(frozen=True)
class Link:
    """A section of the pages: a link of the attention sink's causal chain, or of the seed's mark that runs below it."""

    part: Literal["chain", "mark"]
    headline: str
    """The scalar that says most of it in one number; "" for none."""


SECTIONS: Mapping[str, Link] = {
    "aggregation": Link("chain", "variance_discrepancy"),
    "neurons": Link("chain", "super_neurons"),
    "dominance": Link("chain", "dominance_first"),
    "lock": Link("chain", "qk_cosine"),
    "sink": Link("chain", "sink_mass"),
    "direction": Link("mark", "alignment"),
    "contraction": Link("mark", "inter"),
    "preference": Link("mark", "preference_ratio"),
    "persistence": Link("mark", "rank_persistence"),
    "lineage": Link("mark", ""),
}
"""Sections in causal order."""

_SITES: tuple[tuple[str, AxisName, str], ...] = (
    ("mlp", "state", "the MLP"),
    ("attention", "layer", "attention"),
)
_CONTRACTION = (
    _unlisted(
        "inter",
        label="inter contraction",
        definition="Mean cosine between the last block's outputs for different sequences, at the last position "
        "(definitions §3).",
        section="contraction",
        symbol="cos",
        of="inter_mlp",
        by_block=Column("inter", 1, 0),
    ),
    _unlisted(
        "intra",
        label="intra contraction",
        definition="Mean cosine between the last block's outputs at different positions of one sequence, averaged over "
        "sequences (definitions §3).",
        section="contraction",
        symbol="cos",
        of="intra_mlp",
        by_block=Column("intra", 2, 0),
    ),
    *(
        _unlisted(
            f"{kind}_{site}",
            (axis,),
            label=f"{kind} contraction",
            definition=f"Contraction {across} of the residual stream after {where} (definitions §3).",
            section="contraction",
        )
        for site, axis, where in _SITES
        for kind, across in (("inter", "across sequences"), ("intra", "within them"))
    ),
)

_PREFERENCE = (
    _unlisted(
        "kl_uniform",
        label="KL(p̄ ‖ uniform)",
        definition="Kullback-Leibler divergence of p̄ from the uniform distribution (definitions §4).",
        unit="nats",
        section="preference",
    ),
    _unlisted(
        "preference_ratio",
        definition="V · max p̄, how many times its even share the favourite token gets: 1 is no preference "
        "(definitions §4).",
        format="ratio",
        section="preference",
        symbol="V·max p̄",
        control=1.0,
        control_label="no preference",
        over_training=Column(place=3),
    ),
    _unlisted(
        "top1_share",
        label="top-1 share",
        definition="max w, how often the most chosen token is the argmax (definitions §4).",
        format="percent",
        section="preference",
        over_training=Column(place=4, page_only=True),
    ),
    _unlisted(
        "coverage_80",
        label="coverage@80",
        definition="Smallest share of the vocabulary that receives 80 % of the argmax choices (definitions §4).",
        format="percent",
        section="preference",
    ),
    _unlisted(
        "entropy",
        label="normalised entropy of p̄",
        definition="Entropy of p̄ over log V: 1 is uniform (definitions §4).",
        section="preference",
    ),
    _unlisted(
        "entropy_argmax",
        label="normalised entropy of w",
        definition="Entropy of w over log V: 1 is uniform (definitions §4).",
        section="preference",
    ),
    _unlisted(
        "mean_prob",
        ("token",),
        label="p̄",
        definition="p̄: mean over sequences of the next-token distribution at the last position (definitions §4).",
        format=".3g",
        section="preference",
    ),
    _unlisted(
        "argmax_share",
        ("token",),
        label="w",
        definition="w: how often each token is the argmax; tokens of one logit share the choice (definitions §4).",
        format="percent",
        section="preference",
    ),
)

_COMPARED_WITH_BIRTH = (
    _unlisted(
        "alignment",
        ("state",),
        label="alignment",
        definition="Mean cosine of the hidden states at the last position with the seed direction (definitions §3).",
        section="direction",
        symbol="cos",
        scalar="last",
        control="alignment_stranger",
        control_label="stranger",
        when=_BIRTH,
        over_training=Column(place=1, gives_way=2),
        by_block=Column("align-\nment", 3, 0),
    ),
    _unlisted(
        "drift",
        ("state",),
        definition="Cosine between today's mean direction and the seed direction (definitions §3).",
        section="direction",
        symbol="cos",
        scalar="last",
        control=1.0,
        control_label="birth",
        when=_BIRTH,
        over_training=Column(place=2, page_only=True),
    ),
    _unlisted(
        "energy_share",
        ("state",),
        definition="Share of the hidden states' energy along the seed direction (definitions §3).",
        format="percent",
        section="direction",
        scalar="last",
        control="energy_share_chance",
        control_label="chance",
        when=_BIRTH,
    ),
    _unlisted(
        "energy_share_chance",
        definition="1/d, the share of energy along a direction without relation (definitions §3).",
        format="percent",
        section="direction",
        when=_BIRTH,
    ),
    _unlisted(
        "rank_persistence",
        definition="Spearman's ρ of p̄ against birth (definitions §4).",
        section="persistence",
        symbol="ρ",
        control="rank_persistence_stranger",
        control_label="stranger",
        when=_BIRTH,
        over_training=Column(place=5),
    ),
    _unlisted(
        "kendall_tau",
        label="Kendall τ",
        definition="Kendall's τ-b of p̄ against birth (definitions §4).",
        section="persistence",
        symbol="τ",
        when=_BIRTH,
        over_training=Column(place=6, page_only=True),
    ),
    *(
        _unlisted(
            f"overlap_{k}",
            label=f"overlap@{k}",
            definition=f"Share of the {k} most preferred tokens that are those of birth (definitions §4).",
            format=".2f",
            section="persistence",
            when=f"{_BIRTH}, and V is at least {k}",
            over_training=Column(place=7, page_only=True) if k == 100 else None,
        )
        for k in (10, 100, 1000)
    ),
    _unlisted(
        "rbo",
        label="rank-biased overlap",
        definition="Rank-biased overlap of the order of preference with birth's (definitions §4).",
        section="persistence",
        when=_BIRTH,
    ),
    _unlisted(
        "alignment_stranger",
        ("stranger", "state"),
        label="alignment with strangers",
        definition="Alignment with each stranger's seed direction; as a scalar the largest absolute one of the last "
        "block. A stranger is a birth of the same config from another seed (definitions §3).",
        section="direction",
        scalar="max",
        when=_STRANGERS,
    ),
    _unlisted(
        "rank_persistence_stranger",
        ("stranger",),
        label="rank persistence of strangers",
        definition="Spearman's ρ of p̄ against each stranger's; as a scalar the largest absolute one (definitions §4).",
        section="persistence",
        scalar="max",
        when=_STRANGERS,
    ),
    _unlisted(
        "mean_direction",
        ("state", "channel"),
        definition="Normalised mean hidden state; at step 0 it is the seed direction (definitions §3).",
        section="direction",
    ),
)


def _sinks(suffix: str, mark: str, of_rows: str, when: str) -> tuple[Quantity, ...]:
    sink = partial(_unlisted, section="sink", when=when)
    first = not suffix
    return (
        sink(
            f"sink_mass{suffix}",
            ("layer", "head"),
            label="sink mass" + mark,
            definition=f"Mean attention of the queries after the first on position 0{of_rows} (definitions §5).",
            symbol="mass",
            scalar="mean",
            per_block="mean",
            control="sink_uniform",
            control_label="uniform",
            over_training=Column(place=8, gives_way=2, text_heading="sink mass on text") if first else None,
            by_block=Column("sink\nmass", 4, 0) if first else None,
        ),
        sink(
            f"sink_mass{suffix}_max",
            label="sink mass of the largest head" + mark,
            definition=f"Sink mass of the head that has most of it{of_rows} (definitions §5).",
            symbol="mass",
            of=f"sink_mass{suffix}",
            per_block="max",
            control="sink_uniform",
            control_label="uniform",
            by_block=Column("most in\na head", 5, 1) if first else None,
        ),
        sink(
            f"sink_rate{suffix}",
            ("layer", "head"),
            label="sink rate" + mark,
            definition=f"Percentage of sequences whose importance of key 0 exceeds ε{of_rows}; as a scalar over all "
            "(sequence, layer, head) (definitions §5).",
            unit="%",
            format=".1f",
            scalar="mean",
            per_block="mean",
            over_training=Column("sink rate %", 9, page_only=True) if first else None,
            by_block=Column("sink\nrate %", 6, 6) if first else None,
        ),
        sink(
            f"sink_rate_grid{suffix}",
            ("epsilon", "layer", "head"),
            label="sink rate" + mark,
            definition=f"Sink rate of key 0 at every further ε{of_rows} (definitions §5).",
            unit="%",
            format=".1f",
        ),
        sink(
            f"sink_rate_by_key{suffix}",
            ("epsilon", "position"),
            label="sink rate" + mark,
            definition=f"Sink rate of every key at every further ε, over all (sequence, layer, head){of_rows} "
            "(definitions §5).",
            unit="%",
            format=".1f",
        ),
        sink(
            f"sink_position{suffix}",
            ("layer", "head"),
            label="sink position" + mark,
            definition=f"The key of largest mean importance{of_rows} (int64, definitions §5).",
            format=",d",
        ),
        sink(
            f"importance{suffix}",
            ("layer", "head", "position"),
            label="importance" + mark,
            definition=f"Mean importance{of_rows} of every key (definitions §5).",
            per_block="first",
        ),
    )


_SINKS = (
    _unlisted(
        "sink_uniform",
        label="uniform attention",
        definition="The sink mass that uniform attention would have (definitions §5).",
        section="sink",
    ),
    _unlisted(
        "sink_epsilon",
        label="ε",
        definition="ε of the sink rate (definitions §5).",
        format="g",
        section="sink",
    ),
    _unlisted(
        "sink_epsilons",
        ("epsilon",),
        label="ε",
        definition="Further values of ε: 0.1, 0.2, … 0.9 (definitions §5).",
        format="g",
        section="sink",
    ),
    *_sinks("", "", "", ""),
    *_sinks("_normalised", " (normalised)", ", of weights over their row's sum", _NOT_ONE),
)

_IN_TEXT = "documents begin inside the sequences of a run's own text probe"
_DOCUMENT_SINKS = (
    _unlisted(
        "document_sink_uniform",
        label="uniform attention within documents",
        definition="The document sink mass of attention that is uniform over a query's own document (definitions §5).",
        section="sink",
        when=_IN_TEXT,
    ),
    _unlisted(
        "document_sink_documents",
        label="documents that begin inside",
        definition="Documents that the document sink mass is of (definitions §5).",
        format=",d",
        section="sink",
        when=_IN_TEXT,
    ),
    *(
        _unlisted(
            f"document_sink_mass{suffix}",
            ("layer", "head"),
            label="document sink mass" + mark,
            definition="Mean attention of the queries behind a document's first token on that token"
            f"{of_rows}, of documents that begin behind position 0 (definitions §5).",
            section="sink",
            symbol="mass",
            scalar="mean",
            per_block="mean",
            control="document_sink_uniform",
            control_label="uniform within the document",
            when=when,
        )
        for suffix, mark, of_rows, when in (
            ("", "", "", _IN_TEXT),
            ("_normalised", " (normalised)", ", of weights over their row's sum", f"{_IN_TEXT} and {_NOT_ONE}"),
        )
    ),
)

_DISCREPANCY = partial(
    _unlisted,
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

_AGGREGATION = (
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
        definition="The same of weights over their row's sum (definitions §6).",
        scalar="",
        when=_NOT_ONE,
        by_block=None,
    ),
    *(
        _unlisted(
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

_unit = partial(_unlisted, axes=("layer", "unit"), section="neurons", format=".3g", scale="log", per_block="max")
_listed_unit = partial(_unlisted, axes=("layer", "rank"), section="neurons", format=".3g", per_block="first")
_NEURONS = (
    _unlisted(
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
        definition="Of these units: mean absolute activation at position 0 (definitions §7).",
    ),
    _listed_unit(
        "neuron_others",
        label="|activation| elsewhere",
        definition="Of these units: mean absolute activation at the other positions (definitions §7).",
    ),
    _listed_unit(
        "neuron_z",
        label="robust z",
        definition="Of these units: robust z of the activation at position 0 (definitions §7).",
        scale="log",
        control=10.0,
        control_label="threshold",
    ),
    _listed_unit(
        "neuron_ratio",
        label="ratio",
        definition="Of these units: the activation at position 0 over that at the others; inf where silent elsewhere "
        "(definitions §7).",
        scale="log",
        control=5.0,
        control_label="threshold",
    ),
    _listed_unit(
        "neuron_is_super",
        label="super",
        definition="Of these units: whether it is a super neuron (bool, definitions §7).",
        format="d",
    ),
    _listed_unit(
        "neuron_gate_norm",
        label="norm of the gate column",
        definition="Of these units: norm of the gate column; NaN without a gate (definitions §7).",
    ),
    _listed_unit(
        "neuron_up_norm",
        label="norm of the up column",
        definition="Of these units: norm of the up column (definitions §7).",
    ),
    _listed_unit(
        "neuron_down_sparsity",
        label="sparsity of the down row",
        definition="Of these units: max/mean of the absolute down row (definitions §7).",
    ),
    _listed_unit(
        "neuron_down_dimension",
        label="channel of the down row",
        definition="Of these units: the residual channel that the down row writes most into (int64, definitions §7).",
        format="d",
    ),
)

_massive = partial(_unlisted, axes=("state", "rank"), section="dominance", per_block="first")
_STATES = (
    _unlisted(
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
    _unlisted(
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
    _unlisted(
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
    _unlisted(
        "effective_rank",
        ("state",),
        definition="Effective rank of the hidden states over all sequences and positions, 1 … d; as a scalar that of "
        "the last block's output (definitions §7).",
        format="ratio",
        section="dominance",
        scalar="last",
        by_block=Column("eff.\nrank", 12, 5),
    ),
    _unlisted(
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
    _unlisted(
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

_lock = partial(_unlisted, axes=("layer", "head"), section="lock", per_block="mean")
_LOCK = (
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

_AT_BIRTH = (
    _unlisted(
        "stranger_direction",
        ("stranger", "state", "channel"),
        label="strangers' seed directions",
        definition="Seed direction of each stranger (definitions §3).",
        section="direction",
        when="it is the snapshot at birth, and births of other seeds are measured",
    ),
    _unlisted(
        "stranger_mean_prob",
        ("stranger", "token"),
        label="strangers' p̄",
        definition="p̄ of each stranger (definitions §4).",
        section="preference",
        when="it is the snapshot at birth, and births of other seeds are measured",
    ),
)

METRICS: Mapping[str, tuple[Quantity, ...]] = {
    "contraction": _CONTRACTION,
    "preference": _PREFERENCE,
    "birth": _COMPARED_WITH_BIRTH,
    "sinks": _SINKS,
    "document_sinks": _DOCUMENT_SINKS,
    "aggregation": _AGGREGATION,
    "neurons": _NEURONS,
    "states": _STATES,
    "lock": _LOCK,
}
"""What each metric gives. The order is that of ``summary.json``."""

MEASURED: Mapping[str, Quantity] = {q.name: q for qs in (*METRICS.values(), _AT_BIRTH) for q in qs}
"""Every quantity of a snapshot by its name."""

_loss = partial(_unlisted, unit="nats per token", section="loss")
LOGGED: Mapping[str, Quantity] = {
    q.name: q
    for q in (
        _loss(
            "train/loss",
            label="train loss",
            definition="Loss of the global batch.",
            over_training=Column(place=-2),
        ),
        _unlisted(
            "train/z_loss",
            label="z-loss",
            definition="Coefficient times the mean squared log-sum-exp of the logits, which training minimises too.",
            unit="nats² per token",
            section="loss",
            when="`optim.z_loss` is set",
        ),
        _loss(
            "val/loss",
            label="val loss",
            definition="Mean loss over the validation windows.",
            over_training=Column(place=-3),
        ),
        _loss(
            "val/bits_per_byte",
            label="bits per byte",
            definition="Loss on validation text.",
            unit="bits per UTF-8 byte",
            when="the corpus is text",
        ),
        _loss(
            "val/loss_trigger",
            label="trigger loss",
            definition="Loss at trigger positions.",
            unit="nats per trigger position",
            when="the data is `backcopy`",
            over_training=Column(place=-1, gives_way=2),
        ),
        _unlisted("train/lr", label="learning rate", definition="Learning rate of this step.", format=".3g"),
        _unlisted(
            "train/grad_norm", label="gradient norm", definition="Gradient norm before clipping.", section="loss"
        ),
        _unlisted(
            "train/skipped_steps",
            label="skipped steps",
            definition="Steps so far that moved nothing, because their loss or gradient was not finite.",
            format=",d",
        ),
        _unlisted(
            "train/loss_spikes",
            label="loss spikes",
            definition="Steps so far whose loss is above all of the 128 steps before, and more than 6 robust standard "
            "deviations above their median.",
            format=",d",
        ),
        _unlisted(
            "train/grad_norm_spikes",
            label="gradient spikes",
            definition="The same of the gradient norm.",
            format=",d",
        ),
        _unlisted("train/tokens", label="tokens", definition="Tokens seen.", format=",d"),
        _unlisted(
            "train/tokens_per_s",
            label="tokens per second",
            definition="Rate since the last line, without snapshots, validation and checkpoints.",
            unit="1/s",
            format=",.0f",
        ),
        _unlisted(
            "train/flops_per_s",
            label="FLOPs per second",
            definition="The same rate in floating-point operations.",
            unit="1/s",
            format=".3g",
        ),
        _unlisted(
            "train/mfu",
            label="model FLOPs utilisation",
            definition="Share of the device's peak.",
            format="percent",
            when="the peak of the device is known",
        ),
        _unlisted(
            "train/step_p50_s",
            label="step time, median",
            definition="Median time of a step since the last line, on rank 0.",
            unit="s",
            format=".3g",
            section="speed",
        ),
        _unlisted(
            "train/step_p99_s",
            label="step time, 99 %",
            definition="Time that 99 % of the steps since the last line took at most, on rank 0.",
            unit="s",
            format=".3g",
            section="speed",
        ),
        _unlisted(
            "train/slowest_rank",
            label="slowest rank",
            definition="The rank whose median step time is the longest.",
            format=",d",
            when="there are several processes",
        ),
        _unlisted(
            "train/slowest_rank_p50_s",
            label="step time of the slowest rank",
            definition="Its median step time.",
            unit="s",
            format=".3g",
            when="there are several processes",
            section="speed",
        ),
        _unlisted(
            "train/data_wait",
            label="data wait",
            definition="Share of the time since the last line in which steps waited for their batches, on the rank "
            "that waited longest.",
            format="percent",
            section="speed",
        ),
        _unlisted(
            "train/peak_memory",
            label="peak memory",
            definition="The most memory on any rank: allocated on a GPU since the last line; on CPU resident in a "
            "process so far.",
            unit="GB",
            format=".3g",
        ),
        *(
            _unlisted(
                f"train/{part}_s",
                label=f"seconds of {what}",
                definition=f"For how long training stood still for {what} at this milestone.",
                unit="s",
                format=".3g",
                when=when,
            )
            for part, what, when in (
                ("validation", "the validation", ""),
                ("snapshot", "the bias snapshot", "snapshots are on"),
                ("fingerprint", "the lineage test", "the lineage test is on"),
                ("checkpoint", "the checkpoint", ""),
            )
        ),
        _unlisted(
            "seedprint/z",
            label="z",
            definition="z of the lineage test against the run's own birth (definitions §10).",
            format=".1f",
            section="lineage",
            control="seedprint/z_stranger",
            control_label="stranger",
            when="the lineage test is on",
            over_training=Column("lineage\nz", place=0, gives_way=0),
        ),
        _unlisted(
            "seedprint/log10_p",
            label="log₁₀ p",
            definition="Its p as a power of ten (definitions §10).",
            format=".1f",
            section="lineage",
            control=-2.0,
            control_label="p = 0.01",
            when="the lineage test is on",
            over_training=Column(place=0, page_only=True),
        ),
        _unlisted(
            "seedprint/z_stranger",
            label="z of strangers",
            definition="The largest z against a stranger's birth (definitions §10).",
            section="lineage",
            when="the lineage test is on, and births of other seeds are measured",
        ),
    )
}
"""What ``metrics.jsonl`` holds beside the scalars of snapshots, by its name there."""


def quantities_of(summary: Mapping[str, Any]) -> dict[str, Quantity]:
    """Every quantity that a snapshot may hold, by name: ours, and those that the user's metrics declared in it.

    Args:
        summary: of the snapshot.

    Raises:
        ValueError: its declarations are damaged.
    """
    return {**MEASURED, **{q.name: q for q in map(Quantity.from_json, summary.get("quantities") or ())}}


def over_training(quantities: Iterable[Quantity]) -> list[tuple[Quantity, Column]]:
    """Scalars that the table of snapshots shows, from the left."""
    shown = [(q, q.over_training) for q in quantities if q.has_scalar and q.over_training is not None]
    return sorted(shown, key=lambda pair: pair[1].place)


def by_block(quantities: Iterable[Quantity]) -> list[tuple[Quantity, Column]]:
    """Quantities that the table of blocks shows, from the left: those whose array has a number for each block."""
    every = list(quantities)
    blocks = {q.name for q in every if q.axes[:1] in (("layer",), ("state",))}
    shown = [(q, q.by_block) for q in every if q.by_block is not None and q.array in blocks]
    return sorted(shown, key=lambda pair: pair[1].place)
