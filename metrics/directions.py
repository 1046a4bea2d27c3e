"""Directions of hidden states: their mean, how they lie along a reference, how they contract (definitions §3) [BB]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .activation_sums import ActivationSums, inverse_norms
from .summed_metrics import AdditiveMetric


class AlignmentResult(NamedTuple):
    """Float64; ``S`` places, ``R`` reference directions."""

    alignment: np.ndarray
    """``[R, S]`` mean cosine of hidden states with each reference."""
    drift: np.ndarray
    """``[R, S]`` cosine between today's mean direction and each reference."""
    energy_share: np.ndarray
    """``[R, S]`` ``E[(h·s)²] / E[‖h‖²]``; its chance level is 1/d."""
    mean_direction: np.ndarray
    """``[S, d]`` normalised mean hidden state; at birth this is the seed direction."""


class SeedAlignment(AdditiveMetric):
    """Mean direction, and alignment with reference directions, of the last position at several places.

    Args:
        references: unit vectors ``[R, S, d]``: the seed direction of the model's own birth, any strangers' after it.
            ``R = 0`` measures the mean direction alone, which is how a seed direction is found in the first place.

    A vector of zeros has no direction: its cosine with any other counts as 0. States are sums: additive over batches
    and ranks.
    """

    references: Tensor
    hidden_sum: Tensor
    unit_sum: Tensor
    energy_along: Tensor
    energy: Tensor
    n_sequences: Tensor

    def __init__(self, references: Tensor) -> None:
        super().__init__()
        n_references, n_places, d_model = references.shape
        self.register_buffer("references", references.double(), persistent=False)
        self.add_sums(
            hidden_sum=(n_places, d_model),
            unit_sum=(n_places, d_model),
            energy_along=(n_references, n_places),
            energy=(n_places,),
            n_sequences=(n_places,),
        )

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place; the last position is read."""
        self.keep(place, h_BTD[:, -1].clone())

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        last_PBD = tensors_P[0].double()
        norm_PB = torch.linalg.vector_norm(last_PBD, dim=-1)
        self.hidden_sum[places].add_(last_PBD.sum(1))
        self.unit_sum[places].add_(torch.bmm(inverse_norms(norm_PB)[:, None], last_PBD)[:, 0])
        along_PBR = torch.bmm(last_PBD, self.references[:, places].permute(1, 2, 0))
        self.energy_along[:, places].add_(along_PBR.square_().sum(1).T)
        self.energy[places].add_(norm_PB.square_().sum(1))
        self.n_sequences[places].add_(last_PBD.shape[1])

    def compute(self) -> AlignmentResult:
        """Return the mean direction, and alignment, drift and energy share for every reference."""
        direction_SD = F.normalize(self.hidden_sum, dim=-1, eps=0.0)
        result = (
            torch.einsum("rsd,sd->rs", self.references, self.unit_sum / self.n_sequences[:, None]),
            torch.einsum("rsd,sd->rs", self.references, direction_SD),
            self.energy_along / self.energy,
            direction_SD,
        )
        return AlignmentResult(*(value.cpu().numpy() for value in result))


# ---------------------------------------------------------------- contraction
# Contraction of hidden states, across sequences and within them (definitions §3) [BB].


class ContractionResult(NamedTuple):
    """Mean cosines per place, float64 ``[S]``."""

    inter: np.ndarray
    intra: np.ndarray


def mean_pair_cosine(unit_sum_D: Tensor, n: Tensor | int, n_directed: Tensor | int | None = None) -> Tensor:
    """Compute the mean cosine over ordered pairs of different vectors, from the sum of their unit vectors ``[…, d]``.

    ``(‖Σu‖² − Σ‖u‖²) / (n(n−1))``, NaN for fewer than two vectors.

    Args:
        unit_sum_D: ``Σu``.
        n: number of vectors.
        n_directed: number of vectors that are not 0; default: all. A zero vector has no direction: ``u = 0``, and its
            cosine with any other counts as 0.
    """
    pairs = unit_sum_D.double().square().sum(-1) - (n if n_directed is None else n_directed)
    if isinstance(n, int):
        return pairs / (n * (n - 1)) if n > 1 else torch.full_like(pairs, torch.nan)
    return (pairs / (n * (n - 1))).masked_fill(n < 2, torch.nan)


class Contraction(AdditiveMetric):
    """Inter- and intra-sequence contraction at ``n_places`` places of the residual stream.

    ``inter``: mean cosine over pairs of different sequences at the last position. ``intra``: mean cosine over pairs of
    different positions of one sequence, averaged over sequences; NaN where sequences have a single position. A vector
    of zeros, as a padding token's embedding is, has no direction: its cosine with any other counts as 0. States are
    sums: additive over batches and ranks.
    """

    inter_sum: Tensor
    intra_sum: Tensor
    n_sequences: Tensor
    n_directed: Tensor

    def __init__(self, n_places: int, d_model: int) -> None:
        super().__init__()
        self.add_sums(
            inter_sum=(n_places, d_model), intra_sum=(n_places,), n_sequences=(n_places,), n_directed=(n_places,)
        )

    def update(self, place: int, h_BTD: Tensor | ActivationSums) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        sums = ActivationSums.of(h_BTD)
        last_D = (sums.x_BTD[:, -1] * sums.inverse_norm[:, -1:]).sum(0)
        self.keep(place, last_D, sums.unit_sum, sums.norm)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        last_PD, unit_sum_PBD, norm_PBT = tensors_P
        length_P = torch.linalg.vector_norm(unit_sum_PBD, dim=(1, 2), dtype=torch.float64)
        _, n_sequences, n_positions = norm_PBT.shape
        # All sequences' ‖Σu‖² − Σ‖u‖² together.
        products_P = length_P.square() - norm_PBT.count_nonzero((1, 2))
        self.inter_sum[places].add_(last_PD)
        self.intra_sum[places].add_(products_P / (n_positions * (n_positions - 1) or torch.nan))
        self.n_sequences[places].add_(n_sequences)
        self.n_directed[places].add_(norm_PBT[..., -1].count_nonzero(1))

    def compute(self) -> ContractionResult:
        """Return inter- and intra-sequence contraction at every place."""
        n = self.n_sequences
        inter = mean_pair_cosine(self.inter_sum, n, self.n_directed)
        return ContractionResult(inter.cpu().numpy(), (self.intra_sum / n).cpu().numpy())
