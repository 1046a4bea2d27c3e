"""Norms of the loss gradient, in snapshots that hold them (definitions §16)."""

from __future__ import annotations

from functools import partial

from ..quantity import Column
from .unlisted import unlisted

_ASKED = "`snapshot.gradients` asks for it"
_gradient = partial(unlisted, section="gradient", format=".3g", when=_ASKED)
_ratio = partial(_gradient, format="ratio", scale="log", control=1.0, control_label="no difference")

GRADIENTS = (
    _gradient(
        "gradient_loss",
        label="loss on the probe",
        definition="Next-token loss on the probe, mean over its targets: what is differentiated (definitions §16).",
        unit="nats",
        format=".3f",
    ),
    _ratio(
        "gradient_sink",
        ("state",),
        label="gradient at position 0",
        definition="Norm of the loss gradient by the residual stream at position 0, over the mean of the others "
        "that predict; as a scalar of the place where it is largest (definitions §16).",
        symbol="first/others",
        scalar="max",
        by_block=Column("grad.\nsink", 14, 2),
    ),
    *(
        _ratio(
            f"gradient_sink_{place}",
            ("layer", "head"),
            label=f"gradient of {place} 0",
            definition=f"Norm of the loss gradient by the {place} of position 0, over the mean of the others; as a "
            "scalar the mean over layers and heads (definitions §16).",
            symbol="first/others",
            scalar="mean",
            per_block="mean",
        )
        for place in ("key", "value")
    ),
    _gradient(
        "gradient_mlp",
        ("state", "position"),
        label="gradient after the MLP",
        definition="Norm of the loss gradient by the residual stream after each MLP, and by the embeddings (0), mean "
        "over sequences; NaN at the last position, which predicts nothing (definitions §16).",
        scale="log",
    ),
    _gradient(
        "gradient_attention",
        ("layer", "position"),
        label="gradient after attention",
        definition="Norm of the loss gradient by the residual stream after each attention, mean over sequences; NaN at "
        "the last position (definitions §16).",
        scale="log",
    ),
    *(
        _gradient(
            f"gradient_{place}",
            ("layer", "head", "position"),
            label=f"gradient by {plural}",
            definition=f"Norm of the loss gradient by the {plural} of every query head, mean over sequences; NaN at "
            f"the last position (definitions §16).",
            scale="log",
        )
        for place, plural in (("query", "queries"), ("key", "keys"), ("value", "values"))
    ),
)
"""Quantities that ``measure/backward`` takes from a pass of their own."""
