"""Attention sinks, from queries, keys and log-sum-exps: never from a T×T matrix (definitions §5) [AS, SO]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

_QUERY_BLOCK = 128


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
    n_positions = q_BHTK.shape[2]
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    # One more channel carries −lse, so that the product is the log weight at once.
    q_BHTK = torch.cat([q_BHTK.to(wide) * scale, -lse_BHT[..., None].to(wide)], dim=-1)
    k_BHTK = torch.cat([k_BHTK.to(wide), torch.ones_like(lse_BHT, dtype=wide)[..., None]], dim=-1)
    total_BHT = torch.zeros_like(lse_BHT, dtype=wide)
    for start in range(0, n_positions, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, n_positions)
        with torch.autocast(q_BHTK.device.type, enabled=False):
            log_weights = q_BHTK[:, :, start:stop] @ k_BHTK[:, :, :stop].transpose(-1, -2)
        unseen = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q_BHTK.device).triu(1)
        log_weights[..., start:].masked_fill_(unseen, -torch.inf)
        total_BHT[..., :stop] += log_weights.exp_().sum(-2)
    return total_BHT / torch.arange(n_positions, 0, -1, device=total_BHT.device)


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
        self.mass_sum[layer] += weights_BHT[..., 1:].mean(-1).sum(0, dtype=torch.float64)
        self.importance_sum[layer] += importance_BHT.sum(0, dtype=torch.float64)
        self.sink_count[layer] += (importance_BHT > self.epsilon).sum(0)
        self.n_sequences[layer] += len(importance_BHT)

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
