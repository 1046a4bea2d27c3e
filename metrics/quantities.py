"""Declarations of all quantities of snapshots and of the training log, each once (docs/quantities.md is made of it).

A new quantity is a metric, its declaration in ``declarations/`` and a row of `METRICS`: a metric's key is
``module:Class`` in this folder, and its class observes the pass itself (docs/extending.md). Keys without a class are
those that ``measure/builtin_metrics.py`` feeds.
Names, and their order in ``summary.json``, are a file format. Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .declarations.outliers_and_gradients import ACTIVATION_OUTLIERS, GRADIENTS
from .declarations.seed_mark import AT_BIRTH, COMPARED_WITH_BIRTH, CONTRACTION, PREFERENCE
from .declarations.sink_causes import AGGREGATION, EXPERT_UNITS, EXPERTS, LOCK, NEURONS, STATES
from .declarations.sinks import DOCUMENT_SINKS, HEAD_ENTROPY, KEY_VALUE_NORMS, PREFIX_MASS, SEQUENCE_SINKS, SINKS
from .declarations.training_log import LOGGED
from .quantity import Column, Quantity

__all__ = [
    "LOGGED",
    "MEASURED",
    "METRICS",
    "SECTIONS",
    "SHARES",
    "ChainPlace",
    "by_block",
    "is_shown",
    "over_training",
    "quantities_of",
    "shown_name",
]


@dataclass(frozen=True)
class ChainPlace:
    """Place of a section of the pages: in the attention sink's causal chain, or in the seed's mark below it."""

    part: Literal["chain", "mark"]
    headline: str
    """The scalar that says most of it in one number; "" for none."""


SECTIONS: Mapping[str, ChainPlace] = {
    "aggregation": ChainPlace("chain", "variance_discrepancy"),
    "neurons": ChainPlace("chain", "super_neurons"),
    "dominance": ChainPlace("chain", "dominance_first"),
    "lock": ChainPlace("chain", "qk_cosine"),
    "sink": ChainPlace("chain", "sink_mass"),
    "outliers": ChainPlace("chain", "residual_kurtosis"),
    "gradient": ChainPlace("chain", "gradient_sink"),
    "direction": ChainPlace("mark", "alignment"),
    "contraction": ChainPlace("mark", "inter"),
    "preference": ChainPlace("mark", "preference_ratio"),
    "persistence": ChainPlace("mark", "rank_persistence"),
    "lineage": ChainPlace("mark", ""),
}
"""Sections in causal order."""

METRICS: Mapping[str, tuple[Quantity, ...]] = {
    "contraction": CONTRACTION,
    "preference": PREFERENCE,
    "birth": COMPARED_WITH_BIRTH,
    "sinks": SINKS,
    "document_sinks": DOCUMENT_SINKS,
    "aggregation": AGGREGATION,
    "neurons": NEURONS,
    "experts:ExpertShares": EXPERTS,
    "experts:ExpertUnits": EXPERT_UNITS,
    "states": STATES,
    "lock": LOCK,
    "heads:KeyValueNorms": KEY_VALUE_NORMS,
    "heads:HeadEntropy": HEAD_ENTROPY,
    "heads:SequenceSinks": SEQUENCE_SINKS,
    "activation_outliers:ActivationOutliers": ACTIVATION_OUTLIERS,
    "heads:PrefixMass": PREFIX_MASS,
}
"""Quantities of each metric. The order is that of ``summary.json``."""

MEASURED: Mapping[str, Quantity] = {q.name: q for qs in (*METRICS.values(), AT_BIRTH, GRADIENTS) for q in qs}
"""Quantities of a snapshot by name."""

SHARES: Mapping[str, str] = {name.replace("_normalised", ""): name for name in MEASURED if "_normalised" in name}
"""Quantity of attention weights → the same of weights over their row's sum."""


def shown_name(name: str, measured: Container[str], prefix: str = "") -> str:
    """Return the name under which to read a quantity for a person: that of weights over their row's sum if it was
    measured, since only a share can be judged against uniform attention, and compared with a share of another model.

    Args:
        name: name of the quantity.
        measured: names of what was measured.
        prefix: prefix that names of its probe have there.
    """
    share = prefix + SHARES.get(name, name)
    return share if share in measured else prefix + name


def is_shown(key: str, measured: Container[str]) -> bool:
    """Return False for raw weights beside the same as a share of their row, also of a text probe (``text_…``)."""
    prefix = "text_" if key.startswith("text_") else ""
    return shown_name(key.removeprefix(prefix), measured, prefix) == key


def quantities_of(summary: Mapping[str, Any]) -> dict[str, Quantity]:
    """Return all quantities that a snapshot may hold, by name: built-in ones, and those that the user's metrics
    declared in it.

    Args:
        summary: summary of the snapshot.

    Raises:
        ValueError: the metric's declarations are damaged.
    """
    return {**MEASURED, **{q.name: q for q in map(Quantity.from_json, summary.get("quantities") or ())}}


def over_training(quantities: Iterable[Quantity]) -> list[tuple[Quantity, Column]]:
    """Select the scalars that the table of snapshots shows, from left to right."""
    shown = [(q, q.over_training) for q in quantities if q.has_scalar and q.over_training is not None]
    return sorted(shown, key=lambda pair: pair[1].place)


def by_block(quantities: Iterable[Quantity]) -> list[tuple[Quantity, Column]]:
    """Select the quantities that the table of blocks shows, from left to right: those whose array has a number for each
    block.
    """
    every = list(quantities)
    n_axes = {q.name: len(q.axes) for q in every if q.axes[:1] in (("layer",), ("state",))}
    reduced = [q for q in every if q.array in n_axes and (q.per_block or n_axes[q.array] == 1)]
    shown = [(q, q.by_block) for q in reduced if q.by_block is not None]
    return sorted(shown, key=lambda pair: pair[1].place)
