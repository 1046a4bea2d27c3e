"""Outliers of activations: kurtosis, ∞-norm, and channels far from all others (definitions §14).

Kurtosis and ∞-norm are those of the evaluation that Bondarenko, Nagel & Blankevoort (arXiv 2306.12929) published with
their code: taken over a sequence's whole activation tensor, averaged over sequences.

Legend: B sequences, T positions, D width; P places: the residual stream (L+1), attentions (L), MLPs (L).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .activation_sums import ActivationSums, SequenceSums
from .quantity import Sizes
from .summed_metrics import AdditiveMetric

#: Standard deviations from the mean from which on an activation is an outlier (arXiv 2306.12929, §3).
OUTLIER_SIGMAS = 6.0
#: Term that the published code adds to σ⁴.
PUBLISHED_EPS = 1e-6
#: Endings of the names of the quantities that every sequence gives a number for.
_PER_SEQUENCE = ("kurtosis", "kurtosis_published", "inf_norm", "outlier_channels")


class ActivationOutliers(AdditiveMetric):
    """Kurtosis, ∞-norm and outlier channels of the residual stream and of the outputs of attentions and MLPs.

    A sequence is whole in a batch, so each gives its numbers at once, and states are sums of them: additive over
    batches and ranks. Without variance the kurtosis counts as 0.

    Args:
        sizes: sizes of the model and the probe.
    """

    takes_sums = True
    sequence_sums: Tensor
    n_sequences: Tensor
    position_kurtosis_sum: Tensor
    position_largest_sum: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.n_layers, n_states = sizes.n_layers, sizes.n_layers + 1
        n_places = n_states + 2 * sizes.n_layers
        self.add_sums(
            sequence_sums=(len(_PER_SEQUENCE), n_places),
            n_sequences=(n_places,),
            position_kurtosis_sum=(n_states, sizes.seq_len),
            position_largest_sum=(n_states, sizes.seq_len),
        )

    def residual(self, site: str, layer: int, h_BTD: Tensor | ActivationSums) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.update(layer, h_BTD)

    def sublayer(self, site: Literal["attention", "mlp"], layer: int, x_BTD: Tensor | ActivationSums) -> None:
        """See models/observe.py."""
        self.update(self.n_layers * (1 if site == "attention" else 2) + layer, x_BTD)

    def update(self, place: int, x_BTD: Tensor | ActivationSums) -> None:
        """Add a batch of activations ``[B, T, D]`` seen at one place: states from 0, then attentions, then MLPs."""
        sums = ActivationSums.of(x_BTD)
        if len(sums.x_BTD):
            self.keep(place, *sums.about_mean())

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        std_PB, fourth_PBT, largest_PBT, away_PBD = SequenceSums(*tensors_P).moments()
        is_outlier_PBD = away_PBD > OUTLIER_SIGMAS * std_PB[..., None]
        fourth_power_PB = std_PB.square().square()
        kurtosis_PBT = (fourth_PBT / fourth_power_PB[..., None]).masked_fill_(std_PB[..., None] == 0, 0.0)
        # In the order of _PER_SEQUENCE.
        numbers = (
            kurtosis_PBT.mean(2),
            fourth_PBT.mean(2) / (fourth_power_PB + PUBLISHED_EPS),
            largest_PBT.amax(2),
            is_outlier_PBD.sum(2, dtype=torch.float64) / is_outlier_PBD.shape[2],
        )
        self.sequence_sums[:, places].add_(torch.stack(numbers).sum(2))
        self.n_sequences[places].add_(std_PB.shape[1])
        # Places of the residual stream come first.
        n_states = max(min(places.stop, self.n_layers + 1) - places.start, 0)
        states = slice(places.start, places.start + n_states)
        self.position_kurtosis_sum[states].add_(kurtosis_PBT[:n_states].sum(1))
        self.position_largest_sum[states].add_(largest_PBT[:n_states].sum(1, dtype=torch.float64))

    def compute(self) -> dict[str, np.ndarray]:
        """Return means over sequences; NaN for places without data."""
        found: dict[str, np.ndarray] = {}
        states = slice(0, self.n_layers + 1)
        places = {"residual": states}
        places["attention"] = slice(states.stop, states.stop + self.n_layers)
        places["mlp"] = slice(states.stop + self.n_layers, None)
        for what, sums in zip(_PER_SEQUENCE, self.sequence_sums, strict=True):
            mean_P = (sums / self.n_sequences).cpu().numpy()
            found |= {f"{place}_{what}": mean_P[part] for place, part in places.items()}
        n_S1 = self.n_sequences[states, None]
        found["residual_kurtosis_by_position"] = (self.position_kurtosis_sum / n_S1).cpu().numpy()
        found["residual_inf_norm_by_position"] = (self.position_largest_sum / n_S1).cpu().numpy()
        return found
