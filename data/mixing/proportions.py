"""Source of sample ``i`` and the index of the sample within that source, computed without state, in exact integers.

Samples come in blocks. Huffman's tree of the weights says how many of a block each source gives: at every node
``⌊w·j + 1/2⌋`` of the first ``j`` samples are the left side's, and a source's errors add up to less than 1.68 samples
over the levels, at any block (weights at least double every two levels up, as Fibonacci's numbers do: half the sum of
their reciprocals). Within a block these numbers are spread by the rule of Tijdeman (The chairman assignment problem,
Discrete Mathematics 32, 1980), which keeps each of S sources to 1 − 1/(2S − 2) samples of its share at every place.
Blocks are so long that both together stay below one sample for the first thousand samples, and below a thousandth of
the samples at every thousand after.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

import numpy as np

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
            here_N = blocks_N == block
            before_S, source_K, number_K = self._order(block)
            at_M = samples_N[here_N] - block * self._block
            source_N[here_N] = source_M = source_K[at_M]
            number_N[here_N] = before_S[source_M] + number_K[at_M]
        return source_N, number_N

    def taken(self, n_samples: int) -> np.ndarray:
        """Count the samples of each source among the first ``n_samples``: int64 ``[S]``."""
        block, k = divmod(n_samples, self._block)
        if not k:
            return np.array(self._counts(block), dtype=np.int64)
        before_S, source_K, _ = self._order(block)
        return before_S + np.bincount(source_K[:k], minlength=self.n_sources)
