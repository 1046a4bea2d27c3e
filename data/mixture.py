"""Samples of several sources in asked shares: which source gives sample ``i``, and its how manieth, is computed.

Sources are the leaves of a binary tree. At every node the ``j``-th sample goes to the left where that keeps the left
side's share to half a sample: ``⌊w·j + 1/2⌋`` of the first ``j`` are the left side's. The tree is Huffman's, in which
the errors of the levels add up to about one sample of any source, after any number of samples. No state is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from .batches import FixedWindows


@dataclass(frozen=True)
class _Fork:
    left: _Tree
    right: _Tree
    left_share: float
    """Of the samples that come here."""

    def lefts(self, n: np.ndarray) -> np.ndarray:
        """How many of the first ``n`` samples that come here go to the left."""
        return np.floor(n * self.left_share + 0.5).astype(np.int64)


#: A leaf is the number of a source.
_Tree: TypeAlias = _Fork | int


def _tree(shares: Sequence[float]) -> _Tree:
    """Huffman's tree of the shares; the numbers of nodes decide between equal ones."""
    nodes: list[tuple[float, int, _Tree]] = [(share, i, i) for i, share in enumerate(shares)]
    heapq.heapify(nodes)
    for number in range(len(shares), 2 * len(shares) - 1):
        (share, _, left), (other, _, right) = heapq.heappop(nodes), heapq.heappop(nodes)
        heapq.heappush(nodes, (share + other, number, _Fork(left, right, share / (share + other))))
    return nodes[0][2]


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


class Mixture(_Sources):
    """Samples in asked shares, each source read in its own order.

    Args:
        sources: by name, all of one ``seq_len``.
        shares: of the samples, positive, one for each source; they are taken relative to their sum.
    """

    def __init__(self, sources: Mapping[str, FixedWindows], shares: Sequence[float]) -> None:
        super().__init__(sources)
        self.shares = dict(zip(self.sources, (share / sum(shares) for share in shares), strict=True))
        self._root = _tree(list(self.shares.values()))

    @property
    def n_samples(self) -> int:
        """Different samples of all sources."""
        return sum(source.n_samples for source in self._windows)

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See the base: down the tree, all samples together."""
        source_N, number_N = np.empty_like(samples_N), np.empty_like(samples_N)

        def descend(node: _Tree, at_M: np.ndarray, number_M: np.ndarray) -> None:
            if isinstance(node, int):
                source_N[at_M], number_N[at_M] = node, number_M
                return
            before_M = node.lefts(number_M)
            is_left_M = node.lefts(number_M + 1) > before_M
            descend(node.left, at_M[is_left_M], before_M[is_left_M])
            descend(node.right, at_M[~is_left_M], (number_M - before_M)[~is_left_M])

        descend(self._root, np.arange(len(samples_N)), samples_N)
        return source_N, number_N

    def taken(self, n_samples: int) -> dict[str, int]:
        """How many of the first ``n_samples`` each source gives."""
        counts = [0] * len(self._windows)

        def descend(node: _Tree, n: int) -> None:
            if isinstance(node, int):
                counts[node] = n
                return
            left = int(node.lefts(np.asarray(n)))
            descend(node.left, left)
            descend(node.right, n - left)

        descend(self._root, n_samples)
        return dict(zip(self.sources, counts, strict=True))

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
