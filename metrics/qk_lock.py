"""How the first key lies to a head's queries (definitions §7) [SO]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .additive import AdditiveMetric
from .threads import each_on_one_core

_TINY = torch.finfo(torch.float64).tiny


def _first_direction(moment_HKK: Tensor) -> Tensor:
    return torch.linalg.eigh(moment_HKK).eigenvectors[..., -1]


class LockResult(NamedTuple):
    """Float64 ``[L, H]``; ``u`` is the first principal direction of the head's queries, a unit vector."""

    cosine: np.ndarray
    """Root of the mean over sequences of ``cos²(k_0, u)``: free of u's sign. Directions without relation give
    ``1/√d_head``."""
    signed: np.ndarray
    """Mean over sequences of ``cos(k_0, u)``, u on the side of the mean query: negative where k_0 repels."""
    positive: np.ndarray
    """Share of the queries t ≥ 1 with ``q_t·k_0 > 0``, k_0 of the same sequence; NaN where there is none."""


class QKLock(AdditiveMetric):
    """Cosine between k_0 and the queries' first principal direction, and share of queries that k_0 attracts.

    The principal direction is the first eigenvector of the queries' second moment, not centred, over all sequences and
    positions. It is known only when all have been seen, so the first and second moments of ``k_0/‖k_0‖`` are kept
    instead of cosines: the mean of ``cos²`` is exact from them, that of ``|cos|`` would not be. A k_0 of zeros has
    cosine 0. Products inside a batch are float32 (or wider, as the inputs), sums across batches float64. States are
    sums: additive over batches and ranks.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        d_head: channels per head.
    """

    query_sum: Tensor
    query_moment: Tensor
    key_sum: Tensor
    key_moment: Tensor
    positive_count: Tensor
    n_queries: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.add_sums(
            query_sum=(n_layers, n_heads, d_head),
            query_moment=(n_layers, n_heads, d_head, d_head),
            key_sum=(n_layers, n_heads, d_head),
            key_moment=(n_layers, n_heads, d_head, d_head),
            positive_count=(n_layers, n_heads),
            n_queries=(n_layers,),
            n_sequences=(n_layers,),
        )

    def update(self, layer: int, q_BHTK: Tensor, k_BHTK: Tensor) -> None:
        """Add a batch of queries and keys ``[B, H, T, d_head]`` as they enter the scores of one layer (from 0)."""
        q_BHTK = q_BHTK.to(torch.promote_types(q_BHTK.dtype, torch.float32))
        first_BHK = k_BHTK[:, :, 0].to(q_BHTK.dtype)
        n_sequences, _, n_positions, _ = q_BHTK.shape
        unit_HBK = first_BHK.transpose(0, 1).double()
        unit_HBK = unit_HBK / torch.linalg.vector_norm(unit_HBK, dim=-1, keepdim=True).clamp_min_(_TINY)
        q_HNK = q_BHTK.transpose(0, 1).flatten(1, 2)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            self.query_moment[layer].add_(torch.bmm(q_HNK.mT, q_HNK))
            self.key_moment[layer].add_(torch.bmm(unit_HBK.mT, unit_HBK))
        # One vector per sequence is too little for a matrix product.
        dots_BHT = (q_BHTK * first_BHK[:, :, None]).sum(-1)
        self.query_sum[layer].add_(q_BHTK.sum(2).sum(0))
        self.key_sum[layer].add_(unit_HBK.sum(1))
        self.positive_count[layer].add_((dots_BHT[..., 1:] > 0).sum((0, 2)))
        self.n_queries[layer].add_(n_sequences * (n_positions - 1))
        self.n_sequences[layer].add_(n_sequences)

    def compute(self) -> LockResult:
        """Both cosines and the share."""
        n_L1 = self.n_sequences[:, None]
        u_LHK = torch.stack(each_on_one_core(_first_direction, self.query_moment))
        side_LH = torch.where((u_LHK * self.query_sum).sum(-1) < 0, -1.0, 1.0)
        squared_LH = torch.einsum("lhk,lhkj,lhj->lh", u_LHK, self.key_moment, u_LHK) / n_L1
        signed_LH = side_LH * (u_LHK * self.key_sum).sum(-1) / n_L1
        positive_LH = self.positive_count / self.n_queries[:, None]
        result = squared_LH.clamp_min(0).sqrt(), signed_LH, positive_LH
        return LockResult(*(value.cpu().numpy() for value in result))
