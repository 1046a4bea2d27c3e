"""Causal attention that also returns its log-sum-exp, differentiable in both, without a T×T matrix.

The log-sum-exp of a row's scores gives every weight of the row afterwards, ``a[t,j] = exp(s[t,j] − lse[t])``, and the
effective number of tokens, so whatever asks about attention weights asks for it instead of for the matrix.

Legend: B sequences, H heads, T positions, K head width. Keys and values have as many heads as queries here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_QUERY_BLOCK = 256
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _FlashCPU(torch.autograd.Function):
    """The fused CPU kernel behind ``scaled_dot_product_attention``, with a gradient through its log-sum-exp too.

    The score gradient of (out, lse) is ``p ∘ (dp − Δ + g)`` with ``Δ = rowsum(dO ∘ O)`` and ``g`` the gradient of lse.
    The fused backward computes ``p ∘ (dp − Δ)``, so one more channel whose value is 0, output −g and upstream
    gradient 1 turns its Δ into ``Δ − g`` and leaves ``dp`` alone.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = _flash(q, k, v, 0.0, True, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out, d_lse = grads[0].to(q.dtype), grads[1].to(q.dtype)
        d_head = q.shape[-1]
        q, k, v = (F.pad(x, (0, 8)) for x in (q, k, v))
        out = torch.cat([out, -d_lse[..., None], out.new_zeros(*out.shape[:-1], 7)], dim=-1)
        d_out = F.pad(torch.cat([d_out, torch.ones_like(d_lse)[..., None]], dim=-1), (0, 7))
        dq, dk, dv = _flash_backward(d_out, q, k, v, out, lse, 0.0, True, scale=ctx.scale)
        return dq[..., :d_head], dk[..., :d_head], dv[..., :d_head], None


def _masked_scores(q: Tensor, k: Tensor, start: int, scale: float) -> Tensor:
    """Float32 scores ``[B, H, block, T]`` of a block of queries that starts at position ``start``."""
    scores = torch.matmul(q, k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    query = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
    return scores.masked_fill(torch.arange(k.shape[2], device=q.device)[None] > query, -torch.inf)


class _BlockwiseLSE(torch.autograd.Function):
    """Log-sum-exp of causal scores, a block of queries at a time, recomputed in the backward pass: O(T·block) memory.

    For devices whose fused kernels do not hand out a differentiable log-sum-exp.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float) -> Tensor:
        blocks = enumerate(q.split(_QUERY_BLOCK, dim=2))
        lse = torch.cat([_masked_scores(b, k, i * _QUERY_BLOCK, scale).logsumexp(-1) for i, b in blocks], dim=2)
        ctx.save_for_backward(q, k, lse)
        ctx.scale = scale
        return lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, lse = ctx.saved_tensors
        dq, dk = torch.empty_like(q), torch.zeros_like(k)
        for start in range(0, q.shape[2], _QUERY_BLOCK):
            rows = slice(start, start + _QUERY_BLOCK)
            weights = (_masked_scores(q[:, :, rows], k, start, ctx.scale) - lse[:, :, rows, None]).exp()
            d_scores = (weights * grads[0][:, :, rows, None] * ctx.scale).to(q.dtype)
            dq[:, :, rows] = d_scores @ k
            dk += d_scores.transpose(-1, -2) @ q[:, :, rows]
        return dq, dk, None


def attention_with_lse(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal softmax attention: output ``[B, H, T, K]`` and log-sum-exp of the scaled scores ``[B, H, T]``.

    Both carry gradients. The log-sum-exp is float32 or wider whatever the inputs are.
    """
    if q_BHTK.device.type == "cpu":
        return _FlashCPU.apply(q_BHTK, k_BHTK, v_BHTK, scale)
    out = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, scale=scale)
    return out, _BlockwiseLSE.apply(q_BHTK, k_BHTK, scale)


def causal_lse(q_BHTK: Tensor, k_BHTK: Tensor, scale: float) -> Tensor:
    """Log-sum-exp of causal scores ``scale · q·k``, ``[B, H, T]``, float32 or wider, differentiable."""
    if q_BHTK.device.type == "cpu":
        # The kernel wants values; what they are does not matter to the log-sum-exp.
        return _FlashCPU.apply(q_BHTK, k_BHTK, torch.zeros_like(k_BHTK), scale)[1]
    return _BlockwiseLSE.apply(q_BHTK, k_BHTK, scale)


def effective_tokens(q_BHTK: Tensor, k_BHTK: Tensor, lse_BHT: Tensor, scale: float) -> Tensor:
    """``n_eff(t) = 1 / Σ_j a[t,j]²`` of causal softmax attention, ``[B, H, T]`` (definitions §6).

    ``Σ_j a² = exp(lse(2·s) − 2·lse(s))``. The difference of two log-sum-exps loses 5–73 % in bf16, so queries and keys
    are taken to float32 for it.
    """
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        if q_BHTK.dtype != wide:
            lse_BHT = causal_lse(q_BHTK.to(wide), k_BHTK.to(wide), scale)
        return (2 * lse_BHT - causal_lse(q_BHTK.to(wide), k_BHTK.to(wide), 2 * scale)).exp()
