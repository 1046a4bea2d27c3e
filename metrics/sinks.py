"""Attention sinks, from rows of weights a block at a time: never from a T×T matrix (definitions §5) [AS, SO]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

_QUERY_BLOCK = 32  # small enough that a block of weights stays in cache while it is summed


class Weights(Protocol):
    """The attention weights of one layer, rows on demand."""

    def rows(self, start: int, stop: int) -> Tensor:
        """Weights of the queries ``start … stop − 1`` on keys 0, 1, …: float32 or wider ``[B, H, stop − start, keys]``,
        at least ``stop`` keys; the caller may write into it."""

    def row_sum(self) -> Tensor | None:
        """Each query's sum of absolute weights ``[B, H, T]``; None where it is 1 by construction."""


class KeySums(NamedTuple):
    """What queries give to keys, of weights as they are (0) and divided by their row's sum (1). Of a row without any
    weight, all that is divided is 0."""

    importance_2BHT: Tensor
    """Mean of ``a[t, j]`` over the queries ``t ≥ j`` [AS]."""
    mass_2BH: Tensor
    """Mean of ``a[t, 0]`` over the queries ``t ≥ 1``."""
    squares_2BHT: Tensor
    """``Σ_j a[t, j]²`` of every query."""


def key_sums(weights: Weights, n_positions: int) -> KeySums:
    """All sums over a layer's weights in one pass, a block of queries at a time: O(T·block) memory."""
    sum_BHT = weights.row_sum()
    totals: list[Tensor] = []
    firsts: list[Tensor] = []
    squares: list[list[Tensor]] = [[], []]
    for start in range(0, n_positions, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, n_positions)
        raw = weights.rows(start, stop)
        kinds = [raw]
        if sum_BHT is not None:
            # A row without any weight has none to share out.
            level = sum_BHT[:, :, start:stop, None].to(raw.dtype)
            kinds.append((raw.abs() / level).masked_fill_(level == 0, 0.0))
        for kind, block in enumerate(kinds):
            # Here, while the block is in cache: from log-sum-exps they would cost a second attention.
            squares[kind].append(torch.linalg.vector_norm(block, dim=-1).square())
            block[..., start:].tril_()  # in a prefix, queries also see keys after them
            if start == 0:
                totals.append(block.new_zeros(*block.shape[:2], n_positions))
                firsts.append(block[:, :, 0, 0].clone())
            totals[kind][..., :stop] += block[..., :stop].sum(2)
    n_queries_T = torch.arange(n_positions, 0, -1, device=totals[0].device)
    importance = torch.stack([total / n_queries_T for total in totals])
    square = torch.stack([torch.cat(parts, dim=-1) for parts in squares if parts])
    mass = torch.stack(
        [(total[..., 0] - first) / max(n_positions - 1, 1) for total, first in zip(totals, firsts, strict=True)]
    )
    both = (x.expand(2, *x.shape[1:]) for x in (importance, mass, square))
    return KeySums(*both)


class SinkResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads, ``T`` positions. The normalised ones are of ``|a|`` over its row's sum."""

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
    mass_normalised: np.ndarray
    importance_normalised: np.ndarray
    rate_normalised: np.ndarray
    position_normalised: np.ndarray
    rate_grid: np.ndarray
    """``[E, L, H, T]`` the rate at every ε of the grid instead."""
    rate_grid_normalised: np.ndarray


class AttentionSinks(Metric):
    """Sink mass, importance, sink rate and sink position per layer and head. States are sums: additive.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence, at least 2.
        epsilon: importance above which a key counts as a sink (0.3 at T = 64 is the published setting [AS]).
        grid: further values of ε; each costs one comparison per key, and L·H·T counts.
    """

    full_state_update = False
    mass_sum: Tensor
    importance_sum: Tensor
    sink_count: Tensor
    n_sequences: Tensor

    def __init__(
        self, n_layers: int, n_heads: int, seq_len: int, epsilon: float = 0.3, grid: Sequence[float] = ()
    ) -> None:
        super().__init__()
        if seq_len < 2:
            raise ValueError(f"seq_len is {seq_len}: a sink needs at least one query after position 0")
        self.epsilon, self.grid, self.seq_len = epsilon, tuple(grid), seq_len
        for name, shape, dtype in (
            ("mass_sum", (n_layers, 2, n_heads), torch.float64),
            ("importance_sum", (n_layers, 2, n_heads, seq_len), torch.float64),
            ("sink_count", (1 + len(self.grid), n_layers, 2, n_heads, seq_len), torch.int32),
            ("n_sequences", (n_layers,), torch.float64),
        ):
            self.add_state(name, torch.zeros(shape, dtype=dtype), dist_reduce_fx="sum")

    def update(self, layer: int, weights: Weights | KeySums) -> None:
        """Add a batch of sequences of ``seq_len`` tokens: a layer's weights, or :func:`key_sums` of them."""
        sums = weights if isinstance(weights, KeySums) else key_sums(weights, self.seq_len)
        importance_2BHT = sums.importance_2BHT
        self.mass_sum[layer].add_(sums.mass_2BH.sum(1, dtype=torch.float64))
        self.importance_sum[layer].add_(importance_2BHT.sum(1, dtype=torch.float64))
        for i, epsilon in enumerate((self.epsilon, *self.grid)):
            self.sink_count[i, layer].add_((importance_2BHT > epsilon).sum(1))
        self.n_sequences[layer].add_(importance_2BHT.shape[1])

    def compute(self) -> SinkResult:
        """All sink quantities per layer and head."""
        n = self.n_sequences[:, None, None]
        mass = (self.mass_sum / n).cpu().numpy()
        importance = (self.importance_sum / n[..., None]).cpu().numpy()
        rate = (self.sink_count / n[..., None]).mul_(100).cpu().numpy()
        position = importance.argmax(-1)
        return SinkResult(
            mass[:, 0],
            float(np.mean(1 / np.arange(2, self.seq_len + 1))),
            importance[:, 0],
            rate[0, :, 0],
            position[:, 0],
            mass[:, 1],
            importance[:, 1],
            rate[0, :, 1],
            position[:, 1],
            rate[1:, :, 0],
            rate[1:, :, 1],
        )
