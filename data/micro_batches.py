"""The batches of one process: the process's part of every step's samples, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch.utils.data import IterableDataset, get_worker_info

from .batch_ramp import BatchSizes
from .batch_shares import BatchShares
from .batches import BatchSource


class MicroBatches(IterableDataset[torch.Tensor]):
    """One rank's micro-batches of steps ``first_step`` to ``last_step`` (excluded; None: without end).

    Yields int64 tensors ``[n, seq_len + 1]``, n ≤ ``micro_batch_size``. In every step rank ``r`` takes the ``r``-th
    contiguous part of the global batch (`BatchShares`). A micro-batch without a sequence borrows one of another
    process, with weight 0. For a ``DataLoader`` with ``batch_size=None``; its workers take turns, so the order is that
    of a single process.

    Raises:
        UsageError: there are fewer sequences than processes.
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        first_step: int = 0,
        last_step: int | None = None,
        sizes: BatchSizes,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} processes")
        self.source = source
        self.first_step = first_step
        self.last_step = last_step
        self.sizes, self.micro_batch_size = sizes, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self.shares(first_step)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker else (0, 1)
        steps = count(self.first_step) if self.last_step is None else range(self.first_step, self.last_step)
        parts = ((step, part) for step in steps for part in self.shares(step).parts(self.rank))
        for step, part in islice(parts, turn, None, turns):
            here = part or range(1)
            yield torch.from_numpy(self.source.batch(self.sizes.before(step) + here.start, len(here)))

    def shares(self, step: int) -> BatchShares:
        """Return the shares of the processes in the batch of step ``step``."""
        return BatchShares(self.sizes.size(step), self.micro_batch_size, self.world_size)
