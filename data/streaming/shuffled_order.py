"""Order of streamed samples: exact shares of the sources in every global batch, at positions that change from step to
step.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from ..batch_ramp import BatchSizes
from ..mixing.order import SourceOrder
from ..permutation import permuted


class ShuffledOrder(SourceOrder):
    """Another order whose samples are shuffled within each global batch.

    A stream owns a part of every batch. If the pattern of the sources repeated with the batch, each part would have the
    same sources at every step, and the files of some streams would never be read.

    Args:
        order: order that gives the sources of a batch.
        sizes: sizes of the global batches.
        data_seed: seed of the shuffling, which otherwise depends only on the step.
    """

    def __init__(self, order: SourceOrder, sizes: BatchSizes, data_seed: int) -> None:
        self.names, self.stages = order.names, order.stages
        self._sizes, self._data_seed = sizes, data_seed

    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See the base."""
        moved_N, left = np.empty_like(samples_N), np.unique(samples_N)
        while left.size:
            step = self._step(int(left[0]))
            first, size = self._sizes.before(step), self._sizes.size(step)
            here_N = (samples_N >= first) & (samples_N < first + size)
            moved_N[here_N] = first + permuted(samples_N[here_N] - first, size, "sources", self._data_seed, step)
            left = left[left >= first + size]
        return super().places(moved_N)

    def _step(self, sample: int) -> int:
        """Return the number of steps before the one that trains on a sample."""
        # Every step has a sample or more.
        return bisect_right(range(sample + 1), sample, key=self._sizes.before) - 1
