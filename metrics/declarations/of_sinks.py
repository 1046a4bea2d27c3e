"""Attention sinks, of sequences and of documents (definitions §5)."""

from __future__ import annotations

from functools import partial

from ..quantity import Column, Quantity
from .unlisted import ROWS_NOT_ONE, unlisted


def _sinks(suffix: str, mark: str, of_rows: str, when: str) -> tuple[Quantity, ...]:
    sink = partial(unlisted, section="sink", when=when)
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
    *_sinks("_normalised", " (normalised)", ", of weights over their row's sum", ROWS_NOT_ONE),
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
            symbol="mass",
            scalar="mean",
            per_block="mean",
            control="document_sink_uniform",
            control_label="uniform within the document",
            when=when,
        )
        for suffix, mark, of_rows, when in (
            ("", "", "", _IN_TEXT),
            ("_normalised", " (normalised)", ", of weights over their row's sum", f"{_IN_TEXT} and {ROWS_NOT_ONE}"),
        )
    ),
)
