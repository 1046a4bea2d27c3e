"""Rotary positions (arXiv 2104.09864): pairs of a head's channels turn by angles that grow with the position.

A training pass on a CPU keeps the angles alone and writes each result once, in the layout in which it is read next:
autograd would join and split the two halves of every head, and copy them each time. The values are the same to the bit.

Legend: B sequences, H heads, T positions, K head width; P pairs, of channels i and i + P.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .fused.kernels import trains_on_cpu


def rotate(x_BHTK: Tensor, rotation: Tensor | None) -> Tensor:
    """Turn the channel pairs of queries or keys ``[B, H, T, K]`` by the angles of a placement, in float32 or more.

    The result has the type of the input. Products in bf16 would make the error of the scores 1.6 times as large.

    Args:
        x_BHTK: queries or keys.
        rotation: cosines and sines ``[2, T, P]`` or ``[2, B, 1, T, P]``; None leaves ``x_BHTK`` as it is.
    """
    if rotation is None:
        return x_BHTK
    if trains_on_cpu(x_BHTK):
        turned_BHTK: Tensor = _Turn.apply(x_BHTK, rotation)
        return turned_BHTK
    return turned(x_BHTK, rotation)


def turned(x_BHTK: Tensor, rotation: Tensor) -> Tensor:
    """The formula of :func:`rotate`."""
    cos, sin = rotation
    half, wide = cos.shape[-1], torch.promote_types(x_BHTK.dtype, cos.dtype)
    rest = x_BHTK.shape[-1] - 2 * half
    # Split, whose backward pass is one concatenation; that of a slice fills a tensor with zeros.
    a, b, *still = x_BHTK.split([half, half, rest] if rest else half, dim=-1)
    a, b = a.to(wide), b.to(wide)
    both = (a * cos - b * sin, b * cos + a * sin)
    return torch.cat([*(x.to(x_BHTK.dtype) for x in both), *still], dim=-1)


def _turn_into(out_BHTK: Tensor, x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, wide = cos.shape[-1], torch.promote_types(x_BHTK.dtype, cos.dtype)
    a, b = x_BHTK[..., : 2 * half].to(wide).split(half, dim=-1)
    out_BHTK[..., :half] = (a * cos).sub_(b * sin)
    out_BHTK[..., half : 2 * half] = (b * cos).add_(a * sin)
    if 2 * half < x_BHTK.shape[-1]:
        out_BHTK[..., 2 * half :] = x_BHTK[..., 2 * half :]
    return out_BHTK


class _Turn(torch.autograd.Function):
    """The gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.strides = torch.empty_like(x_BHTK, device="meta").stride()
        return _turn_into(torch.empty_like(x_BHTK, memory_format=torch.contiguous_format), x_BHTK, *rotation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_BHTK: Tensor) -> tuple[Tensor, None]:
        cos, sin = ctx.saved_tensors[0]
        # As the map that gave the queries or keys laid them out: its own gradients read them so.
        dx_BHTK = torch.empty_strided(d_BHTK.shape, ctx.strides, dtype=d_BHTK.dtype, device=d_BHTK.device)
        return _turn_into(dx_BHTK, d_BHTK, cos, -sin), None
