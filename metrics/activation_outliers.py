"""Outliers of activations: kurtosis, ∞-norm, and channels far from all others (definitions §14).

Kurtosis and ∞-norm are those of the evaluation that Bondarenko, Nagel & Blankevoort (arXiv 2306.12929) published with
their code: taken over a sequence's whole activation tensor, averaged over sequences.

Legend: B sequences, T positions, D width; P places: the residual stream (L+1), attentions (L), MLPs (L).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .quantity import Sizes
from .summed_metrics import AdditiveMetric, largest_size

#: Standard deviations from the mean from which on an activation is an outlier (arXiv 2306.12929, §3).
OUTLIER_SIGMAS = 6.0
#: Term that the published code adds to σ⁴.
PUBLISHED_EPS = 1e-6
#: Endings of the names of the quantities that every sequence gives a number for.
_PER_SEQUENCE = ("kurtosis", "kurtosis_published", "inf_norm", "outlier_channels")
#: On the CPU: elements that are looked at together. Smaller blocks are no quicker, and several threads wait for each
#: other at every step.
_CACHED = 1 << 20
#: Elsewhere: for little memory.
_TOGETHER = 1 << 26


class SequenceMoments(NamedTuple):
    """Moments of each sequence's activations ``[T, D]``, taken as one sample of T·D numbers; float64, extremes in the
    inputs' type.
    """

    std_B: Tensor
    """Standard deviation, over T·D − 1 as in the published code."""
    fourth_BT: Tensor
    """Mean of ``(x − μ)⁴`` over the channels of each position, μ that of the sequence."""
    largest_BT: Tensor
    """``max |x|`` over channels."""
    away_BD: Tensor
    """``max |x − μ|`` over positions."""


class SequenceSums(NamedTuple):
    """Sums and extremes about each sequence's mean, as a pass over its activations gives them; float32 or wider.
    Dimensions may precede B.
    """

    second_BT: Tensor
    """``Σ (x − μ)²`` over the channels of each position."""
    fourth_root_BT: Tensor
    """``√Σ (x − μ)⁴`` over the channels of each position."""
    largest_BT: Tensor
    """``max |x|`` over channels, in the inputs' type."""
    away_squared_BD: Tensor
    """``max (x − μ)²`` over positions."""

    def moments(self) -> SequenceMoments:
        """Compute the moments."""
        length, width = self.second_BT.shape[-1], self.away_squared_BD.shape[-1]
        variance_B = self.second_BT.sum(-1, dtype=torch.float64) / (length * width - 1)
        fourth_BT = self.fourth_root_BT.square().double() / width
        largest_BT = self.largest_BT.to(self.second_BT.dtype)
        return SequenceMoments(variance_B.sqrt(), fourth_BT, largest_BT, self.away_squared_BD.sqrt())


def sequence_sums(x_BTD: Tensor) -> SequenceSums:
    """Compute sums about each sequence's mean, and extremes. Reads the activations once for the mean, and once more a
    block at a time.
    """
    _, length, width = x_BTD.shape
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    mean_B11 = x_BTD.mean((1, 2), dtype=wide, keepdim=True)
    n_tokens = max((_CACHED if x_BTD.device.type == "cpu" else _TOGETHER) // width, 1)
    n_together, n_rows = max(n_tokens // length, 1), min(n_tokens, length)
    of_sequences = []
    for some_BTD, mean in zip(x_BTD.split(n_together), mean_B11.split(n_together), strict=True):
        of_rows = []
        for x in some_BTD.split(n_rows, dim=1):
            # (x − μ)² in one operator, which keeps no difference.
            square = F.mse_loss(x.to(wide), mean.expand_as(x), reduction="none")
            fourth_root = torch.linalg.vector_norm(square, dim=-1)
            of_rows.append((square.sum(-1), fourth_root, largest_size(x, -1), square.amax(1, keepdim=True)))
        of_sequences.append([_joined(parts, 1) for parts in zip(*of_rows, strict=True)])
    second_BT, root_BT, largest_BT, away_BRD = (_joined(parts, 0) for parts in zip(*of_sequences, strict=True))
    return SequenceSums(second_BT, root_BT, largest_BT, away_BRD.amax(1) if away_BRD.shape[1] > 1 else away_BRD[:, 0])


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class ActivationOutliers(AdditiveMetric):
    """Kurtosis, ∞-norm and outlier channels of the residual stream and of the outputs of attentions and MLPs.

    A sequence is whole in a batch, so each gives its numbers at once, and states are sums of them: additive over
    batches and ranks. Without variance the kurtosis counts as 0.

    Args:
        sizes: sizes of the model and the probe.
    """

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

    def residual(self, site: str, layer: int, h_BTD: Tensor) -> None:
        """See models/observe.py."""
        if site != "attention":
            self.update(layer, h_BTD)

    def sublayer(self, site: Literal["attention", "mlp"], layer: int, x_BTD: Tensor) -> None:
        """See models/observe.py."""
        self.update(self.n_layers * (1 if site == "attention" else 2) + layer, x_BTD)

    def update(self, place: int, x_BTD: Tensor) -> None:
        """Add a batch of activations ``[B, T, D]`` seen at one place: states from 0, then attentions, then MLPs."""
        if len(x_BTD) == 0:
            return
        self.keep(place, *sequence_sums(x_BTD))

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
