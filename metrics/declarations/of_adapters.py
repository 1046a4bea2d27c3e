"""Effects of adapters on a model (definitions §12)."""

from __future__ import annotations

from ..quantity import Quantity

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
