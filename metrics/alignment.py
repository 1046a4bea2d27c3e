"""Mean direction of hidden states, and how they lie along a reference direction (definitions §3) [BB]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .additive import AdditiveMetric


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
        last_BD = h_BTD[:, -1].double()
        norm_B = torch.linalg.vector_norm(last_BD, dim=-1)
        self.hidden_sum[place].add_(last_BD.sum(0))
        # Finite where a vector is 0, so that its unit vector is 0.
        self.unit_sum[place].add_(torch.mv(last_BD.T, norm_B.clamp_min(torch.finfo(norm_B.dtype).tiny).reciprocal_()))
        self.energy_along[:, place].add_((last_BD @ self.references[:, place].T).square_().sum(0))
        self.energy[place].add_(norm_B.square_().sum())
        self.n_sequences[place].add_(len(last_BD))

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
