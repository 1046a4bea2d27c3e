"""The size of the global batch at every step, and its parts: one for each process and micro-batch."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import UsageError

#: Sizes that a ramp may pass through.
_MOST_SIZES = 10_000


@dataclass(frozen=True)
class BatchRamp:
    """Growth of the global batch at the start of a run, like Megatron-LM's ``--rampup-batch-size``."""

    start: int = 0
    """Sequences of the first steps' global batches; 0: all steps have global_batch_size."""

    increment: int = 0
    """Sequences by which the global batch grows at a time, up to global_batch_size."""

    sequences: int = 0
    """Sequences over which it grows: each size is kept for an equal part of them."""

    def problems(self, global_batch_size: int) -> list[str]:
        """List everything that makes this ramp impossible, one line each, with the remedy."""
        if not self.start:
            return [
                f"trainer.batch_ramp.{name} is {value}, but there is no ramp: give trainer.batch_ramp.start too"
                for name, value in (("increment", self.increment), ("sequences", self.sequences))
                if value
            ]
        found = []
        growth = global_batch_size - self.start
        if not 1 <= self.start < global_batch_size:
            found.append(
                f"trainer.batch_ramp.start is {self.start}: give at least 1 and less than trainer.global_batch_size "
                f"{global_batch_size}"
            )
        elif self.increment < 1 or growth % self.increment or growth // self.increment > _MOST_SIZES:
            found.append(
                f"trainer.batch_ramp.increment is {self.increment}: give a number that divides the {growth} sequences "
                f"from start to trainer.global_batch_size, in at most {_MOST_SIZES:,} parts"
            )
        if not 1 <= self.sequences <= 10**15:
            found.append(f"trainer.batch_ramp.sequences is {self.sequences}: give at least 1 and at most 10¹⁵")
        return found


@lru_cache
def _stages(global_batch_size: int, ramp: BatchRamp) -> tuple[tuple[int, int, int], ...]:
    """Return (first step, samples before it, size) for each size of the ramp, in their order."""
    if not ramp.start:
        return ((0, 0, global_batch_size),)
    n_growths = (global_batch_size - ramp.start) // ramp.increment
    stages, step, sample = [], 0, 0
    for growth in range(n_growths):
        size = ramp.start + growth * ramp.increment
        # The first multiple of this size at which the ramp's next part begins.
        steps = max(0, -((sample * n_growths - (growth + 1) * ramp.sequences) // (size * n_growths)))
        if steps:
            stages.append((step, sample, size))
        step, sample = step + steps, sample + steps * size
    return (*stages, (step, sample, global_batch_size))


@dataclass(frozen=True)
class BatchSizes:
    """Size of the global batch at every step."""

    global_batch_size: int
    """Size after the ramp."""
    ramp: BatchRamp = BatchRamp()

    def _stage(self, step: int) -> tuple[int, int, int]:
        stages = _stages(self.global_batch_size, self.ramp)
        return stages[bisect_right(stages, step, key=lambda stage: stage[0]) - 1]

    @property
    def smallest(self) -> int:
        """Smallest size of all steps."""
        return self.ramp.start or self.global_batch_size

    @property
    def sizes(self) -> list[int]:
        """Sizes that occur, in the order of steps."""
        return [size for _, _, size in _stages(self.global_batch_size, self.ramp)]

    def size(self, step: int) -> int:
        """Return the number of sequences of step ``step``, counted from 0."""
        return self._stage(step)[2]

    def before(self, step: int) -> int:
        """Return the number of sequences in all steps before ``step``: the index of its first sample."""
        first, samples, size = self._stage(step)
        return samples + (step - first) * size


# ---------------------------------------------------------------- batch shares
# Division of a global batch among processes and their micro-batches, in contiguous parts of almost one size.


def nth_part(n: int, parts: int, i: int) -> range:
    """Return the ``i``-th of ``parts`` contiguous parts of ``range(n)``; the first ones are longer by one if needed."""
    size, longer = divmod(n, parts)
    first = i * size + min(i, longer)
    return range(first, first + size + (i < longer))


@dataclass(frozen=True)
class BatchShares:
    """The parts of a global batch that processes and their micro-batches take.

    Every process has the same number of micro-batches, since they take part in collectives together. If the sequences
    cannot be shared evenly, sizes of micro-batches differ by one, and their losses are weighted.

    Raises:
        UsageError: there are fewer sequences than processes.
    """

    global_batch_size: int
    most: int
    """Sequences of a micro-batch at most."""
    n_processes: int = 1

    def __post_init__(self) -> None:
        if self.global_batch_size < self.n_processes:
            raise UsageError(
                f"trainer.global_batch_size {self.global_batch_size} is less than {self.n_processes} processes: "
                f"give {self.n_processes} or more, or start {self.global_batch_size}"
            )

    @property
    def _largest_share(self) -> int:
        return -(-self.global_batch_size // self.n_processes)

    @property
    def accumulation(self) -> int:
        """Micro-batches of each process in a step."""
        return -(-self._largest_share // self.most)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of the largest micro-batch."""
        return -(-self._largest_share // self.accumulation)

    @property
    def sizes(self) -> list[int]:
        """Different sizes of micro-batches, the largest first."""
        parts = ((rank, micro) for rank in range(self.n_processes) for micro in range(self.accumulation))
        return sorted({len(self.part(*place)) for place in parts} - {0}, reverse=True)

    def part(self, rank: int, micro: int) -> range:
        """Return the positions in the global batch of a process's ``micro``-th micro-batch of a step; empty if there
        are fewer sequences than micro-batches.
        """
        share = nth_part(self.global_batch_size, self.n_processes, rank)
        part = nth_part(len(share), self.accumulation, micro)
        return range(share.start + part.start, share.start + part.stop)

    def parts(self, rank: int) -> list[range]:
        """List the :meth:`part` of every micro-batch of a process."""
        return [self.part(rank, micro) for micro in range(self.accumulation)]

    def weights(self, rank: int) -> tuple[float, ...]:
        """Return factors for the mean loss of each micro-batch of a step, so that every sequence counts alike in the
        mean over micro-batches and processes. All are 1 if all have one size.
        """
        return self.weights_by(np.ones(self.global_batch_size, dtype=np.int64), rank)

    def weights_by(self, n_targets: np.ndarray, rank: int) -> tuple[float, ...]:
        """Return :meth:`weights` with which every token counts alike, for sequences with different numbers of targets.

        Args:
            n_targets: number of targets of each sequence of the global batch, int64.
            rank: process of the micro-batches.
        """
        slots, total = self.accumulation * self.n_processes, int(n_targets.sum())
        of_parts = (int(n_targets[part.start : part.stop].sum()) for part in self.parts(rank))
        return tuple(count * slots / total for count in of_parts)
