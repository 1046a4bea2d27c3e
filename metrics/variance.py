"""Positional variance of head outputs, and the number of tokens that they average over (definitions §6) [BB, SO]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from .head_sums import deviations
from .summed_metrics import AdditiveMetric, sum_over_ranks


class VarianceResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads, ``T`` positions."""

    variance: np.ndarray
    """``[L, H, T]`` σ²(t): unbiased variance over sequences, averaged over the head's channels; NaN below two."""
    discrepancy: np.ndarray
    """``[L]`` σ²(0) over the mean of σ²(t) at t ≥ T/2, σ² averaged over heads: 1 is equal variance everywhere."""


def _square_sum(x: Tensor) -> Tensor:
    """Compute squared norms over the last axis, float64."""
    return torch.linalg.vector_norm(x, dim=-1).double().square_()


class PositionalVariance(AdditiveMetric):
    """Variance of head outputs over probe sequences, per layer, head and position, in one pass.

    The states are the mean of every channel, and the scatter ``Σ‖o − mean‖²`` of every head and position; batches and
    ranks are merged by the formulas of Chan, Golub & LeVeque (1979), in which no square of a mean is taken from another
    one: a mean far above the deviation does no harm. In float64 the result is that of all sequences at once. Means in
    float32 take half of the memory; rounding then changes the variance by less than 10⁻⁶ + 10⁻⁷·mean/sd of itself.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence.
        d_head: channels per head.
        n_constant: leading positions whose outputs are the same in all sequences, as behind a fixed BOS. Their variance
            is 0, and what is summed there is rounding.
        dtype: type of the means, and of the arithmetic inside a batch.
    """

    mean: Tensor
    scatter: Tensor
    n_sequences: Tensor

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        seq_len: int,
        d_head: int,
        *,
        n_constant: int = 0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.n_constant = n_constant
        self._begun: set[int] = set()
        # Positions before heads, as outputs lie in memory.
        self.add_sums(dtype, mean=(n_layers, seq_len, n_heads, d_head))
        self.add_sums(scatter=(n_layers, seq_len, n_heads), n_sequences=(n_layers,))

    def update(self, layer: int, o_BHTK: Tensor) -> None:
        """Add a batch of head outputs ``[B, H, T, d_head]`` of one layer (from 0)."""
        if len(o_BHTK) == 0:
            return
        self.settle(layer)  # with the number of sequences of that batch
        mean_THK, n = self.mean[layer], self.n_sequences[layer]
        if layer not in self._begun:
            # Before there is a mean, the first sequence is near enough to it.
            torch.where(n > 0, mean_THK, o_BHTK[0].transpose(0, 1).to(mean_THK.dtype), out=mean_THK)
            self._begun.add(layer)
        n.add_(len(o_BHTK))
        away = deviations(o_BHTK, mean_THK)
        mean_THK.addcdiv_(away.total_THK, n)
        self.keep(layer, away.norm_BTH, torch.linalg.vector_norm(away.total_THK, dim=-1))

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        away_PBTH, of_sum_PTH = (norms.double().square_() for norms in tensors_P)
        n_P11 = self.n_sequences[places, None, None]
        self.scatter[places].add_(away_PBTH.sum(1)).sub_(of_sum_PTH / n_P11)

    @override
    def reset(self) -> None:
        self._begun = set()
        super().reset()

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        mean, scatter, n = (incoming_state[name] for name in ("mean", "scatter", "n_sequences"))
        total = n + self.n_sequences
        share_L111 = (n / total.clamp_min(1))[:, None, None, None]
        away = mean - self.mean
        weight_L11 = share_L111[..., 0] * self.n_sequences[:, None, None]
        self.scatter = self.scatter + scatter + weight_L11 * _square_sum(away)
        self.mean, self.n_sequences = self.mean + away * share_L111.to(away.dtype), total

    @override
    def reduce_over(self, group: Any) -> None:
        total = sum_over_ranks(self.n_sequences, group)
        share_L111 = (self.n_sequences / total.clamp_min(1))[:, None, None, None]
        mean = sum_over_ranks(self.mean * share_L111.to(self.mean.dtype), group)
        # A layer at a time: differences take as much memory as means.
        away = torch.stack([_square_sum(own - of_all) for own, of_all in zip(self.mean, mean, strict=True)])
        self.scatter = sum_over_ranks(self.scatter + away * self.n_sequences[:, None, None], group)
        self.mean, self.n_sequences = mean, total

    def compute(self) -> VarianceResult:
        """Return positional variance and its discrepancy."""
        n_L11 = self.n_sequences[:, None, None]
        n_positions, _, d_head = self.mean.shape[1:]
        # A constant head's scatter is 0 up to rounding, on either side.
        variance_LTH = (self.scatter.clamp_min(0) / (d_head * (n_L11 - 1))).masked_fill(n_L11 < 2, torch.nan)
        variance_LTH[:, : self.n_constant] *= 0  # NaN stays
        over_heads_LT = variance_LTH.mean(-1)
        late_L = over_heads_LT[:, (n_positions + 1) // 2 :].mean(-1)
        return VarianceResult(
            variance_LTH.transpose(1, 2).contiguous().cpu().numpy(), (over_heads_LT[:, 0] / late_L).cpu().numpy()
        )


class TokensResult(NamedTuple):
    """Float64 ``[L, H, T]``: mean over sequences."""

    n_eff: np.ndarray
    """``1 / Σ_j a[t, j]²``: t + 1 under uniform attention, 1 where all weight is on one key."""
    n_eff_normalised: np.ndarray
    """The same of ``|a|`` over its row's sum, ``(Σ|a|)² / Σ a²``."""


class EffectiveTokens(AdditiveMetric):
    """Effective number of tokens per layer, head and position, averaged over sequences. States are sums: additive.

    A query that gives no weight at all (a row of zeros, which some normalisers allow) averages over 0 tokens.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
        seq_len: T, the length of every probe sequence.
    """

    token_sum: Tensor
    n_sequences: Tensor

    def __init__(self, n_layers: int, n_heads: int, seq_len: int) -> None:
        super().__init__()
        self.add_sums(token_sum=(n_layers, 2, n_heads, seq_len), n_sequences=(n_layers,))

    def update(self, layer: int, squares_BHT: Tensor, normalised_squares_BHT: Tensor | None = None) -> None:
        """Add a batch of one layer (from 0).

        Args:
            layer: the layer.
            squares_BHT: ``Σ_j a²`` of every query, float32 or wider.
            normalised_squares_BHT: ``Σ_j a² / (Σ_j |a|)²``; None where rows sum to 1.
        """
        squares = (squares_BHT,) if normalised_squares_BHT is None else (squares_BHT, normalised_squares_BHT)
        self.keep(layer, *squares)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        # C: the kinds; one alone stands for both.
        squares_CPBHT = torch.stack(tensors_P)
        tokens_CPBHT = squares_CPBHT.double().reciprocal().masked_fill_(squares_CPBHT == 0, 0.0)
        self.token_sum[places].add_(tokens_CPBHT.sum(2).transpose(0, 1))
        self.n_sequences[places].add_(squares_CPBHT.shape[2])

    def compute(self) -> TokensResult:
        """Return the mean effective numbers of tokens."""
        mean = (self.token_sum / self.n_sequences[:, None, None, None]).cpu().numpy()
        return TokensResult(mean[:, 0], mean[:, 1])
