"""Direction of the first key relative to a head's queries (definitions §7) [SO]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .head_sums import QuerySums
from .summed_metrics import AdditiveMetric

_TINY = torch.finfo(torch.float64).tiny
#: Squarings of a matrix at most: they leave nothing of an eigenvalue that is 10⁻¹⁰ of itself below the largest.
_SQUARINGS = 40
#: Largest sum of lesser eigenvalues in a matrix of trace 1 that one more squaring reduces to nothing.
_REST = 1e-9
#: Elements of the matrices that are squared together: on the CPU they stay in cache, elsewhere launches are few.
_CACHED, _TOGETHER = 1 << 17, 1 << 24


def first_directions(moment_NKK: Tensor) -> Tensor:
    """Return the eigenvector of the largest eigenvalue of every symmetric, positive semidefinite matrix ``[N, K, K]``:
    unit vectors ``[N, K]`` in float64, of either sign. Only the lower half of each matrix is read; zeros give the last
    axis.

    Repeated squaring doubles the distance between eigenvalues until one is left, as exactly as ``eigh`` has its vector.
    All matrices go together, where a GPU's solver would take one after the other.
    """
    at_once = max((_CACHED if moment_NKK.device.type == "cpu" else _TOGETHER) // max(moment_NKK[:1].numel(), 1), 1)
    return torch.cat([_first_directions(some_NKK) for some_NKK in moment_NKK.split(at_once)])


def _trace(matrix_NKK: Tensor) -> Tensor:
    return matrix_NKK.diagonal(dim1=-2, dim2=-1).sum(-1)


def _first_directions(moment_NKK: Tensor) -> Tensor:
    power_NKK = moment_NKK.double().tril()
    power_NKK += power_NKK.tril(-1).mT
    trace_N = _trace(power_NKK)
    power_NKK[:, -1, -1] += trace_N == 0
    power_NKK /= trace_N.where(trace_N != 0, 1.0)[:, None, None]
    square_NKK = torch.empty_like(power_NKK)
    for _ in range(_SQUARINGS):
        torch.bmm(power_NKK, power_NKK, out=square_NKK)
        # The trace of the square of a matrix of trace 1 is the sum of its squared eigenvalues: 1 if only one is left.
        trace_N = _trace(square_NKK)
        power_NKK, square_NKK = square_NKK.div_(trace_N[:, None, None]), power_NKK
        if trace_N.amin() > 1 - _REST:
            break
    # Every column is a multiple of the vector; that of its largest element is the best.
    column_N = power_NKK.diagonal(dim1=-2, dim2=-1).argmax(-1)
    u_NK = power_NKK.gather(-1, column_N[:, None, None].expand(-1, power_NKK.shape[-1], 1))[..., 0]
    return u_NK / torch.linalg.vector_norm(u_NK, dim=-1, keepdim=True)


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

    def update(self, layer: int, sums: QuerySums) -> None:
        """Add the queries of a batch, and their first keys, of one layer (from 0)."""
        self.query_moment[layer].add_(sums.moment_HKK)
        self.keep(layer, sums.first_BHK, sums.dots_BTH, sums.total_HK)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        first_PBHK, dots_PBTH, query_PHK = tensors_P
        unit_PHBK = first_PBHK.transpose(1, 2).double()
        unit_PHBK = unit_PHBK / torch.linalg.vector_norm(unit_PHBK, dim=-1, keepdim=True).clamp_min_(_TINY)
        self.key_moment[places].add_(unit_PHBK.mT @ unit_PHBK)
        self.query_sum[places].add_(query_PHK)
        self.key_sum[places].add_(unit_PHBK.sum(2))
        self.positive_count[places].add_((dots_PBTH[:, :, 1:] > 0).sum((1, 2)))
        _, n_sequences, n_positions, _ = dots_PBTH.shape
        self.n_queries[places].add_(n_sequences * (n_positions - 1))
        self.n_sequences[places].add_(n_sequences)

    def compute(self) -> LockResult:
        """Return the signed and unsigned cosine, and the share of attracted queries."""
        n_L1 = self.n_sequences[:, None]
        u_LHK = first_directions(self.query_moment.flatten(0, 1)).view_as(self.query_sum)
        side_LH = torch.where((u_LHK * self.query_sum).sum(-1) < 0, -1.0, 1.0)
        squared_LH = torch.einsum("lhk,lhkj,lhj->lh", u_LHK, self.key_moment, u_LHK) / n_L1
        signed_LH = side_LH * (u_LHK * self.key_sum).sum(-1) / n_L1
        positive_LH = self.positive_count / self.n_queries[:, None]
        result = squared_LH.clamp_min(0).sqrt(), signed_LH, positive_LH
        return LockResult(*(value.cpu().numpy() for value in result))
