"""Causal attention in bf16 on CPU as matrix products, a block of queries at a time, with float32 scores.

torch's fused kernel reaches an eighth of the machine's bf16 matrix products there; these take about 0.6 of its time
(benchmarks/results/attention_cost.md). Operators of their own, so that a compiled graph calls them as they are.

Legend: N = B·H sequences and heads, T positions, K head width. With ``Δ = rowsum(dO ∘ O)``, ``g`` the gradient of the
log-sum-exp and ``h`` that of the row's sum of squared weights ``Σp²``, the score gradient is
``p ∘ (dp − Δ + g + 2h·(p − Σp²))``, and each row of it adds up to ``g``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 128
#: Elements of bf16 weights that one attention may keep for its backward pass; beyond, they are computed again.
_KEPT = 1 << 24
#: bf16 numbers that hold one float32 number between them, and the channels that they take, with zeros to a round width.
_PARTS, _WIDTH = 3, 8


def _rows(length: int) -> Iterator[tuple[int, int]]:
    """First and one past the last query of every block."""
    return ((start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK))


def _scores(q_NTK: Tensor, k_wide_NTK: Tensor, start: int, stop: int, scale: float) -> Tensor:
    """Scaled float32 scores ``[N, stop − start, stop]``, −inf where a key is not seen."""
    with torch.autocast("cpu", enabled=False):
        scores = torch.bmm(q_NTK[:, start:stop].float(), k_wide_NTK[:, :stop].transpose(1, 2)).mul_(scale)
    unseen = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
    scores[:, :, start:].masked_fill_(unseen, -torch.inf)
    return scores


def _kept_blocks(kept: Tensor, n: int, length: int) -> Iterator[Tensor]:
    """The blocks of weights ``[N, rows, keys]`` in their buffer, one after the other."""
    offset = 0
    for start, stop in _rows(length):
        size = n * (stop - start) * stop
        yield kept[offset : offset + size].view(n, stop - start, stop)
        offset += size


def _n_kept(n: int, length: int) -> int:
    return n * sum((stop - start) * stop for start, stop in _rows(length))


def _in_parts(x_NT: Tensor) -> Tensor:
    """Float32 numbers as channels ``[N, T, 8]``: three bf16 numbers that add up to each, then zeros."""
    parts, rest = [], x_NT
    for _ in range(_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return F.pad(torch.stack(parts, dim=-1), (0, _WIDTH - _PARTS))


@torch.library.custom_op("birthmark::causal_blocks", mutates_args=(), device_types="cpu")
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_sums: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, length, _ = q.shape
    k_wide, out = k.float(), torch.empty_like(v)
    lse, squares = q.new_zeros((n, length), dtype=torch.float32), q.new_zeros((n, length), dtype=torch.float32)
    kept = q.new_empty(_n_kept(n, length) if keep else 0)
    blocks = _kept_blocks(kept, n, length) if keep else None
    for start, stop in _rows(length):
        scores = _scores(q, k_wide, start, stop, scale)
        if wants_sums or not keep:
            lse[:, start:stop] = scores.logsumexp(-1)
            scores.sub_(lse[:, start:stop, None]).exp_()
            squares[:, start:stop] = torch.linalg.vector_norm(scores, dim=-1).square_()
        else:
            torch.softmax(scores, -1, out=scores)
        weights = scores.to(q.dtype) if blocks is None else next(blocks).copy_(scores)
        out[:, start:stop] = torch.bmm(weights, v[:, :stop])
    return out, lse, squares, kept


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_sums: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, length, _ = q.shape
    kept = q.new_empty(_n_kept(n, length) if keep else 0)
    lse, squares = (q.new_empty((n, length), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(v), lse, squares, kept


@torch.library.custom_op("birthmark::causal_blocks_backward", mutates_args=(), device_types="cpu")
def _backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    d_squares: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    squares: torch.Tensor,
    kept: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, length, _ = q.shape
    # Where one key takes most of a row, dp and Δ are almost equal, and the gradient is what their rounding leaves. So
    # Δ − g is subtracted inside the product that gives dp, whose sums are float32; and what other roundings leave,
    # those of the output in Δ above all, is taken off afterwards: the score gradients of a row add up to g.
    shift = d_lse - 2 * d_squares * squares - (d_out.float() * out.float()).sum(-1)
    d_out_shift = torch.cat([d_out, _in_parts(shift)], dim=-1)
    v_one = F.pad(F.pad(v, (0, _PARTS), value=1.0), (0, _WIDTH - _PARTS))
    twice = (2 * d_squares)[..., None].to(q.dtype) if d_squares.any() else None
    blocks = _kept_blocks(kept, n, length) if kept.numel() else None
    k_wide = k.float() if blocks is None else k
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in _rows(length):
        if blocks is None:
            scores = _scores(q, k_wide, start, stop, scale)
            weights = scores.sub_(lse[:, start:stop, None]).exp_().to(q.dtype)
        else:
            weights = next(blocks)
        dv[:, :stop].baddbmm_(weights.transpose(1, 2), d_out[:, start:stop])
        d_scores = torch.bmm(d_out_shift[:, start:stop], v_one[:, :stop].transpose(1, 2))
        if twice is not None:
            d_scores.addcmul_(weights, twice[:, start:stop])
        d_scores.mul_(weights)
        left = d_lse[:, start:stop, None].to(q.dtype) - d_scores.sum(-1, keepdim=True)
        d_scores.addcmul_(weights, left)
        dq[:, start:stop].baddbmm_(d_scores, k[:, :stop], beta=0, alpha=scale)
        dk[:, :stop].baddbmm_(d_scores.transpose(1, 2), q[:, start:stop], alpha=scale)
    return dq, dk, dv


@_backward.register_fake
def _(
    d_out: torch.Tensor, d_lse: torch.Tensor, d_squares: torch.Tensor, *qkv_and_more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv_and_more[:3]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, _, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[3])


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor, d_squares: Tensor, _kept: Tensor) -> tuple[Tensor | None, ...]:
    with torch.autocast("cpu", enabled=False):
        return *_backward(d_out.contiguous(), d_lse, d_squares, *ctx.saved_tensors, ctx.scale), None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def keeps_weights(q_BHTK: Tensor) -> bool:
    """Whether the backward pass finds its weights kept: only then is all of it faster than the fused kernel."""
    return _n_kept(q_BHTK.shape[0] * q_BHTK.shape[1], q_BHTK.shape[2]) <= _KEPT


def causal_blocks(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float, wants_sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, H, T, K]`` in bf16, and if they are wanted, in float32 ``[B, H, T]``, the log-sum-exp of each
    query's scores and the sum of its squared weights."""
    shape = q_BHTK.shape
    q, k, v = (x.reshape(-1, *shape[2:]) for x in (q_BHTK, k_BHTK, v_BHTK))
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, lse, squares, _ = _forward(q, k, v, scale, wants_sums, needs_gradient and keeps_weights(q_BHTK))
    return out.view(shape), lse.view(shape[:3]), squares.view(shape[:3])
