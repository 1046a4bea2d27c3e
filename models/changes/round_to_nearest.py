"""Rounding to the nearest level of a symmetric grid (definitions §14)."""

from __future__ import annotations

import torch
from torch import Tensor

#: Bits from which on nothing is rounded: the model's own precision.
WHOLE = 16


def rounded(x: Tensor, n_bits: int, dim: int) -> Tensor:
    """Round ``x`` to a symmetric grid of ``2^n − 1`` levels: ``Δ·round(x/Δ)``, ``Δ = max|x| / (2^(n−1) − 1)`` along
    ``dim``.

    Args:
        x: weights, or activations.
        n_bits: 2 to 8; `WHOLE` leaves ``x`` unchanged.
        dim: axis that shares one Δ: the inputs of one output channel of weights, the channels of one token of
            activations.

    Returns:
        The same shape and dtype; computed in float32 or wider.
    """
    if n_bits == WHOLE:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    step = wide.abs().amax(dim, keepdim=True) / (2 ** (n_bits - 1) - 1)
    # A row of zeros stays one.
    return (wide / step.masked_fill(step == 0, 1.0)).round_().mul_(step).to(x.dtype)
