"""Samples of several sources as one source: in shares for training, in turn for validation. No state is kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..batches import FixedWindows, JoinedTokens, PlainCut, TokensOfSources
from ..nearby import Nearby
from .order import SourceOrder


class _Sources:
    """Samples of several sources of one ``seq_len``. See `birthmark.data.batches.BatchSource`."""

    def __init__(self, sources: Mapping[str, FixedWindows]) -> None:
        self.sources = dict(sources)
        self._windows = list(self.sources.values())
        self.seq_len = self._windows[0].seq_len
        self.vocab_size = max(source.vocab_size for source in self._windows)
        self._nearby = Nearby()
        # A call for each of eight sources costs .4 of the time of one for all.
        plain = [source.tokens for source in self._windows if type(source.cut) is PlainCut]
        tokens = [part for part in plain if isinstance(part, JoinedTokens)]
        self._together = TokensOfSources(tokens) if len(tokens) == len(self._windows) else None

    @property
    def n_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.n_tokens for source in self._windows)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source, and the number within it, of each global sample index: two int64 ``[n]``."""
        raise NotImplementedError

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """See `BatchSource.batch`."""
        if not n:
            return np.empty((0, self.seq_len + 1), dtype=np.int64)
        source_N, window_N = self._nearby.between(first_sample, first_sample + n, self._windows_of)
        if self._together is not None:
            starts_N = window_N * self.seq_len + self._together.first_S[source_N]
            out_NT = self._together.read(starts_N, self.seq_len + 1)
            if not self._together.may_hold_too_large(out_NT):
                return out_NT
        out_NT = np.empty((n, self.seq_len + 1), dtype=np.int64)
        for index in np.unique(source_N).tolist():
            here_N = source_N == index
            out_NT[here_N] = self._windows[index].cut.read(window_N[here_N])
        return out_NT

    def _windows_of(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the window of each of these samples: two int64 ``[n]``."""
        source_N, number_N = self.places(samples_N)
        window_N = np.empty_like(number_N)
        for index in np.unique(source_N).tolist():
            here_N = source_N == index
            window_N[here_N] = self._windows[index].windows(number_N[here_N])
        return source_N, window_N

    def n_targets(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of tokens to predict in each of these samples: int64 ``[n]``."""
        source_N, number_N = self.places(samples)
        out_N = np.empty_like(samples)
        for index in np.unique(source_N).tolist():
            here_N = source_N == index
            out_N[here_N] = self._windows[index].n_targets(number_N[here_N])
        return out_N


class Mixture(_Sources):
    """Samples in the shares of ``order``, each source read in its own order."""

    def __init__(self, sources: Mapping[str, FixedWindows], order: SourceOrder) -> None:
        super().__init__(sources)
        self.order = order

    @property
    def n_samples(self) -> int:
        """Different samples of all sources."""
        return sum(source.n_samples for source in self._windows)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See the base."""
        return self.order.places(samples_N)

    def epochs(self, n_samples: int) -> dict[str, float]:
        """Return the number of passes over each source in the first ``n_samples``."""
        return {name: count / self.sources[name].n_samples for name, count in self.order.taken(n_samples).items()}


class InTurn(_Sources):
    """Validation samples of several sources, one of each in turn; each source goes round by itself."""

    @property
    def n_samples(self) -> int:
        """Number of samples until each has been read once."""
        return max(source.n_samples for source in self._windows) * len(self._windows)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See the base."""
        return samples_N % len(self._windows), samples_N // len(self._windows)

    def is_first_round(self, first_sample: int, n: int) -> np.ndarray:
        """Return True for each of ``n`` samples that has not been read before: bool ``[n]``."""
        source_N, number_N = self.places(np.arange(first_sample, first_sample + n))
        return number_N < np.array([source.n_samples for source in self._windows])[source_N]
