"""Effective rank of places that are passed in turn: only one place's state is held at a time (definitions §7)."""

from __future__ import annotations

import torch
from torch import Tensor

from .states import EffectiveRank, RankResult, rank_result


class RankOfPlaces:
    """:class:`~birthmark.metrics.states.EffectiveRank` for places that are complete before the next one begins.

    Holds ``d²/2`` float64 once, not once per place. For fewer vectors than half the width it takes the matrix of their
    inner products, ``X Xᵀ`` in float64, which has the same nonzero eigenvalues: it is smaller, and it keeps zero
    singular values exactly zero.

    Args:
        n_places: places, in the order in which they are passed.
        d_model: width of the hidden states.
    """

    def __init__(self, n_places: int, d_model: int) -> None:
        self.d_model = d_model
        self.few: list[Tensor] = []
        """Vectors ``[n, d]`` of the place that is being passed, while there are few."""
        self.many: EffectiveRank | None = None
        """Second moment of the vectors, once there are many."""
        self.eigenvalues_SD = torch.zeros(n_places, d_model, dtype=torch.float64, device="cpu")
        self.n_vectors_S = torch.zeros(n_places, dtype=torch.float64, device="cpu")

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        n_vectors = h_BTD.shape[:-1].numel()
        self.n_vectors_S[place] += n_vectors
        if self.many is None and self.n_vectors_S[place] * 2 <= self.d_model:
            self.few.append(h_BTD.flatten(0, 1).clone())
            return
        if self.many is None:
            self.many = EffectiveRank(1, self.d_model).to(h_BTD.device)
            for x_ND in self.few:
                self.many.update(0, x_ND[None])
            self.few = []
        self.many.update(0, h_BTD)

    def passed(self, place: int) -> None:
        """Take the eigenvalues of a place that is whole, and let go of its vectors."""
        if self.many is not None:
            self.eigenvalues_SD[place] = self.many.eigenvalues()[0].cpu()
        elif self.few:
            x_ND = torch.cat(self.few).double()
            self.eigenvalues_SD[place, : len(x_ND)] = torch.linalg.eigvalsh(x_ND @ x_ND.T).flip(0).cpu()
        self.few, self.many = [], None

    def compute(self) -> RankResult:
        """Return effective rank and singular values of every place that was passed."""
        return rank_result(self.eigenvalues_SD, self.n_vectors_S)
