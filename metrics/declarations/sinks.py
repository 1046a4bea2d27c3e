"""Quantities of attention sinks: of sequences and documents, in heads, and of adapters (definitions §5, §12, §13)."""

from __future__ import annotations

from functools import partial

from ..quantity import ROWS_NOT_ONE, Column, Quantity, unlisted


def n_judged_keys(n_positions: int) -> int:
    """Return the number of keys, from the first, that at least a quarter of all queries see.

    The importance of the last keys is a mean of few weights: a head that looks at the token itself would make a sink of
    each of them.
    """
    return n_positions - -(-n_positions // 4) + 1


def _sinks(suffix: str, mark: str, of_rows: str, when: str) -> tuple[Quantity, ...]:
    sink = partial(unlisted, section="sink", when=when)
    of_row, beside = ("\nof row", " (of row)") if suffix else ("", "")
    return (
        sink(
            f"sink_mass{suffix}",
            ("layer", "head"),
            label="sink mass" + mark,
            definition=f"Mean attention of the queries after the first on position 0{of_rows} (definitions §5).",
            symbol="mass of row" if suffix else "mass",
            scalar="mean",
            per_block="mean",
            control="sink_uniform",
            control_label="uniform",
            over_training=Column("sink mass" + beside, 8, 2, text_heading="sink mass on text" + beside),
            by_block=Column("sink\nmass" + of_row, 4, 0),
        ),
        sink(
            f"sink_mass{suffix}_max",
            label="sink mass of the largest head" + mark,
            definition=f"Sink mass of the head that has most of it{of_rows} (definitions §5).",
            symbol="mass of row" if suffix else "mass",
            of=f"sink_mass{suffix}",
            per_block="max",
            control="sink_uniform",
            control_label="uniform",
            by_block=Column("most in\na head" + of_row, 5, 1),
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
            over_training=Column("sink rate %" + beside, 9, page_only=True),
            by_block=Column("sink\nrate %" + of_row, 6, 6),
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


SINKS = (
    unlisted(
        "sink_uniform",
        label="uniform attention",
        definition="The sink mass that uniform attention would have (definitions §5).",
        section="sink",
    ),
    unlisted(
        "sink_epsilon",
        label="ε",
        definition="ε of the sink rate (definitions §5).",
        format="g",
        section="sink",
    ),
    unlisted(
        "sink_epsilons",
        ("epsilon",),
        label="ε",
        definition="Further values of ε: 0.1, 0.2, … 0.9 (definitions §5).",
        format="g",
        section="sink",
    ),
    *_sinks("", "", "", ""),
    *_sinks("_normalised", " (share of the row)", ", of weights over their row's sum", ROWS_NOT_ONE),
)

_IN_TEXT = "documents begin inside the sequences of a run's own text probe"
DOCUMENT_SINKS = (
    unlisted(
        "document_sink_uniform",
        label="uniform attention within documents",
        definition="The document sink mass of attention that is uniform over a query's own document (definitions §5).",
        section="sink",
        when=_IN_TEXT,
    ),
    unlisted(
        "document_sink_documents",
        label="documents that begin inside",
        definition="Documents that the document sink mass is of (definitions §5).",
        format=",d",
        section="sink",
        when=_IN_TEXT,
    ),
    *(
        unlisted(
            f"document_sink_mass{suffix}",
            ("layer", "head"),
            label="document sink mass" + mark,
            definition="Mean attention of the queries behind a document's first token on that token"
            f"{of_rows}, of documents that begin behind position 0 (definitions §5).",
            section="sink",
            symbol="mass of row" if suffix else "mass",
            scalar="mean",
            per_block="mean",
            control="document_sink_uniform",
            control_label="uniform within the document",
            when=when,
        )
        for suffix, mark, of_rows, when in (
            ("", "", "", _IN_TEXT),
            (
                "_normalised",
                " (share of the row)",
                ", of weights over their row's sum",
                f"{_IN_TEXT} and {ROWS_NOT_ONE}",
            ),
        )
    ),
)


# ---------------------------------------------------------------- heads and single sequences
# Anatomy of a sink, in heads and in single sequences (definitions §13).

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
            definition=f"Mean norm of the {kind} that gets most attention in each sequence and head, among those that "
            f"a quarter of the queries see, over that of the other {several} (definitions §13).",
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
        definition="Mean entropy of a query's weights over their row's sum, over sequences and queries, of which "
        "at most 64 are taken, evenly spaced (definitions §13).",
        unit="nats",
        symbol="entropy",
        scalar="mean",
        control="attention_entropy_uniform",
        control_label="uniform",
    ),
    _per_head(
        "largest_logit",
        label="largest attention logit",
        definition="Largest score of any query of the head on a key that it sees, scaled, before the softmax "
        "(definitions §13).",
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


# ---------------------------------------------------------------- effects of adapters on a model (definitions §12)

PREFIX_MASS = (
    Quantity(
        "prefix_mass",
        ("layer", "head"),
        label="mass on the prefix",
        definition="Mean attention of the queries after the first on all keys of an adapter's prefix, which are no "
        "position: the sink mass leaves them out (definitions §12).",
        section="sink",
        symbol="mass",
        scalar="mean",
        per_block="mean",
        when="the model has an adapter with a prefix",
        over_training=None,
        by_block=None,
    ),
)
