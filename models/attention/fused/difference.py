"""Difference of the two softmaxes of differential attention (arXiv 2410.05258), and its norm.

On a GPU, in a pass that is not compiled, the kernels of ``difference_kernel.py`` read the outputs of both softmaxes
once and write what the output projection reads. Elsewhere torch's operators do it.

Legend: B sequences, H heads, T positions, K head width; heads 2i and 2i + 1 are a pair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....kernel_devices import fuses_rows
from .native import by_positions, whole_rows


def difference(sums: list[Tensor], share: Tensor) -> Tensor:
    """Subtract λ times the output of a pair's second softmax from that of its first.

    Args:
        sums: outputs of all heads with the values of the first and of the second head of each pair, ``[B, H, T, K]``.
        share: λ.

    Returns:
        Outputs ``[B, H, T, K]``, the heads of a position side by side, as what follows reads them.
    """
    # Views whose backward passes write each gradient once: that of a slice fills a tensor with zeros.
    of_each = [o_BHTK.unflatten(1, (-1, 2)).unbind(2) for o_BHTK in sums]
    differences = [first - share.to(first.dtype) * second for first, second in of_each]
    o_BTHK = torch.stack([x_BGTK.transpose(1, 2) for x_BGTK in differences], dim=3).flatten(2, 3)
    return o_BTHK.transpose(1, 2)


# ---------------------------------------------------------------- the kernels as operators
# Both are registered, so that a plan runs them on tensors without values.


@torch.library.custom_op("birthmark::normed_difference", mutates_args=())
def _normed(
    x: torch.Tensor, z: torch.Tensor, share: torch.Tensor, gain: torch.Tensor, eps: float, times: float
) -> torch.Tensor:
    from .difference_kernel import normed_difference_into

    y = by_positions(x, x.shape[-1])
    normed_difference_into(y, x, z, share, gain, eps, times)
    return y


@_normed.register_fake
def _(
    x: torch.Tensor, z: torch.Tensor, share: torch.Tensor, gain: torch.Tensor, eps: float, times: float
) -> torch.Tensor:
    return by_positions(x, x.shape[-1])


@torch.library.custom_op("birthmark::normed_difference_backward", mutates_args=())
def _gradients(
    d: torch.Tensor, x: torch.Tensor, z: torch.Tensor, share: torch.Tensor, gain: torch.Tensor, eps: float, times: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from .difference_kernel import gradients_into

    dx, dz = torch.empty_like(x), torch.empty_like(z)
    return dx, dz, *gradients_into(dx, dz, d, x, z, share, gain, eps, times)


@_gradients.register_fake
def _(
    d: torch.Tensor, x: torch.Tensor, z: torch.Tensor, share: torch.Tensor, gain: torch.Tensor, eps: float, times: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(z), torch.empty_like(share), torch.empty_like(gain)


# ---------------------------------------------------------------- with gradients


class _NormedDifference(torch.autograd.Function):
    """Autograd function of the normalised difference; its backward pass computes the difference again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, share: Tensor, gain: Tensor, eps: float, times: float) -> Tensor:
        ctx.types, ctx.numbers = (share.dtype, gain.dtype), (eps, times)
        share, gain = share.float(), gain.float().contiguous()
        ctx.save_for_backward(x, z, share, gain)
        y: Tensor = _normed(x, z, share, gain, eps, times)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        dx, dz, d_share, d_gain = _gradients(whole_rows(d), *ctx.saved_tensors, *ctx.numbers)
        of_share, of_gain = ctx.types
        return dx, dz, d_share.to(of_share), d_gain.to(of_gain), None, None


def normed_difference(sums: list[Tensor], share: Tensor, gain: Tensor, eps: float, times: float) -> Tensor | None:
    """Compute :func:`difference`, divide it by ``√(RMS² + eps)`` over both heads of each pair, and multiply it with a
    gain ``[2·K]`` and a number; None where no kernel does so.
    """
    if not all(map(fuses_rows, sums)):
        return None
    y: Tensor = _NormedDifference.apply(*sums, share, gain, eps, times)
    return y
