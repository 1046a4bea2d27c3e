"""Softmax attention that also returns its log-sum-exp, differentiable in both, without a T×T matrix.

The log-sum-exp of a row's scores gives every weight of the row afterwards, ``a[t,j] = exp(s[t,j] − lse[t])``, and two
attentions over different keys merge by theirs, so all code that needs weights, or merges a row from several attentions
(windows, prefixes, extra keys), uses it in place of the matrix.

Legend: B sequences, H heads, T positions, K head width. Keys and values have as many heads as queries here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .blockwise import causal_blocks, keeps_weights

#: Type of the device that kernels are chosen for; by default the one that tensors lie on. Set while a pass is planned.
chosen_for: str | None = None

_QUERY_BLOCK = 256
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _on_cpu(x: Tensor) -> bool:
    return (chosen_for or x.device.type) == "cpu"


class _FlashCPU(torch.autograd.Function):
    """The fused CPU kernel behind ``scaled_dot_product_attention``, with a gradient through its log-sum-exp too.

    The score gradient of (out, lse) is ``p ∘ (dp − Δ + g)`` with ``Δ = rowsum(dO ∘ O)`` and ``g`` the gradient of lse.
    The fused backward computes ``p ∘ (dp − Δ)``, so one more channel whose value is 0, output −g and upstream
    gradient 1 turns its Δ into ``Δ − g`` and leaves ``dp`` alone.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse = _flash(q, k, v, 0.0, causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        d_out, d_lse = grads[0].to(q.dtype), grads[1].to(q.dtype)
        d_head = q.shape[-1]
        q, k, v = (F.pad(x, (0, 8)) for x in (q, k, v))
        out = torch.cat([out, -d_lse[..., None], out.new_zeros(*out.shape[:-1], 7)], dim=-1)
        d_out = F.pad(torch.cat([d_out, torch.ones_like(d_lse)[..., None]], dim=-1), (0, 7))
        dq, dk, dv = _flash_backward(d_out, q, k, v, out, lse, 0.0, ctx.causal, scale=ctx.scale)
        return dq[..., :d_head], dk[..., :d_head], dv[..., :d_head], None, None


def _block_scores(q: Tensor, k: Tensor, start: int, scale: float, causal: bool) -> Tensor:
    """Float32 scores ``[B, H, block, T]`` of a block of queries that starts at position ``start``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) * scale
    if not causal:
        return scores
    query = torch.arange(start, start + q.shape[2], device=q.device)[:, None]
    return scores.masked_fill(torch.arange(k.shape[2], device=q.device)[None] > query, -torch.inf)


class _BlockwiseLSE(torch.autograd.Function):
    """Log-sum-exp of scores, a block of queries at a time, recomputed in the backward pass: O(T·block) memory.

    For devices whose fused kernels do not hand out a differentiable log-sum-exp.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
        blocks = enumerate(q.split(_QUERY_BLOCK, dim=2))
        lse = torch.cat([_block_scores(b, k, i * _QUERY_BLOCK, scale, causal).logsumexp(-1) for i, b in blocks], dim=2)
        ctx.save_for_backward(q, k, lse)
        ctx.scale, ctx.causal = scale, causal
        return lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, lse = ctx.saved_tensors
        dq, dk = torch.empty_like(q), torch.zeros_like(k)
        for start in range(0, q.shape[2], _QUERY_BLOCK):
            rows = slice(start, start + _QUERY_BLOCK)
            weights = (_block_scores(q[:, :, rows], k, start, ctx.scale, ctx.causal) - lse[:, :, rows, None]).exp()
            d_scores = (weights * grads[0][:, :, rows, None] * ctx.scale).to(q.dtype)
            dq[:, :, rows] = d_scores @ k
            dk += d_scores.transpose(-1, -2) @ q[:, :, rows]
        return dq, dk, None, None


def attention_with_lse(
    q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, scale: float, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Softmax attention: output ``[B, H, T, K]`` and log-sum-exp of the scaled scores ``[B, H, T]``.

    Both carry gradients. The log-sum-exp is float32 or wider whatever the inputs are.
    """
    if _on_cpu(q_BHTK):
        if causal and q_BHTK.dtype == torch.bfloat16:
            return causal_blocks(q_BHTK, k_BHSK, v_BHSK, scale, wants_sums=True)[:2]
        return _FlashCPU.apply(q_BHTK, k_BHSK, v_BHSK, scale, causal)
    out = F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSK, is_causal=causal, scale=scale)
    return out, _BlockwiseLSE.apply(q_BHTK, k_BHSK, scale, causal)


def attention_with_squares(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal :func:`attention_with_lse`, and each query's sum of squared weights ``Σ_j a²`` ``[B, H, T]``."""
    if _on_cpu(q_BHTK) and q_BHTK.dtype == torch.bfloat16:
        return causal_blocks(q_BHTK, k_BHTK, v_BHTK, scale, wants_sums=True)
    out, lse = attention_with_lse(q_BHTK, k_BHTK, v_BHTK, scale)
    return out, lse, (visible_lse(q_BHTK, k_BHTK, 2 * scale) - 2 * lse).exp()


def causal_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float) -> Tensor:
    """The output alone of causal softmax attention, ``[B, H, T, K]``, on the fastest kernel that there is."""
    if _on_cpu(q_BHTK) and q_BHTK.dtype == torch.bfloat16 and keeps_weights(q_BHTK):
        return causal_blocks(q_BHTK, k_BHTK, v_BHTK, scale, wants_sums=False)[0]
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, scale=scale)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the (output, log-sum-exp) of each."""
    (a_BHTK, lse_a_BHT), (b_BHTK, lse_b_BHT) = first, second
    lse_BHT = torch.logaddexp(lse_a_BHT, lse_b_BHT)
    share_a, share_b = ((x - lse_BHT).exp()[..., None].to(a_BHTK.dtype) for x in (lse_a_BHT, lse_b_BHT))
    return a_BHTK * share_a + b_BHTK * share_b, lse_BHT


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Every query sees itself and the ``window − 1`` keys before it: O(T·window).

    Positions are split into chunks as long as the window. A query sees the keys of its own chunk up to itself, which is
    causal attention, and of the chunk before those further on than its own place there, which is causal attention with
    both orders reversed and the queries one step behind.
    """
    n_heads, length = q.shape[1:3]
    n_chunks = -(-length // window)
    # Chunks [B, H, n_chunks, window, K]; what fills the last one is seen by no query that is kept.
    q, k, v = (F.pad(x, (0, 0, 0, n_chunks * window - length)).unflatten(2, (n_chunks, window)) for x in (q, k, v))
    own = attention_with_lse(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), scale)
    out, lse = (x.unflatten(1, (n_heads, n_chunks)) for x in own)
    if n_chunks > 1 and window > 1:
        q_late = q[:, :, 1:].flip(3)[..., 1:, :].flatten(1, 2)
        k_early, v_early = (x[:, :, :-1].flip(3)[..., :-1, :].flatten(1, 2) for x in (k, v))
        before = attention_with_lse(q_late, k_early, v_early, scale)
        out_b, lse_b = (x.unflatten(1, (n_heads, n_chunks - 1)).flip(3) for x in before)
        # The first chunk has none before it, and the last query of a chunk sees nothing of it.
        padded = F.pad(out_b, (0, 0, 0, 1, 1, 0)), F.pad(lse_b, (0, 1, 1, 0), value=-torch.inf)
        out, lse = merge((out, lse), padded)
    return out.flatten(2, 3)[:, :, :length], lse.flatten(2, 3)[:, :, :length]


def visible_attention(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float, window: int | None = None, prefix: int | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`attention_with_lse` where a query t sees the keys t − window + 1 … t, and the first ``prefix`` positions
    one another: each a fused attention of its own."""
    length = q_BHTK.shape[2]
    if window is not None and window < length:
        out, lse = _windowed(q_BHTK, k_BHTK, v_BHTK, scale, window)
    else:
        out, lse = attention_with_lse(q_BHTK, k_BHTK, v_BHTK, scale)
    if prefix is None:
        return out, lse
    q, k, v = (x[:, :, :prefix].contiguous() for x in (q_BHTK, k_BHTK, v_BHTK))
    out_p, lse_p = attention_with_lse(q, k, v, scale, causal=False)
    return torch.cat([out_p, out[:, :, prefix:]], dim=2), torch.cat([lse_p, lse[:, :, prefix:]], dim=2)


def visible_lse(
    q_BHTK: Tensor, k_BHTK: Tensor, scale: float, window: int | None = None, prefix: int | None = None
) -> Tensor:
    """The log-sum-exp of :func:`visible_attention` alone, ``[B, H, T]``, float32 or wider, differentiable."""
    if not _on_cpu(q_BHTK) and window is None and prefix is None:
        return _BlockwiseLSE.apply(q_BHTK, k_BHTK, scale, True)
    # The kernels want values; what they are does not matter to the log-sum-exp.
    return visible_attention(q_BHTK, k_BHTK, torch.zeros_like(k_BHTK), scale, window, prefix)[1]
