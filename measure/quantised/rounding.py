"""Rounding to the nearest level of a symmetric grid, and the notation for bits of weights and activations (definitions
§14).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import UsageError

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


# ---------------------------------------------------------------- notation for bits

_LEAST, _MOST = 2, 8
_SETTING = re.compile(r"w(\d+)a(\d+)", re.ASCII)


@dataclass(frozen=True)
class Bits:
    """Bits of weights and of activations."""

    weights: int
    activations: int

    def __str__(self) -> str:
        return f"w{self.weights}a{self.activations}"


def read_bits(text: str) -> list[Bits]:
    """Read settings such as ``w8a8,w4a16``, in their order.

    Raises:
        UsageError: one is invalid, or occurs twice.
    """
    found: list[Bits] = []
    for part in text.split(","):
        match = _SETTING.fullmatch(part.strip())
        bits = Bits(int(match[1]), int(match[2])) if match else None
        if bits is None or not all(_LEAST <= n <= _MOST or n == WHOLE for n in (bits.weights, bits.activations)):
            raise UsageError(
                f"--bits {text}: {part!r} is no setting; give bits of weights and activations, {_LEAST} to {_MOST} or "
                f"{WHOLE} for not rounded, such as w8a8,w4a16,w4a4"
            )
        if bits in found:
            raise UsageError(f"--bits {text}: {bits} stands there twice; give it once")
        found.append(bits)
    return found
