"""Norms of the loss gradient by place and position, and the share of the first position (definitions §16)."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from .summed_metrics import AdditiveMetric

HeadPlace = Literal["query", "key", "value"]
HEAD_PLACES: tuple[HeadPlace, ...] = get_args(HeadPlace)


class GradientResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads, ``T`` positions. NaN at positions and in layers without data, inf if a
    gradient is not finite.
    """

    loss: float
    """Mean over sequences of the loss, nats."""
    mlp: np.ndarray
    """``[L+1, T]`` mean norm of the gradient by the embeddings and by the residual stream after each MLP."""
    attention: np.ndarray
    """``[L, T]`` the same after attention."""
    heads: dict[HeadPlace, np.ndarray]
    """``[L, H, T]`` the same by queries, keys and values of each query head."""


class GradientNorms(AdditiveMetric):
    """Mean over sequences of ``‖∂L/∂x_t‖`` by place and position [GS].

    States are sums: additive over batches and ranks.

    Args:
        n_layers: blocks.
        n_heads: query heads of a block.
        seq_len: positions of a sequence; gradients have one less, since the last one predicts nothing.
    """

    mlp_sum: Tensor
    attention_sum: Tensor
    heads_sum: Tensor
    n_mlp: Tensor
    n_attention: Tensor
    n_heads_seen: Tensor
    loss_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, n_heads: int, seq_len: int) -> None:
        super().__init__()
        length, kinds = seq_len - 1, len(HEAD_PLACES)
        self.add_sums(
            mlp_sum=(n_layers + 1, length),
            attention_sum=(n_layers, length),
            heads_sum=(kinds, n_layers, n_heads, length),
            n_mlp=(n_layers + 1,),
            n_attention=(n_layers,),
            n_heads_seen=(n_layers,),
            loss_sum=(),
            n_sequences=(),
        )

    def update(self, loss_sum: Tensor, n_sequences: int) -> None:
        """Add the losses of a batch, summed over its sequences."""
        self.loss_sum.add_(loss_sum.double())
        self.n_sequences.add_(n_sequences)

    def after_mlp(self, layer: int, g_BTD: Tensor) -> None:
        """Add a batch's gradients by the residual stream after the MLP of block ``layer``, or the embeddings (0)."""
        self.mlp_sum[layer].add_(_norms(g_BTD).sum(0))
        self.n_mlp[layer].add_(len(g_BTD))

    def after_attention(self, layer: int, g_BTD: Tensor) -> None:
        """Add a batch's gradients by the residual stream after the attention of block ``layer``, from 1."""
        self.attention_sum[layer - 1].add_(_norms(g_BTD).sum(0))
        self.n_attention[layer - 1].add_(len(g_BTD))

    def in_heads(self, layer: int, by_place: dict[HeadPlace, Tensor]) -> None:
        """Add a batch's gradients by queries, keys and values ``[B, H, T, K]`` of block ``layer``, from 1."""
        for i, place in enumerate(HEAD_PLACES):
            self.heads_sum[i, layer - 1].add_(_norms(by_place[place]).sum(0))
        self.n_heads_seen[layer - 1].add_(len(by_place["query"]))

    def compute(self) -> GradientResult:
        """Return the means over sequences."""
        heads = _means(self.heads_sum, self.n_heads_seen[None, :, None, None])
        return GradientResult(
            float(self.loss_sum / self.n_sequences),
            _means(self.mlp_sum, self.n_mlp[:, None]),
            _means(self.attention_sum, self.n_attention[:, None]),
            dict(zip(HEAD_PLACES, heads, strict=True)),
        )


def _norms(g: Tensor) -> Tensor:
    """Return norms over the last axis, float64."""
    wide = torch.promote_types(g.dtype, torch.float32)
    return torch.linalg.vector_norm(g, dim=-1, dtype=wide).double()


def _means(sums: Tensor, n: Tensor) -> np.ndarray:
    """Divide sums by counts. NaN where the count is 0 and at an added last position; inf where any gradient was not
    finite.
    """
    broken = ~sums.isfinite() & (n > 0)
    means = (sums / n).masked_fill(broken, torch.inf).cpu().numpy()
    return np.concatenate([means, np.full_like(means[..., :1], np.nan)], axis=-1)


def first_over_others(norms: np.ndarray) -> np.ndarray:
    """Return the norm at position 0 over the mean norm of the others, from norms ``[…, T]`` whose last position is NaN.

    1 is no difference; where all are 0, as behind a map that starts at 0, it is 1 too.
    """
    first, others = norms[..., 0], norms[..., 1:-1].mean(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((first == 0) & (others == 0), 1.0, first / others)
