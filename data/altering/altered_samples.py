"""Samples changed on purpose, for studies of the data: tokens at given places, and a few samples read again and again.

Both are ablations of *When Attention Sink Emerges in Language Models* (arXiv 2410.10781, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...errors import UsageError
from ..batches import BatchSource
from ..streams import uniforms
from .token_places import RANDOM


class AlteredSamples:
    """A source of samples with tokens set at given positions, or of its first samples only. See `BatchSource`.

    Args:
        source: source of the samples.
        places: position → token, or `RANDOM`. Random tokens depend only on ``seed``, ``split``, position and sample.
        split: ``train`` or ``val``.
        seed: seed of random tokens: ``data_seed``.
        first: number of samples to use, repeated in the same order; None: all.

    Raises:
        UsageError: a position or a token that the samples do not have.
    """

    def __init__(
        self, source: BatchSource, places: Mapping[int, int | str], split: str, seed: int, first: int | None = None
    ) -> None:
        for position, token in places.items():
            if position >= source.seq_len:
                raise UsageError(
                    f"data.tokens_at: there is no position {position}: sequences have {source.seq_len} tokens"
                )
            if token != RANDOM and int(token) >= source.vocab_size:
                raise UsageError(f"data.tokens_at: there is no token {token}: the vocabulary has {source.vocab_size}")
        self.source, self.places, self.split, self.seed = source, dict(places), split, seed
        self.seq_len, self.vocab_size = source.seq_len, source.vocab_size
        self.n_tokens = source.n_tokens
        self.n_samples = source.n_samples if first is None else min(first, source.n_samples or first)
        self._repeats = first is not None

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """See `BatchSource.batch`."""
        if not self._repeats or self.n_samples is None:
            return self._placed(first_sample, n)
        parts, done = [], 0
        while done < n:
            at = (first_sample + done) % self.n_samples
            size = min(n - done, self.n_samples - at)
            parts.append(self._placed(at, size))
            done += size
        return np.concatenate(parts) if parts else self._placed(0, 0)

    def _placed(self, first: int, n: int) -> np.ndarray:
        samples_BT = self.source.batch(first, n).copy()
        for position, token in self.places.items():
            if token == RANDOM:
                drawn = uniforms("token at", self.split, self.seed, position, first=first, shape=(n, 1))[:, 0]
                samples_BT[:, position] = (drawn * self.vocab_size).astype(np.int64)
            else:
                samples_BT[:, position] = token
        return samples_BT
