"""Notation for bits of weights and of activations (definitions §14)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import UsageError
from ...models.changes.round_to_nearest import WHOLE

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
