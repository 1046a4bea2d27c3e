"""Causal attention in bf16 on CPU as matrix products, a block of queries at a time, with float32 scores.

torch's fused kernel reaches an eighth of the machine's bf16 matrix products there; these take about 0.6 of its time
(benchmarks/results/attention_cost.md). Operators of their own, so that a compiled graph calls them as they are.

Legend: N = B·H sequences and heads, T positions, K head width. The score gradient is ``p ∘ (dp − Δ + g)`` with
``Δ = rowsum(dO ∘ O)`` and ``g`` the gradient of the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_BLOCK = 128
#: Elements of bf16 weights that one attention may keep for its backward pass; beyond, they are computed again.
_KEPT = 1 << 24


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


@torch.library.custom_op("birthmark::causal_blocks", mutates_args=(), device_types="cpu")
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_lse: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, length, _ = q.shape
    k_wide, out, lse = k.float(), torch.empty_like(v), q.new_zeros((n, length), dtype=torch.float32)
    kept = q.new_empty(_n_kept(n, length) if keep else 0)
    blocks = _kept_blocks(kept, n, length) if keep else None
    for start, stop in _rows(length):
        scores = _scores(q, k_wide, start, stop, scale)
        if wants_lse or not keep:
            lse[:, start:stop] = scores.logsumexp(-1)
            scores.sub_(lse[:, start:stop, None]).exp_()
        else:
            scores = scores.softmax(-1)
        weights = scores.to(q.dtype) if blocks is None else next(blocks).copy_(scores)
        out[:, start:stop] = torch.bmm(weights, v[:, :stop])
    return out, lse, kept


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, wants_lse: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, length, _ = q.shape
    kept = q.new_empty(_n_kept(n, length) if keep else 0)
    return torch.empty_like(v), q.new_empty((n, length), dtype=torch.float32), kept


@torch.library.custom_op("birthmark::causal_blocks_backward", mutates_args=(), device_types="cpu")
def _backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, length, _ = q.shape
    shift = (d_lse[..., None] - (d_out * out).sum(-1, keepdim=True, dtype=torch.float32)).to(q.dtype)
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
        d_scores = torch.bmm(d_out[:, start:stop], v[:, :stop].transpose(1, 2))
        d_scores.add_(shift[:, start:stop]).mul_(weights)
        dq[:, start:stop] = torch.bmm(d_scores, k[:, :stop])
        dk[:, :stop].baddbmm_(d_scores.transpose(1, 2), q[:, start:stop])
    return dq.mul_(scale), dk.mul_(scale), dv


@_backward.register_fake
def _(
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, _, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor, _kept: Tensor) -> tuple[Tensor | None, ...]:
    with torch.autocast("cpu", enabled=False):
        return *_backward(d_out.contiguous(), d_lse, *ctx.saved_tensors, ctx.scale), None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def keeps_weights(q_BHTK: Tensor) -> bool:
    """Whether the backward pass finds its weights kept: only then is all of it faster than the fused kernel."""
    return _n_kept(q_BHTK.shape[0] * q_BHTK.shape[1], q_BHTK.shape[2]) <= _KEPT


def causal_blocks(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, scale: float, wants_lse: bool
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, T, K]`` in bf16, and the float32 log-sum-exp of the scores ``[B, H, T]`` if it is wanted."""
    shape = q_BHTK.shape
    q, k, v = (x.reshape(-1, *shape[2:]) for x in (q_BHTK, k_BHTK, v_BHTK))
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, lse, _ = _forward(q, k, v, scale, wants_lse, needs_gradient and keeps_weights(q_BHTK))
    return out.view(shape), lse.view(shape[:3])
