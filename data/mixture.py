"""Samples of several sources as one source, in shares that may change at samples. No state is kept."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from typing_extensions import override

from .batches import FixedWindows, JoinedTokens, Nearby, PlainCut, TokensOfSources

# ---------------------------------------------------------------- exact shares
# Source of sample ``i`` and the index of the sample within that source, computed without state, in exact integers.
#
# Samples come in blocks. Huffman's tree of the weights says how many of a block each source gives: at every node
# ``⌊w·j + 1/2⌋`` of the first ``j`` samples are the left side's, and a source's errors add up to less than 1.68
# samples over the levels, at any block (weights at least double every two levels up, as Fibonacci's numbers do: half
# the sum of their reciprocals). Within a block these numbers are spread by the rule of Tijdeman (The chairman
# assignment problem, Discrete Mathematics 32, 1980), which keeps each of S sources to 1 − 1/(2S − 2) samples of its
# share at every place. Blocks are so long that both together stay below one sample for the first thousand samples,
# and below a thousandth of the samples at every thousand after.

#: By how many samples the tree errs at most, times the thousand at which its part of that must be small.
_TREE_ERROR = 1680
_SHORTEST_BLOCK = 1 << 12


@dataclass(frozen=True)
class _Fork:
    left: _Tree
    right: _Tree
    left_weight: int
    weight: int
    """Weight of both sides."""


#: A leaf is the number of a source.
_Tree: TypeAlias = _Fork | int


def _tree(weights: Sequence[int]) -> _Tree:
    """Build Huffman's tree of the weights; ties are decided by the numbers of nodes."""
    nodes: list[tuple[int, int, _Tree]] = [(weight, i, i) for i, weight in enumerate(weights)]
    heapq.heapify(nodes)
    for number in range(len(weights), 2 * len(weights) - 1):
        (weight, _, left), (other, _, right) = heapq.heappop(nodes), heapq.heappop(nodes)
        heapq.heappush(nodes, (weight + other, number, _Fork(left, right, weight, weight + other)))
    return nodes[0][2]


@lru_cache(maxsize=16)
def _spread(counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Order a block in which source ``i`` has ``counts[i]`` samples: return sources ``[K]``, and the number of earlier
    samples of the same source ``[K]``.

    By Tijdeman's rule, among the sources that are behind their share by 1/(2S − 2) samples, the one that would first be
    behind by more than 1 − 1/(2S − 2) comes next. There is always one.
    """
    length, given = sum(counts), [i for i, count in enumerate(counts) if count]
    steps = max(2 * len(given) - 2, 1)
    source_J = np.repeat(given, [counts[i] for i in given])
    nth_J = np.concatenate([np.arange(counts[i], dtype=np.int64) for i in given])
    step_J = steps * np.array(counts, dtype=np.int64)[source_J]
    # Every sample of a source has the place from which on it may come, and the one by which it must.
    from_J = -(-(nth_J * steps + 1) * length // step_J)
    by_J = ((nth_J + 1) * steps - 1) * length // step_J
    order_J = np.argsort(from_J, kind="stable")
    # A number for each instead of a pair, which the heap compares faster.
    n_sources = len(counts)
    waiting, n_ready = (by_J * n_sources + source_J)[order_J].tolist(), 0
    n_ready_K = np.searchsorted(from_J[order_J], np.arange(1, length + 1), side="right").tolist()
    ready: list[int] = []
    chosen = []
    for until in n_ready_K:
        while n_ready < until:
            heapq.heappush(ready, waiting[n_ready])
            n_ready += 1
        chosen.append(heapq.heappop(ready))
    source_K, number_K = (np.array(chosen, dtype=np.int64) % n_sources).astype(np.int32), np.empty(length, np.int64)
    for i in given:
        number_K[source_K == i] = np.arange(counts[i])
    return source_K, number_K


class Proportions:
    """Samples of several sources in the proportions of their weights.

    Args:
        weights: weight of each source, at least 0 and one of them positive; relative to their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self.n_sources = len(weights)
        self._given = [i for i, weight in enumerate(exact) if weight]
        self._tree = _tree([int(exact[i] * scale) for i in self._given])
        longest = max(_SHORTEST_BLOCK, _TREE_ERROR * (2 * len(self._given) - 2))
        self._block = 1 << (longest - 1).bit_length()

    def _counts(self, block: int) -> tuple[int, ...]:
        """Count the samples that each source gives before this block."""
        counts = [0] * self.n_sources

        def descend(node: _Tree, n: int) -> None:
            if isinstance(node, int):
                counts[self._given[node]] = n
                return
            left = (2 * n * node.left_weight + node.weight) // (2 * node.weight)
            descend(node.left, left)
            descend(node.right, n - left)

        descend(self._tree, block * self._block)
        return tuple(counts)

    def _order(self, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the counts before a block ``[S]``, then its `_spread`."""
        before, after = self._counts(block), self._counts(block + 1)
        given = tuple(b - a for a, b in zip(before, after, strict=True))
        return np.array(before, dtype=np.int64), *_spread(given)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source, and the number within it, of each sample: two int64 ``[N]``."""
        source_N, number_N = np.empty(len(samples_N), np.int64), np.empty(len(samples_N), np.int64)
        blocks_N = samples_N // self._block
        for block in np.unique(blocks_N).tolist():
            inside_N = blocks_N == block
            before_S, source_K, number_K = self._order(block)
            at_M = samples_N[inside_N] - block * self._block
            source_N[inside_N] = source_M = source_K[at_M]
            number_N[inside_N] = before_S[source_M] + number_K[at_M]
        return source_N, number_N

    def taken(self, n_samples: int) -> np.ndarray:
        """Count the samples of each source among the first ``n_samples``: int64 ``[S]``."""
        block, k = divmod(n_samples, self._block)
        if not k:
            return np.array(self._counts(block), dtype=np.int64)
        before_S, source_K, _ = self._order(block)
        return before_S + np.bincount(source_K[:k], minlength=self.n_sources)


# ---------------------------------------------------------------- the source of each sample
# Source of each sample, and the index of the sample within that source, in shares that may change at given samples.
# No state is kept.


@dataclass(frozen=True)
class Stage:
    """Shares of the sources from a sample on."""

    first: int
    """Global index of its first sample."""

    shares: dict[str, float]
    """Shares of the samples, by source; they add up to 1."""

    proportions: Proportions
    before_S: np.ndarray
    """Samples that each source gives in the stages before."""


class SourceOrder:
    """Assignment of samples to sources in given shares, each source read in its own order.

    Args:
        names: names of the sources.
        weights: weights by source, relative to their sum; a source without a weight is not read.
        changes: weights from a sample on, in the order of these samples: (its global index, weights by source).
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Mapping[str, float],
        changes: Sequence[tuple[int, Mapping[str, float]]] = (),
    ) -> None:
        self.names = list(names)
        self.stages: list[Stage] = []
        """Stages in their order; the first begins with sample 0."""
        for first, of_stage in ((0, weights), *changes):
            given = {name: of_stage.get(name, 0) for name in names}
            total = sum(given.values())
            before_S = self._taken(first) if self.stages else np.zeros(len(given), dtype=np.int64)
            shares = {name: weight / total for name, weight in given.items()}
            self.stages.append(Stage(first, shares, Proportions(list(given.values())), before_S))

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the samples, by source, at the start."""
        return self.stages[0].shares

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source, and the number within it, of each global sample index: two int64 ``[N]``.

        A stage continues every source where the stage before stopped.
        """
        source_N, number_N = np.empty_like(samples_N), np.empty_like(samples_N)
        stages_N = np.searchsorted([stage.first for stage in self.stages], samples_N, side="right") - 1
        for index in np.unique(stages_N).tolist():
            stage, inside_N = self.stages[index], stages_N == index
            source_M, number_M = stage.proportions.places(samples_N[inside_N] - stage.first)
            source_N[inside_N], number_N[inside_N] = source_M, stage.before_S[source_M] + number_M
        return source_N, number_N

    def _taken(self, n_samples: int) -> np.ndarray:
        stage = self.stages[bisect_right(self.stages, n_samples, key=lambda stage: stage.first) - 1]
        return stage.before_S + stage.proportions.taken(n_samples - stage.first)

    def taken(self, n_samples: int) -> dict[str, int]:
        """Count the samples of each source among the first ``n_samples``."""
        return dict(zip(self.names, self._taken(n_samples).tolist(), strict=True))


# ---------------------------------------------------------------- samples of several sources as one source
# In shares for training, in turn for validation. No state is kept.


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
            inside_N = source_N == index
            out_NT[inside_N] = self._windows[index].cut.read(window_N[inside_N])
        return out_NT

    def _windows_of(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source and the window of each of these samples: two int64 ``[n]``."""
        source_N, number_N = self.places(samples_N)
        window_N = np.empty_like(number_N)
        for index in np.unique(source_N).tolist():
            inside_N = source_N == index
            window_N[inside_N] = self._windows[index].windows(number_N[inside_N])
        return source_N, window_N

    def n_targets(self, samples: np.ndarray) -> np.ndarray:
        """Return the number of tokens to predict in each of these samples: int64 ``[n]``."""
        source_N, number_N = self.places(samples)
        out_N = np.empty_like(samples)
        for index in np.unique(source_N).tolist():
            inside_N = source_N == index
            out_N[inside_N] = self._windows[index].n_targets(number_N[inside_N])
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

    @override
    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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

    @override
    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return samples_N % len(self._windows), samples_N // len(self._windows)

    def is_first_round(self, first_sample: int, n: int) -> np.ndarray:
        """Return True for each of ``n`` samples that has not been read before: bool ``[n]``."""
        source_N, number_N = self.places(np.arange(first_sample, first_sample + n))
        return number_N < np.array([source.n_samples for source in self._windows])[source_N]
