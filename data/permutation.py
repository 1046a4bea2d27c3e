"""Pseudo-random order that needs no memory: the place of sample ``i`` is computed, not stored."""

from __future__ import annotations

import numpy as np

from .streams import stream_key

_ROUNDS = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def permuted(positions: np.ndarray, size: int, *words: str | int) -> np.ndarray:
    """Map ``positions`` through a keyed permutation of ``range(size)``.

    Args:
        positions: integers in ``[0, size)``, any shape.
        size: number of things permuted, at least 1.
        words: the key; another key gives an unrelated permutation.

    Returns:
        int64, the shape of ``positions``.

    A Feistel network permutes the smallest square power of two that holds ``size``; a value that lands outside
    ``range(size)`` is sent on until it lands inside (cycle-walking), which keeps the whole a bijection. Time and
    memory do not grow with ``size``.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    round_keys = np.frombuffer(stream_key("permutation", *words), dtype="<u8")[:_ROUNDS]
    walking = positions.reshape(-1).astype(np.uint64)
    result = np.empty(walking.shape, dtype=np.int64)
    where = np.arange(walking.size)
    while where.size:
        walking = _feistel(walking, half, mask, round_keys)
        inside = walking < np.uint64(size)
        result[where[inside]] = walking[inside].astype(np.int64)
        where, walking = where[~inside], walking[~inside]
    return result.reshape(positions.shape)


def _feistel(values: np.ndarray, half: np.uint64, mask: np.uint64, round_keys: np.ndarray) -> np.ndarray:
    left, right = values >> half, values & mask
    for key in round_keys:
        mixed = (right ^ key) * _MULTIPLIER
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MULTIPLIER
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << half) | right
