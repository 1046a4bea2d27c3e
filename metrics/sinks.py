"""Attention sinks, from queries, keys and log-sum-exps: never from a T×T matrix (definitions §5) [AS, SO]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

_QUERY_BLOCK = 32  # small enough that a block of weights stays in cache while it is summed


def key_weights(q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor, scale: float, key: int) -> Tensor:
    """Weight of every query on one key, ``a[t, key] = exp(scale · q_t·k − lse_t)``, float32 or wider ``[B, H, T]``.

    Queries before the key do not see it: their weight is 0.
    """
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        scores_BHT = torch.einsum("bhtk,bhk->bht", q_BHTK.to(wide), k_BHTK[:, :, key].to(wide)) * scale
    weights_BHT = (scores_BHT - lse_BHT).exp()
    weights_BHT[..., :key] = 0
    return weights_BHT


def key_importance(q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor, scale: float) -> Tensor:
    """Importance of every key: mean of ``a[t, j]`` over the queries ``t ≥ j`` [AS], ``[B, H, T]``.

    Works a block of queries at a time against the keys that the block sees: O(T·block) memory.
    """
    n_sequences, n_heads, n_positions, d_head = q_BHTK.shape
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    # N = B·H: the batched product takes three axes, and adds −lse on the way.
    q_NTK, k_NTK = (x.to(wide).reshape(n_sequences * n_heads, n_positions, d_head) for x in (q_BHTK, k_BHTK))
    minus_lse_NT1 = -lse_BHT.to(wide).reshape(n_sequences * n_heads, n_positions, 1)
    total_NT = torch.zeros_like(minus_lse_NT1[..., 0])
    unseen = torch.ones(_QUERY_BLOCK, _QUERY_BLOCK, dtype=torch.bool, device=q_BHTK.device).triu(1)
    for start in range(0, n_positions, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, n_positions)
        rows = slice(start, stop)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            weights = torch.baddbmm(
                minus_lse_NT1[:, rows], q_NTK[:, rows], k_NTK[:, :stop].transpose(1, 2), alpha=scale
            )
        weights[..., start:].masked_fill_(unseen[: stop - start, : stop - start], -torch.inf)
        total_NT[:, :stop] += weights.exp_().sum(1)
    n_queries_T = torch.arange(n_positions, 0, -1, device=total_NT.device)
    return (total_NT / n_queries_T).view(n_sequences, n_heads, n_positions)


class SinkResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads, ``T`` positions."""

    mass: np.ndarray
    """``[L, H]`` mean weight on key 0 over the queries t ≥ 1."""
    uniform: float
    """The mass that uniform attention would give, ``mean 1/(t+1)`` over t ≥ 1."""
    importance: np.ndarray
    """``[L, H, T]`` mean importance of every key."""
    rate: np.ndarray
    """``[L, H, T]`` percentage of samples whose importance of the key exceeds ε."""
    position: np.ndarray
    """``[L, H]`` the key of largest mean importance (int64)."""


class AttentionSinks(Metric):
    """Sink mass, importance, sink rate and sink position per layer and head. States are sums: additive.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence, at least 2.
        epsilon: importance above which a key counts as a sink (0.3 at T = 64 is the published setting [AS]).
    """

    full_state_update = False
    mass_sum: Tensor
    importance_sum: Tensor
    sink_count: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, n_heads: int, seq_len: int, epsilon: float = 0.3) -> None:
        super().__init__()
        if seq_len < 2:
            raise ValueError(f"seq_len is {seq_len}: a sink needs at least one query after position 0")
        self.epsilon, self.seq_len = epsilon, seq_len
        for name, shape in (
            ("mass_sum", (n_layers, n_heads)),
            ("importance_sum", (n_layers, n_heads, seq_len)),
            ("sink_count", (n_layers, n_heads, seq_len)),
            ("n_sequences", (n_layers,)),
        ):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, layer: int, q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor, scale: float) -> None:
        """Add a batch: queries and keys as they enter the scores, and the log-sum-exp of each query's scores."""
        importance_BHT = key_importance(q_BHTK, k_BHTK, lse_BHT, scale)
        weights_BHT = key_weights(q_BHTK, k_BHTK, lse_BHT, scale, key=0)
        self.mass_sum[layer].add_(weights_BHT[..., 1:].mean(-1).sum(0, dtype=torch.float64))
        self.importance_sum[layer].add_(importance_BHT.sum(0, dtype=torch.float64))
        self.sink_count[layer].add_((importance_BHT > self.epsilon).sum(0))
        self.n_sequences[layer].add_(len(importance_BHT))

    def compute(self) -> SinkResult:
        """All sink quantities per layer and head."""
        n = self.n_sequences[:, None]
        importance = (self.importance_sum / n[..., None]).cpu().numpy()
        return SinkResult(
            mass=(self.mass_sum / n).cpu().numpy(),
            uniform=float(np.mean(1 / np.arange(2, self.seq_len + 1))),
            importance=importance,
            rate=(100 * self.sink_count / n[..., None]).cpu().numpy(),
            position=importance.argmax(-1),
        )
