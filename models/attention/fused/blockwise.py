"""Causal attention in bf16 on CPU as matrix products, a block of queries at a time, with float32 scores.

torch's fused kernel reaches an eighth of the machine's bf16 matrix products there; these take about 0.6 of its time
(benchmarks/results/attention_cost.md). They are registered operators, so that a compiled graph calls them unchanged.

Legend: N sequences and key/value heads, R query heads that share one, T positions, K head width, V that of values; M
queries of a block (all R heads in turn), S keys that they see between them.

With ``Δ = rowsum(dO ∘ O)``, ``g`` the gradient of the log-sum-exp and ``h`` that of the row's sum of squared weights
``Σp²``, the score gradient is ``p ∘ (dp − Δ + g + 2h·(p − Σp²))``, and each row of it adds up to ``g``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# ---------------------------------------------------------------- row weights
# Rows of explicit weights that depend on all scores of a row: softmax and its relatives.
#
# Each function takes scores ``[B, H, R, S]``, a mask of seen keys, and the scores of extra keys ``[B, H, R, 1]`` that
# every query sees. It returns weights, 0 where unseen, and the shares of the extra keys.

#: Keeps a row of softpick whose scores are all 0 from 0/0: that of the authors' code.
_SOFTPICK_EPS = 1e-8


def _joined(scores: Tensor, seen: Tensor, extra: list[Tensor]) -> Tensor:
    return torch.cat([scores.masked_fill(~seen, -torch.inf), *extra], dim=-1)


def _apart(weights: Tensor, n_extra: int) -> tuple[Tensor, list[Tensor]]:
    n_keys = weights.shape[-1] - n_extra
    return weights[..., :n_keys], [weights[..., n_keys + i, None] for i in range(n_extra)]


def softmax_rows(scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Apply a softmax over seen and extra keys."""
    return _apart(_joined(scores, seen, extra).softmax(-1), len(extra))


def softmax_with_lse_(scores: Tensor) -> Tensor:
    """Make weights of scores, in place, by a softmax along the last axis; the log-sum-exp of the scores of each row.

    The largest score s has the weight exp(s − lse), which gives the log-sum-exp without another pass of exponentials.
    """
    largest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    return largest.sub_(scores.amax(-1).log_())


def clipped_rows(
    scores: Tensor, seen: Tensor, extra: list[Tensor], zeta: float, gamma: float
) -> tuple[Tensor, list[Tensor]]:
    """Apply a softmax, stretch it from ``gamma`` (at most 0) to ``zeta`` (at least 1) and clip it to 0 … 1 (arXiv
    2306.12929).
    """
    stretched = (zeta - gamma) * _joined(scores, seen, extra).softmax(-1) + gamma
    return _apart(stretched.clamp(0, 1), len(extra))


def softpick_rows(scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Compute ``relu(exp(s) − 1) / (Σ |exp(s) − 1| + ε)`` over seen and extra keys (arXiv 2504.20966)."""
    scores = _joined(scores, seen, extra)
    # Both parts of the fraction are divided by exp(level), which keeps each exponential at most 1.
    level = scores.detach().amax(-1, keepdim=True).clamp_min(0)
    excess = ((scores - level).exp() - (-level).exp()).masked_fill(scores == -torch.inf, 0)
    return _apart(excess.relu() / (excess.abs().sum(-1, keepdim=True) + _SOFTPICK_EPS), len(extra))


# ---------------------------------------------------------------- blocks of queries

_BLOCK = 128
#: Elements of bf16 weights that one attention may keep for its backward pass; beyond, they are computed again.
_KEPT = 1 << 24
#: bf16 numbers that hold one float32 number between them, and the channels that they take, with zeros to a round width.
_PARTS, _WIDTH = 3, 8


def _rows(length: int) -> Iterator[tuple[int, int]]:
    """Yield first and one past the last query of every block."""
    return ((start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def _scores(q_NMK: Tensor, k_wide_NTK: Tensor, start: int, stop: int, scale: float) -> Tensor:
    """Compute scaled float32 scores ``[N, M, stop]``, −inf at keys that a query does not see."""
    with torch.autocast("cpu", enabled=False):
        scores = torch.bmm(q_NMK.float() * scale, k_wide_NTK[:, :stop].transpose(1, 2))
    # Adding is quicker than filling.
    unseen = scores.new_full((stop - start, stop - start), -torch.inf).triu_(1)
    scores.view(len(scores), -1, stop - start, stop)[..., start:].add_(unseen)
    return scores


def _block(x_NRT_: Tensor, start: int, stop: int) -> Tensor:
    """Select the queries of a block, over all heads: ``[N, R, T, …] → [N, M, …]``."""
    return x_NRT_[:, :, start:stop].flatten(1, 2)


def _kept_blocks(kept: Tensor, n: int, length: int) -> Iterator[Tensor]:
    """Yield the blocks of weights ``[N, M, S]`` from their buffer in turn."""
    offset, n_heads = 0, kept.numel() // _n_kept(1, length)
    for start, stop in _rows(length):
        size = n_heads * (stop - start) * stop
        yield kept[offset : offset + size].view(n, -1, stop)
        offset += size


def _n_kept(n_heads: int, length: int) -> int:
    return n_heads * sum((stop - start) * stop for start, stop in _rows(length))


def _in_parts(x_NRT: Tensor) -> Tensor:
    """Split float32 numbers into channels ``[N, R, T, 8]``: three bf16 numbers that add up to each, then zeros."""
    parts, rest = [], x_NRT
    for _ in range(_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return F.pad(torch.stack(parts, dim=-1), (0, _WIDTH - _PARTS))


@torch.library.custom_op("birthmark::causal_blocks", mutates_args=(), device_types="cpu")
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_sums: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, n_shared, length, _ = q.shape
    k_wide, out = k.float(), q.new_empty(*q.shape[:3], v.shape[-1])
    lse, squares = (q.new_zeros(q.shape[:3], dtype=torch.float32) for _ in range(2))
    kept = q.new_empty(_n_kept(n * n_shared, length) if keep else 0)
    blocks = _kept_blocks(kept, n, length) if keep else None
    for start, stop in _rows(length):
        scores = _scores(_block(q, start, stop), k_wide, start, stop, scale)
        by_head, rows = (n, n_shared, stop - start), (slice(None), slice(None), slice(start, stop))
        if wants_sums or not keep:
            lse[rows] = softmax_with_lse_(scores).view(by_head)
        else:
            torch.softmax(scores, -1, out=scores)
        if wants_sums:
            squares[rows] = torch.linalg.vector_norm(scores, dim=-1).square_().view(by_head)
        weights = scores.to(q.dtype) if blocks is None else next(blocks).copy_(scores)
        out[rows] = torch.bmm(weights, v[:, :stop]).view(*by_head, -1)
    return out, lse, squares, kept


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_sums: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    kept = q.new_empty(_n_kept(q.shape[0] * q.shape[1], q.shape[2]) if keep else 0)
    lse, squares = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))
    return q.new_empty(*q.shape[:3], v.shape[-1]), lse, squares, kept


@torch.library.custom_op("birthmark::causal_blocks_backward", mutates_args=(), device_types="cpu")
def _backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    d_squares: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    squares: torch.Tensor,
    kept: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, n_shared, length, _ = q.shape
    # If one key takes most of a row, dp and Δ are almost equal, and rounding dominates the gradient. So Δ − g is
    # subtracted inside the product that gives dp, whose sums are float32. Other rounding errors, above all those of the
    # output in Δ, are removed afterwards: the score gradients of a row must add up to g.
    shift = -(d_out.float() * out.float()).sum(-1)
    if d_lse is not None:
        shift += d_lse
    if d_squares is not None:
        shift -= 2 * d_squares * squares
    d_out_shift = torch.cat([d_out, _in_parts(shift)], dim=-1)
    v_one = F.pad(F.pad(v, (0, _PARTS), value=1.0), (0, _WIDTH - _PARTS))
    twice = None if d_squares is None else (2 * d_squares)[..., None].to(q.dtype)
    blocks = _kept_blocks(kept, n, length) if kept.numel() else None
    k_wide = k.float() if blocks is None else k
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in _rows(length):
        q_NMK = _block(q, start, stop)
        if blocks is None:
            scores = _scores(q_NMK, k_wide, start, stop, scale)
            weights = scores.sub_(_block(lse, start, stop)[..., None]).exp_().to(q.dtype)
        else:
            weights = next(blocks)
        dv[:, :stop].baddbmm_(weights.transpose(1, 2), _block(d_out, start, stop))
        d_scores = torch.bmm(_block(d_out_shift, start, stop), v_one[:, :stop].transpose(1, 2))
        if twice is not None:
            d_scores.addcmul_(weights, _block(twice, start, stop))
        d_scores.mul_(weights)
        left = d_scores.sum(-1, keepdim=True).neg_()
        if d_lse is not None:
            left += _block(d_lse, start, stop)[..., None].to(q.dtype)
        d_scores.addcmul_(weights, left)
        dq_NMK = torch.baddbmm(q_NMK, d_scores, k[:, :stop], beta=0, alpha=scale)
        dq[:, :, start:stop] = dq_NMK.view(n, n_shared, stop - start, -1)
        dk[:, :stop].baddbmm_(d_scores.transpose(1, 2), q_NMK, alpha=scale)
    return dq, dk, dv


@_backward.register_fake
def _(
    d_out: torch.Tensor, d_lse: torch.Tensor | None, d_squares: torch.Tensor | None, *qkv_and_more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv_and_more[:3]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, _, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)  # that of the kept weights would be as large as they are


def _gradients(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, d_squares: Tensor | None, _kept: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, *more = ctx.saved_tensors  # once: under activation checkpointing each time would compute them again
    d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()
    with torch.autocast("cpu", enabled=False):
        return *_backward(d_out, d_lse, d_squares, q, k, v, out, *more, ctx.scale), None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def keeps_weights(q_BHTK: Tensor) -> bool:
    """Return True if the forward pass keeps weights for the backward pass: only then is the whole faster than the fused
    kernel.
    """
    return _n_kept(q_BHTK.shape[0] * q_BHTK.shape[1], q_BHTK.shape[2]) <= _KEPT


def causal_blocks(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float, wants_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, V]`` in bf16 and, on request, in float32 ``[B, H, T]``, the log-sum-exp of each
    query's scores and the sum of its squared weights.
    """
    shape = q_BHTK.shape
    k, v = (x.flatten(0, 1) for x in (k_BGTK, v_BGTK))
    q = q_BHTK.reshape(len(k), -1, *shape[2:])
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, lse, squares, _ = _forward(q, k, v, scale, wants_sums, needs_gradient and keeps_weights(q_BHTK))
    return out.view(*shape[:3], -1), lse.view(shape[:3]), squares.view(shape[:3])
