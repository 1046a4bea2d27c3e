"""Positional variance of head outputs, and how many tokens they average over (definitions §6) [BB, SO]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric


class VarianceResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads, ``T`` positions."""

    variance: np.ndarray
    """``[L, H, T]`` σ²(t): unbiased variance over sequences, averaged over the head's channels; NaN below two."""
    discrepancy: np.ndarray
    """``[L]`` σ²(0) over the mean of σ²(t) at t ≥ T/2, σ² averaged over heads: 1 is equal variance everywhere."""


class PositionalVariance(Metric):
    """Variance of head outputs over probe sequences, per layer, head and position. States are sums: additive.

    The states are plain sums of x and x² in float64. The square of a float32 is exact there, so all that is lost is
    the rounding of the additions: a relative error of at most n·10⁻¹⁶·(mean/sd)² over n sequences. Where that would
    reach a percent (mean/sd near 10⁶ at n = 100), the float32 inputs have lost their own variance before.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence.
        d_head: channels per head.
    """

    full_state_update = False
    sums: Tensor
    square_sums: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, n_heads: int, seq_len: int, d_head: int) -> None:
        super().__init__()
        for name, shape in (
            ("sums", (n_layers, n_heads, seq_len, d_head)),
            # The channels' squares are only ever wanted together; their sums are needed one by one.
            ("square_sums", (n_layers, n_heads, seq_len)),
            ("n_sequences", (n_layers,)),
        ):
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, layer: int, o_BHTK: Tensor) -> None:
        """Add a batch of head outputs ``[B, H, T, d_head]`` of one layer (from 0)."""
        self.sums[layer].add_(o_BHTK.sum(0, dtype=torch.float64))
        self.square_sums[layer].add_(o_BHTK.to(torch.float64, copy=True).square_().sum((0, -1)))
        self.n_sequences[layer].add_(len(o_BHTK))

    def compute(self) -> VarianceResult:
        """Positional variance and its discrepancy."""
        n_L11 = self.n_sequences[:, None, None]
        d_head, n_positions = self.sums.shape[-1], self.sums.shape[-2]
        scatter_LHT = self.square_sums - torch.linalg.vector_norm(self.sums, dim=-1).square() / n_L11
        # A constant head's scatter is 0 up to rounding, on either side.
        variance_LHT = (scatter_LHT.clamp_min(0) / (d_head * (n_L11 - 1))).masked_fill(n_L11 < 2, torch.nan)
        over_heads_LT = variance_LHT.mean(1)
        late_L = over_heads_LT[:, (n_positions + 1) // 2 :].mean(-1)
        return VarianceResult(variance_LHT.cpu().numpy(), (over_heads_LT[:, 0] / late_L).cpu().numpy())


class TokensResult(NamedTuple):
    """Float64 ``[L, H, T]``: mean over sequences."""

    n_eff: np.ndarray
    """``1 / Σ_j a[t, j]²``: t + 1 under uniform attention, 1 where all weight is on one key."""
    n_eff_normalised: np.ndarray
    """The same of ``|a|`` over its row's sum, ``(Σ|a|)² / Σ a²``."""


class EffectiveTokens(Metric):
    """Effective number of tokens per layer, head and position, averaged over sequences. States are sums: additive.

    A query that gives no weight at all (a row of zeros, which some normalisers allow) averages over 0 tokens.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence.
    """

    full_state_update = False
    token_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, n_heads: int, seq_len: int) -> None:
        super().__init__()
        token_sum = torch.zeros(n_layers, 2, n_heads, seq_len, dtype=torch.float64)
        self.add_state("token_sum", token_sum, dist_reduce_fx="sum")
        self.add_state("n_sequences", torch.zeros(n_layers, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, layer: int, squares_BHT: Tensor, normalised_squares_BHT: Tensor | None = None) -> None:
        """Add a batch of one layer (from 0).

        Args:
            layer: the layer.
            squares_BHT: ``Σ_j a²`` of every query, float32 or wider.
            normalised_squares_BHT: ``Σ_j a² / (Σ_j |a|)²``; None where rows sum to 1.
        """
        for kind, squares in enumerate((squares_BHT, normalised_squares_BHT)):
            squares = squares_BHT if squares is None else squares
            tokens_BHT = squares.double().reciprocal().masked_fill(squares == 0, 0.0)
            self.token_sum[layer, kind].add_(tokens_BHT.sum(0))
        self.n_sequences[layer].add_(len(squares_BHT))

    def compute(self) -> TokensResult:
        """Mean effective numbers of tokens."""
        mean = (self.token_sum / self.n_sequences[:, None, None, None]).cpu().numpy()
        return TokensResult(mean[:, 0], mean[:, 1])
