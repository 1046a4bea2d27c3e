"""Division of a global batch among processes and their micro-batches, in contiguous parts of almost one size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UsageError


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
