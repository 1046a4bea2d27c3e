"""Outliers of the residual stream and of the outputs of attentions and MLPs (definitions §14)."""

from __future__ import annotations

from functools import partial

from ..quantity import AxisName, Quantity
from .unlisted import unlisted

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
