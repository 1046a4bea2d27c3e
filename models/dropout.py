"""Dropout whose masks are a function of sample, place, position and channel. No random state is kept.

So a mask stays the same when a block is recomputed, when a run resumes from a checkpoint, and for any split of a batch
into processes and micro-batches. No torch generator is read or advanced.

Legend: B sequences, R rows of one sequence (positions, or queries of heads), N elements of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .config import DropoutConfig

#: Multipliers of MurmurHash3's last step, as signed 32-bit numbers; places of one model by name.
_MURMUR_A, _MURMUR_B = -2048144789, -1028477387
_DROPPED_AT = {"embedding": 1, "attention": 2, "mlp": 3, "weights": 4}
_DRAWS = 1 << 31


def _murmur(x: Tensor) -> Tensor:
    """Apply MurmurHash3's last step on int32: every bit of the result depends on every bit of ``x``."""
    # A shift of a negative number fills in ones: they are masked.
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MURMUR_A
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _MURMUR_B
    return x ^ ((x >> 16) & 0xFFFF)


@dataclass(frozen=True)
class Dropout:
    """Masks of one training pass."""

    rates: DropoutConfig
    key_B: Tensor
    """Key of each sequence's masks, int32."""
    layer: int = 0
    """The block, from 1; 0 before all of them."""
    position_T: Tensor | None = None
    """Positions of this process's part of the sequences; None: they are whole."""
    n_positions: int | None = None
    """Length of whole sequences of which a part is passed."""

    def in_block(self, layer: int) -> Dropout:
        """Return the masks of a block."""
        return replace(self, layer=layer)

    def of_part(self, position_T: Tensor, n_positions: int) -> Dropout:
        """Return the masks of these positions of sequences of ``n_positions``."""
        return replace(self, position_T=position_T, n_positions=n_positions)

    def of_stream(self, x_BTD: Tensor, place: str) -> Tensor:
        """Drop channels of ``x`` and divide the others by 1 minus the rate; place is ``embedding``, ``attention`` or
        ``mlp``.
        """
        rate = self.rates.embedding if place == "embedding" else self.rates.residual
        if not rate:
            return x_BTD
        if self.position_T is None:
            row_R = torch.arange(x_BTD.shape[1], dtype=torch.int32, device=x_BTD.device)
        else:
            row_R = self.position_T.int()
        return x_BTD * self._factor(rate, place, row_R, x_BTD)

    def of_weights(self, weights_BHRS: Tensor, start: int, n_queries: int) -> Tensor:
        """Drop attention weights in the same way, for the queries of positions from ``start`` on, of ``n_queries``."""
        if not self.rates.attention:
            return weights_BHRS
        head_H, query_R = (
            torch.arange(first, first + n, dtype=torch.int32, device=weights_BHRS.device)
            for first, n in ((0, weights_BHRS.shape[1]), (start, weights_BHRS.shape[2]))
        )
        flat = weights_BHRS.flatten(1, 2)
        row_R = (head_H[:, None] * (self.n_positions or n_queries) + query_R).flatten()
        return (flat * self._factor(self.rates.attention, "weights", row_R, flat)).view_as(weights_BHRS)

    @torch.no_grad()
    def _factor(self, rate: float, place: str, row_R: Tensor, x_BRN: Tensor) -> Tensor:
        """Return 0 for dropped elements, else ``1 / (1 − rate)``, in the type of ``x``."""
        numbers_N = _murmur(torch.arange(x_BRN.shape[2], dtype=torch.int32, device=x_BRN.device))
        site_B = _murmur(self.key_B + (8 * self.layer + _DROPPED_AT[place]))
        row_BR = _murmur(site_B[:, None] + row_R)
        drawn_BRN = _murmur(row_BR[..., None] + numbers_N) & (_DRAWS - 1)
        return (drawn_BRN >= int(rate * _DRAWS)).to(x_BRN.dtype) / (1 - rate)


def keys_of_samples(seed: int, numbers: Iterable[int]) -> np.ndarray:
    """Hash the numbers of training samples, in the order of training, to keys of their masks, int32."""
    words = (hashlib.sha256(f"birthmark/dropout/1\0{seed}\0{number}".encode()).digest()[:4] for number in numbers)
    return np.frombuffer(b"".join(words), dtype="<i4").astype(np.int32)
