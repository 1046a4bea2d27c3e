"""RMSNorm (arXiv 1910.07467) over the last axis.

torch has one kernel for it on a GPU. On a CPU its operators pass over the whole input twelve times for both directions,
and keep the normalised input beside the input. Here a training pass keeps the input and one number per row, and works
on as many rows at a time as a cache holds.

Legend: N rows, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention.fused.kernels import trains_on_cpu

#: Numbers that each thread processes at a time: as many as a core's cache holds.
_BLOCK = 1 << 18


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Compute ``x / sqrt(mean(x²) + eps) · gain``, in the dtype of ``x`` and computed in float32 or wider.

    Args:
        x: ``[…, D]``.
        gain: ``[D]``, in the dtype of ``x``.
        eps: added to the mean square.
    """
    if trains_on_cpu(x, gain):
        normed: Tensor = _RMSNorm.apply(x, gain, eps)
        return normed
    return F.rms_norm(x, gain.shape, gain, eps)


def _blocks(*tensors_ND: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, _BLOCK * torch.get_num_threads() // tensors_ND[0].shape[-1])
    return zip(*(tensor.split(rows) for tensor in tensors_ND), strict=True)


class _RMSNorm(torch.autograd.Function):
    """Autograd function whose values are those of ``F.rms_norm``, bit for bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        x_ND, wide = x.reshape(-1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
        y_ND, scale_N1 = torch.empty_like(x_ND), x_ND.new_empty(len(x_ND), 1, dtype=wide)
        for x_RD, y_RD, scale_R1 in _blocks(x_ND, y_ND, scale_N1):
            x_RD = x_RD.to(wide)
            torch.rsqrt(x_RD.square().mean(-1, keepdim=True).add_(eps), out=scale_R1)
            torch.mul(x_RD * scale_R1, gain_D, out=y_RD)
        ctx.save_for_backward(x, gain_D, scale_N1)
        return y_ND.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain_D, scale_N1 = ctx.saved_tensors
        wide, width = scale_N1.dtype, x.shape[-1]
        x_ND, dy_ND = x.reshape(-1, width), dy.reshape(-1, width)
        dx_ND, dgain_D = torch.empty_like(x_ND), torch.zeros_like(gain_D, dtype=wide)
        for x_RD, dy_RD, scale_R1, dx_RD in _blocks(x_ND, dy_ND, scale_N1, dx_ND):
            normed_RD, dy_RD = x_RD.to(wide) * scale_R1, dy_RD.to(wide)
            products_RD = dy_RD * normed_RD
            dgain_D += products_RD.sum(0)
            along_R1 = products_RD.mul_(gain_D).sum(-1, keepdim=True).div_(-width)
            torch.mul((dy_RD * gain_D).addcmul_(normed_RD, along_R1), scale_R1, out=dx_RD)
        return dx_ND.view(x.shape), dgain_D.to(gain_D.dtype), None
