"""Quantities of outliers of activations (definitions §14) and of norms of the loss gradient (definitions §16)."""

from __future__ import annotations

from functools import partial

from ..quantity import AxisName, Column, Quantity, unlisted

_outliers = partial(unlisted, section="outliers")
_PLACES: tuple[tuple[str, AxisName, str, str], ...] = (
    ("residual", "state", "the residual stream", "residual stream"),
    ("attention", "layer", "what attention gives", "attention"),
    ("mlp", "layer", "what the MLP gives", "MLP"),
)


def _of_place(place: str, axis: AxisName, what: str, label: str) -> tuple[Quantity, ...]:
    return (
        _outliers(
            f"{place}_kurtosis",
            (axis,),
            label=f"kurtosis, {label}",
            definition=f"Kurtosis of a sequence's activations of {what}, mean over sequences; as a scalar where it is "
            "largest (definitions §14).",
            format=".3g",
            symbol="kurtosis",
            scale="log",
            scalar="max",
            control=3.0,
            control_label="normal distribution",
        ),
        _outliers(
            f"{place}_inf_norm",
            (axis,),
            label=f"∞-norm, {label}",
            definition=f"Largest absolute activation of a sequence of {what}, mean over sequences; as a scalar where "
            "it is largest (definitions §14).",
            format=".3g",
            scale="log",
            scalar="max",
        ),
        _outliers(
            f"{place}_outlier_channels",
            (axis,),
            label=f"outlier channels, {label}",
            definition=f"Share of the channels of {what} with a value more than 6 standard deviations from the "
            "sequence's mean, mean over sequences; as a scalar where it is largest (definitions §14).",
            format="percent",
            scalar="max",
        ),
        _outliers(
            f"{place}_kurtosis_published",
            (axis,),
            label=f"kurtosis as published, {label}",
            definition=f"The kurtosis of {what} with the published code's 10⁻⁶ added to σ⁴, which makes it smaller "
            "where activations are (definitions §14).",
            format=".3g",
            scale="log",
        ),
    )


ACTIVATION_OUTLIERS = (
    *(quantity for place in _PLACES for quantity in _of_place(*place)),
    _outliers(
        "residual_kurtosis_by_position",
        ("state", "position"),
        label="share of the kurtosis",
        definition="What each position contributes to the kurtosis of the residual stream, which is its mean over "
        "positions (definitions §14).",
        format=".3g",
        scale="log",
    ),
    _outliers(
        "residual_inf_norm_by_position",
        ("state", "position"),
        label="∞-norm by position",
        definition="Largest absolute value of the residual stream at each position, mean over sequences "
        "(definitions §14).",
        format=".3g",
        scale="log",
    ),
)


# ---------------------------------------------------------------- norms of the loss gradient
# Norms of the loss gradient, in snapshots that hold them (definitions §16).

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
"""Quantities that ``measure/gradients.py`` takes from a pass of their own."""
