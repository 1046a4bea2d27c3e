"""One attention. What a head's value aggregation goes through before the output projection is a part, by config."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import InitConfig, ModelConfig
from .init import Constant, Distribution, Linear
from .kernels import attention_with_lse, effective_tokens
from .observe import Observer
from .positions import rotate


class PlainAggregation(nn.Module):
    """Head outputs go on as they are; also the base of the other kinds."""

    #: Whether :meth:`forward` reads the log-sum-exp of the scores.
    needs_lse = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, o_BHTK: Tensor, q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor | None, scale: float) -> Tensor:
        """Head outputs ``[B, H, T, d_head]`` → the same shape."""
        return o_BHTK


class HeadNorm(PlainAggregation):
    """Head-wise RMSNorm: each head's output over its RMS, times one gain ``[d_head]`` shared by the heads [SO]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.eps = config.norm_eps
        self.gain = nn.Parameter(torch.ones(config.d_head))

    def forward(self, o_BHTK: Tensor, q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor | None, scale: float) -> Tensor:
        """Every head at every position leaves with RMS 1 (before the gain)."""
        return F.rms_norm(o_BHTK, self.gain.shape, self.gain.to(o_BHTK.dtype), self.eps)

    def distributions(self, init: InitConfig) -> dict[str, Distribution]:
        """The gain starts at 1."""
        return {"gain": Constant(1.0)}


class AnalyticCalibration(PlainAggregation):
    """Head outputs times √(t+1), or √((t+1)/t_ref): the variance of uniform attention is made equal [BB]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        calibration = config.attention.calibration
        t_ref = calibration.t_ref or config.max_seq_len
        self.gradient = calibration.gradient
        self.divisor = 1.0 if calibration.direction == "amplify" else float(t_ref)

    def n_eff(self, q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor | None, scale: float) -> Tensor:
        """Effective number of tokens, broadcastable to ``[B, H, T]``."""
        return torch.arange(1, q_BHTK.shape[2] + 1, device=q_BHTK.device, dtype=torch.float32)

    def forward(self, o_BHTK: Tensor, q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor | None, scale: float) -> Tensor:
        """``o · √(n_eff / divisor)``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.gradient):
            factor = (self.n_eff(q_BHTK, k_BHTK, lse_BHT, scale) / self.divisor).sqrt()
        return o_BHTK * factor[..., None].to(o_BHTK.dtype)


class ExactCalibration(AnalyticCalibration):
    """The same with ``n_eff(t) = 1/Σ a²`` of the actual weights."""

    needs_lse = True

    def n_eff(self, q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor | None, scale: float) -> Tensor:
        """``[B, H, T]``, from two log-sum-exps."""
        assert lse_BHT is not None
        return effective_tokens(q_BHTK, k_BHTK, lse_BHT, scale)


#: Value aggregations by name; ``calibrated`` has two forms.
AGGREGATIONS: dict[str, type[PlainAggregation]] = {
    "plain": PlainAggregation,
    "headnorm": HeadNorm,
    "calibrated-analytic": AnalyticCalibration,
    "calibrated-exact": ExactCalibration,
}


def build_aggregation(config: ModelConfig, block: int) -> PlainAggregation:
    """The value aggregation of one block (from 0)."""
    attention = config.attention
    if attention.aggregation_blocks is not None and block not in attention.aggregation_blocks:
        attention = replace(attention, aggregation="plain")
    kind = attention.aggregation
    return AGGREGATIONS[f"{kind}-{attention.calibration.n_eff}" if kind == "calibrated" else kind](config)


class Attention(nn.Module):
    """Causal multi-head attention with grouped keys and values.

    Legend: B sequences, T positions, D width, H query heads, G key/value heads, K head width.
    """

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = config.n_heads, config.kv_heads, config.d_head
        self.scale = config.d_head**-0.5
        d_query, d_key = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.q = Linear(config.d_model, d_query, bias=config.bias)
        self.k = Linear(config.d_model, d_key, bias=config.bias)
        self.v = Linear(config.d_model, d_key, bias=config.bias)
        self.o = Linear(d_query, config.d_model, bias=config.bias)
        self.aggregate = build_aggregation(config, block)

    def forward(self, x_BTD: Tensor, rotation: Tensor | None, layer: int, observer: Observer | None = None) -> Tensor:
        """``[B, T, D] → [B, T, D]``; ``layer`` is the name that the observer is told."""
        B, T, _ = x_BTD.shape
        q = rotate(self.q(x_BTD).view(B, T, self.n_heads, self.d_head).transpose(1, 2), rotation)
        k = rotate(self.k(x_BTD).view(B, T, self.n_kv_heads, self.d_head).transpose(1, 2), rotation)
        v = self.v(x_BTD).view(B, T, self.n_kv_heads, self.d_head).transpose(1, 2)
        if self.n_kv_heads != self.n_heads:
            k, v = (x.repeat_interleave(self.n_heads // self.n_kv_heads, dim=1) for x in (k, v))

        lse: Tensor | None = None
        if self.aggregate.needs_lse or observer is not None:
            o, lse = attention_with_lse(q, k, v, self.scale)
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        if observer is not None:
            assert lse is not None
            observer.attention(layer, q, k, o, lse, self.scale)
        o = self.aggregate(o, q, k, lse, self.scale)
        return self.o(o.transpose(1, 2).reshape(B, T, -1))
