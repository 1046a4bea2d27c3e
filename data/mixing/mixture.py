"""Samples of several sources in asked shares, which may change at steps, as one source. No state is kept."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..batches import FixedWindows
from .proportions import Proportions


class _Sources:
    """Samples of several sources of one ``seq_len``. See `birthmark.data.batches.BatchSource`."""

    def __init__(self, sources: Mapping[str, FixedWindows]) -> None:
        self.sources = dict(sources)
        self._windows = list(self.sources.values())
        self.seq_len = self._windows[0].seq_len
        self.vocab_size = max(source.vocab_size for source in self._windows)

    @property
    def n_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.n_tokens for source in self._windows)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source, and number within it, of each global sample index: two int64 ``[n]``."""
        raise NotImplementedError

    def batch(self, first_sample: int, n: int) -> np.ndarray:
        """See `BatchSource.batch`."""
        source_N, number_N = self.places(np.arange(first_sample, first_sample + n, dtype=np.int64))
        out_NT = np.empty((n, self.seq_len + 1), dtype=np.int64)
        for index in np.unique(source_N).tolist():
            here_N = source_N == index
            out_NT[here_N] = self._windows[index].samples(number_N[here_N])
        return out_NT

    def n_targets(self, samples: np.ndarray) -> np.ndarray:
        """Tokens to predict in each of these samples: int64 ``[n]``."""
        source_N, number_N = self.places(samples)
        out_N = np.empty_like(samples)
        for index in np.unique(source_N).tolist():
            here_N = source_N == index
            out_N[here_N] = self._windows[index].n_targets(number_N[here_N])
        return out_N


@dataclass(frozen=True)
class Stage:
    """From where on sources have which shares."""

    first: int
    """Global index of its first sample."""

    shares: dict[str, float]
    """Of the samples, by source; they add up to 1."""

    proportions: Proportions
    before_S: np.ndarray
    """Samples that each source gives in the stages before."""


class Mixture(_Sources):
    """Samples in asked shares, each source read in its own order.

    Args:
        sources: by name, all of one ``seq_len``.
        weights: by source, taken relative to their sum; one without a weight is not read.
        changes: weights from a sample on, in the order of these samples: (its global index, weights by source).
    """

    def __init__(
        self,
        sources: Mapping[str, FixedWindows],
        weights: Mapping[str, float],
        changes: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        super().__init__(sources)
        self.stages: list[Stage] = []
        """In their order; the first begins with sample 0."""
        for first, of_stage in ((0, weights), *changes):
            given = {name: of_stage.get(name, 0) for name in self.sources}
            total = sum(given.values())
            before_S = self._taken(first) if self.stages else np.zeros(len(given), dtype=np.int64)
            shares = {name: weight / total for name, weight in given.items()}
            self.stages.append(Stage(first, shares, Proportions(list(given.values())), before_S))

    @property
    def shares(self) -> dict[str, float]:
        """Of the samples, by source, at the start."""
        return self.stages[0].shares

    @property
    def n_samples(self) -> int:
        """Different samples of all sources."""
        return sum(source.n_samples for source in self._windows)

    def _stage(self, sample: int) -> int:
        return bisect_right(self.stages, sample, key=lambda stage: stage.first) - 1

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See the base: a stage goes on with every source where the one before it stopped."""
        source_N, number_N = np.empty_like(samples_N), np.empty_like(samples_N)
        stages_N = np.searchsorted([stage.first for stage in self.stages], samples_N, side="right") - 1
        for index in np.unique(stages_N).tolist():
            stage, here_N = self.stages[index], stages_N == index
            source_M, number_M = stage.proportions.places(samples_N[here_N] - stage.first)
            source_N[here_N], number_N[here_N] = source_M, stage.before_S[source_M] + number_M
        return source_N, number_N

    def _taken(self, n_samples: int) -> np.ndarray:
        stage = self.stages[self._stage(n_samples)]
        return stage.before_S + stage.proportions.taken(n_samples - stage.first)

    def taken(self, n_samples: int) -> dict[str, int]:
        """How many of the first ``n_samples`` each source gives."""
        return dict(zip(self.sources, self._taken(n_samples).tolist(), strict=True))

    def tokens_by_source(self, n_tokens: int) -> dict[str, int]:
        """How many of the first ``n_tokens``, which are whole samples, each source gives."""
        return {name: count * self.seq_len for name, count in self.taken(n_tokens // self.seq_len).items()}

    def epochs(self, n_samples: int) -> dict[str, float]:
        """How often each source is read in the first ``n_samples``."""
        return {name: count / self.sources[name].n_samples for name, count in self.taken(n_samples).items()}


class InTurn(_Sources):
    """Validation samples of several sources, one of each in turn; each source goes round by itself."""

    @property
    def n_samples(self) -> int:
        """Until each has been read once."""
        return max(source.n_samples for source in self._windows) * len(self._windows)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See the base."""
        return samples_N % len(self._windows), samples_N // len(self._windows)
