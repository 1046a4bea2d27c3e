"""Random numbers as functions: words name a stream, and any part of it can be read without the rest."""

from __future__ import annotations

import hashlib

import numpy as np

_PER_BLOCK = 4  # 64-bit words per step of Philox's counter


def stream_key(*words: str | int) -> bytes:
    """Return 64 bytes that depend on every word and their order, and on nothing else."""
    name = "\x1f".join(str(word) for word in words)
    return hashlib.blake2b(name.encode(), digest_size=64, person=b"birthmark-data").digest()


def uniforms(*words: str | int, first: int, shape: tuple[int, int]) -> np.ndarray:
    """Return rows ``first`` to ``first + shape[0]`` of the stream that ``words`` name: float64 in [0, 1).

    ``shape`` is ``(rows, columns)``; a row depends on the words, its own number and ``columns``, so that any rows can
    be drawn alone. Read from Philox's raw words, whose values numpy keeps fixed across its versions.
    """
    rows, columns = shape
    blocks = -(-columns // _PER_BLOCK)
    key = int.from_bytes(stream_key(*words)[:16], "little")
    raw = np.random.Philox(key=key, counter=first * blocks).random_raw(rows * blocks * _PER_BLOCK)
    return (raw.reshape(rows, blocks * _PER_BLOCK)[:, :columns] >> np.uint64(11)) * 2.0**-53
