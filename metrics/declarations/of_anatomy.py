"""Anatomy of a sink, in heads and in single sequences (definitions §13)."""

from __future__ import annotations

from functools import partial

from .unlisted import unlisted

_sink = partial(unlisted, section="sink")
_per_head = partial(_sink, axes=("layer", "head"), per_block="mean")

_KINDS = (("key", "keys"), ("value", "values"))
KEY_VALUE_NORMS = (
    *(
        _sink(
            f"{kind}_norms",
            ("layer", "position"),
            label=f"norm of {several}",
            definition=f"Mean Euclidean norm of {several} by position, over sequences and heads (definitions §13).",
            format=".3g",
            scale="log",
        )
        for kind, several in _KINDS
    ),
    *(
        _per_head(
            f"{kind}_norm_first",
            label=f"{kind} norm of position 0 over the others'",
            definition=f"Mean norm of the {kind} at position 0 over that of the other {several} (definitions §13).",
            scale="log",
            scalar="mean",
            control=1.0,
            control_label="no difference",
        )
        for kind, several in _KINDS
    ),
    *(
        _per_head(
            f"{kind}_norm_sink",
            label=f"{kind} norm of the sink over the others'",
            definition=f"Mean norm of the {kind} that gets most attention in each sequence and head over that of the "
            f"other {several} (definitions §13).",
            scale="log",
            scalar="mean",
            control=1.0,
            control_label="no difference",
        )
        for kind, several in _KINDS
    ),
)

HEAD_ENTROPY = (
    _sink(
        "attention_entropy_uniform",
        label="uniform attention",
        definition="The attention entropy that uniform attention would have (definitions §13).",
        unit="nats",
    ),
    _per_head(
        "attention_entropy",
        definition="Mean entropy of a query's weights over their row's sum, over sequences and queries "
        "(definitions §13).",
        unit="nats",
        symbol="entropy",
        scalar="mean",
        control="attention_entropy_uniform",
        control_label="uniform",
    ),
    _per_head(
        "largest_logit",
        label="largest attention logit",
        definition="Largest score of any query on a key that it sees, scaled, before the softmax (definitions §13).",
        format=".3g",
        per_block="max",
        scalar="max",
    ),
)

_listed = partial(_sink, axes=("layer", "rank"), per_block="first")
SEQUENCE_SINKS = (
    _sink(
        "sinks_per_sequence",
        ("layer",),
        definition="Keys of a sequence that are a sink in at least one head of the block, position 0 among them, mean "
        "over sequences; as a scalar in the block that has most (definitions §13).",
        scalar="max",
    ),
    _sink(
        "secondary_sinks",
        ("layer",),
        label="secondary sinks per sequence",
        definition="Keys behind position 0 of a sequence that are a sink in at least one head of the block, mean over "
        "sequences; as a scalar in the block that has most (definitions §13).",
        scalar="max",
    ),
    _sink(
        "sink_share",
        ("layer", "position"),
        label="share of sequences with a sink",
        definition="Share of sequences in which the key is a sink in at least one head of the block (definitions §13).",
    ),
    _listed(
        "secondary_sink_importance",
        label="importance of a secondary sink",
        definition="Largest importance of a position behind the first in any sequence and head, the ten positions of "
        "largest importance of each block (definitions §13).",
    ),
    _listed(
        "secondary_sink_position",
        label="position of a secondary sink",
        definition="Their positions (int64, definitions §13).",
        format="d",
    ),
    _listed(
        "secondary_sink_token",
        label="token of a secondary sink",
        definition="The token ids there (int64, definitions §13).",
        format="d",
    ),
    _listed(
        "secondary_sink_heads",
        label="heads of a secondary sink",
        definition="In how many heads of the block that key of that sequence is a sink (int64, definitions §13).",
        format="d",
    ),
)
