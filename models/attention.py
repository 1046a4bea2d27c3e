"""One attention. What a head's value aggregation goes through before the output projection is a part, by config."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import InitConfig, ModelConfig
from .init import Constant, Distribution, Linear
from .kernels import attention_with_lse, effective_tokens
from .norms import RMSNorm
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


class PlainOutput(nn.Module):
    """Head outputs are not gated; also the base of the gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def forward(self, o_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """Head outputs ``[B, H, T, d_head]`` → the same shape, given the input of the attention."""
        return o_BHTK


class OutputGate(PlainOutput):
    """Head outputs times a sigmoid of a linear map of the input: one number per head, or one per channel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.n_heads = config.n_heads
        per_head = config.d_head if config.attention.gate == "channel" else 1
        self.map = Linear(config.d_model, config.n_heads * per_head, bias=config.bias)

    def forward(self, o_BHTK: Tensor, x_BTD: Tensor) -> Tensor:
        """``o · σ(W x)``."""
        return o_BHTK * self.map(x_BTD).sigmoid().unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


#: Output gates by name.
GATES: dict[str, type[PlainOutput]] = {"none": PlainOutput, "head": OutputGate, "channel": OutputGate}


class Projection(Linear):
    """Queries, keys or values: a linear map, cut into heads, normalised if config says so.

    Args:
        config: the model.
        n_heads: heads of this projection.
        norm: ``none``; ``head``, RMSNorm over each head's channels; ``width``, over all heads' channels together.
    """

    def __init__(self, config: ModelConfig, n_heads: int, norm: str) -> None:
        super().__init__(config.d_model, n_heads * config.d_head, bias=config.bias)
        self.d_head, self.over_width = config.d_head, norm == "width"
        width = self.out_features if self.over_width else config.d_head
        self.norm = RMSNorm(width, config.norm_eps) if norm != "none" else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``[B, T, D] → [B, heads, T, d_head]``."""
        x = super().forward(x_BTD)
        if self.norm is not None and self.over_width:
            x = self.norm(x)
        x = x.unflatten(-1, (-1, self.d_head))
        if self.norm is not None and not self.over_width:
            x = self.norm(x)
        return x.transpose(1, 2)


class Attention(nn.Module):
    """Causal multi-head attention with grouped keys and values.

    Legend: B sequences, T positions, D width, H query heads, G key/value heads, K head width.
    """

    def __init__(self, config: ModelConfig, block: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = config.n_heads, config.kv_heads, config.d_head
        self.scale = config.d_head**-0.5
        self.q = Projection(config, self.n_heads, config.attention.qk_norm)
        self.k = Projection(config, self.n_kv_heads, config.attention.qk_norm)
        self.v = Projection(config, self.n_kv_heads, "none")
        self.o = Linear(self.n_heads * self.d_head, config.d_model, config.bias, residual_writers=2 * config.n_layers)
        self.aggregate = build_aggregation(config, block)
        self.gate = GATES[config.attention.gate](config)

    def forward(self, x_BTD: Tensor, rotation: Tensor | None, layer: int, observer: Observer | None = None) -> Tensor:
        """``[B, T, D] → [B, T, D]``; ``layer`` is the name that the observer is told."""
        q, k, v = rotate(self.q(x_BTD), rotation), rotate(self.k(x_BTD), rotation), self.v(x_BTD)
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
        o = self.gate(self.aggregate(o, q, k, lse, self.scale), x_BTD)
        return self.o(o.transpose(1, 2).flatten(2))
