"""Outliers of activations: what makes low-bit arithmetic expensive (arXiv 2306.12929)."""

from __future__ import annotations

from .link import Link

OUTLIERS = Link(
    "outliers",
    "Outliers",
    "Kurtosis of activations, 3 for a normal distribution; their ∞-norm; and the share of channels with a value more "
    "than 6 standard deviations from the mean. By position: which tokens make the kurtosis.",
    quantities=(
        # Tables have these.
        *(f"{place}_kurtosis_published" for place in ("residual", "attention", "mlp")),
        *(f"{place}_{what}" for place in ("attention", "mlp") for what in ("inf_norm", "outlier_channels")),
        "residual_inf_norm_by_position",
    ),
    optional=True,
)
