"""Contraction of hidden states, across sequences and within them (definitions §3) [BB]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class ContractionResult(NamedTuple):
    """Mean cosines per place, float64 ``[S]``."""

    inter: np.ndarray
    intra: np.ndarray


def mean_pair_cosine(unit_sum_D: Tensor, n: Tensor | int) -> Tensor:
    """Mean cosine over ordered pairs of different vectors, from the sum of ``n`` unit vectors ``[…, d]``.

    ``(‖Σu‖² − n) / (n(n−1))``; NaN for fewer than two vectors.
    """
    squared_norm = unit_sum_D.double().square().sum(-1)
    if isinstance(n, int):
        return (squared_norm - n) / (n * (n - 1)) if n > 1 else torch.full_like(squared_norm, torch.nan)
    return ((squared_norm - n) / (n * (n - 1))).masked_fill(n < 2, torch.nan)


class Contraction(Metric):
    """Inter- and intra-sequence contraction at ``n_places`` places of the residual stream.

    ``inter``: mean cosine over pairs of different sequences at the last position. ``intra``: mean cosine over pairs of
    different positions of one sequence, averaged over sequences; NaN where sequences have a single position. States are
    sums: additive over batches and ranks.
    """

    full_state_update = False
    inter_sum: Tensor
    intra_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_places: int, d_model: int) -> None:
        super().__init__()
        self.add_state("inter_sum", torch.zeros(n_places, d_model, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("intra_sum", torch.zeros(n_places, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_sequences", torch.zeros(n_places, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, place: int, h_BTD: Tensor) -> None:
        """Add a batch of hidden states ``[B, T, d]`` seen at one place."""
        h_BTD = h_BTD.to(torch.promote_types(h_BTD.dtype, torch.float32))
        n_sequences, n_positions, _ = h_BTD.shape
        inverse_norm_BT = torch.linalg.vector_norm(h_BTD, dim=-1).reciprocal()
        with torch.autocast(h_BTD.device.type, enabled=False):
            unit_sum_BD = torch.matmul(inverse_norm_BT[:, None], h_BTD)[:, 0]
        last_BD = h_BTD[:, -1] * inverse_norm_BT[:, -1:]
        self.inter_sum[place].add_(last_BD.sum(0, dtype=torch.float64))
        self.intra_sum[place].add_(mean_pair_cosine(unit_sum_BD, n_positions).sum())
        self.n_sequences[place].add_(n_sequences)

    def compute(self) -> ContractionResult:
        """Both contractions at every place."""
        n = self.n_sequences
        return ContractionResult(mean_pair_cosine(self.inter_sum, n).cpu().numpy(), (self.intra_sum / n).cpu().numpy())
