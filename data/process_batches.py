"""The batches of one process, in micro-batches: of samples that are computed, and of streams."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import TypeAlias

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import RunError
from .batch_sizes import BatchShares, BatchSizes
from .batches import BatchSource
from .mixture import SourceOrder
from .streaming import START, Ahead, Stream, StreamedTable, StreamPlace, StreamSettings, end_all
from .tokenizer import TextTokenizer

#: Sequences that are asked of a store at the same time: an answer takes as long as some of them last in training.
_AHEAD = 32


class MicroBatches(IterableDataset[torch.Tensor]):
    """One rank's micro-batches of steps ``first_step`` to ``last_step`` (excluded; None: without end).

    Yields int64 tensors ``[n, seq_len + 1]``, n ≤ ``micro_batch_size``. In every step rank ``r`` takes the ``r``-th
    contiguous part of the global batch (`BatchShares`). A micro-batch without a sequence borrows one of another
    process, with weight 0. With ``from_store``, threads read the next `_AHEAD` sequences at the same time. For a
    ``DataLoader`` with ``batch_size=None``; its workers take turns, so the order is that of a single process.

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
        from_store: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of {world_size} processes")
        self.source = source
        self.first_step = first_step
        self.last_step = last_step
        self.sizes, self.micro_batch_size = sizes, micro_batch_size
        self.rank, self.world_size = rank, world_size
        self._n_ahead = min(_AHEAD, max(2, _AHEAD // micro_batch_size)) if from_store else 0
        self.shares(first_step)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        turn, turns = (worker.id, worker.num_workers) if worker else (0, 1)
        steps = count(self.first_step) if self.last_step is None else range(self.first_step, self.last_step)
        parts = ((step, part) for step in steps for part in self.shares(step).parts(self.rank))
        waiting: deque[Ahead[np.ndarray]] = deque()
        try:
            for step, part in islice(parts, turn, None, turns):
                here = part or range(1)
                read = partial(self.source.batch, self.sizes.before(step) + here.start, len(here))
                if not self._n_ahead:
                    yield torch.from_numpy(read())
                    continue
                waiting.append(Ahead(read))
                if len(waiting) > self._n_ahead:
                    yield torch.from_numpy(waiting.popleft().result())
            yield from (torch.from_numpy(one.result()) for one in waiting)
        finally:
            end_all(waiting)

    def shares(self, step: int) -> BatchShares:
        """Return the shares of the processes in the batch of step ``step``."""
        return BatchShares(self.sizes.size(step), self.micro_batch_size, self.world_size)


# ---------------------------------------------------------------- a rank's micro-batches from streams
# Each stream gives an equal, contiguous part of the global batch.
#
# Stream ``l`` of L gives the ``l``-th of L parts of each global batch. If L does not divide the batch, parts differ
# by one sample and streams take turns at the longer ones, so that all give equally over L steps. The mixture decides
# the source by a sample's number. A rank reads only the streams that its part of the batch touches at any step: if
# the number of streams is a multiple of the number of processes and divides the batch, no text is read twice.

#: Steps of which it is remembered where streams stood: more than are read ahead of training.
_REMEMBERED = 32

#: Place of every stream that was read, by its number and its source.
Places: TypeAlias = dict[str, list[int]]


class StreamSource:
    """Samples of one or more streamed sets, in the shares of ``order``; their number is unknown."""

    def __init__(
        self,
        tables: Mapping[str, StreamedTable],
        tokenizer: TextTokenizer,
        order: SourceOrder,
        settings: StreamSettings,
    ) -> None:
        self.tables, self.order, self.settings = dict(tables), order, settings
        self.seq_len, self.vocab_size = settings.seq_len, tokenizer.vocab_size
        self.n_tokens: int | None = None
        self.n_samples: int | None = None
        self._tokenizer = tokenizer

    def stream(self, number: int, source: str, place: StreamPlace) -> Stream:
        """Open one stream of one source, from a place on."""
        return Stream(self.tables[source], self._tokenizer, self.settings, number, place)


class StreamedBatches:
    """One rank's micro-batches of step ``first_step`` and on, without end.

    The form is that of `birthmark.data.process_batches.MicroBatches`.

    Args:
        source: the streamed sets.
        first_step: number of earlier steps.
        sizes: sizes of the global batches.
        micro_batch_size: largest number of sequences in a micro-batch.
        rank: this process among ``world_size``.
        places: places of all streams after ``first_step`` steps; none at a run's start.

    Raises:
        RunError: the streams have no such places.
    """

    def __init__(
        self,
        source: StreamSource,
        *,
        first_step: int = 0,
        sizes: BatchSizes,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        places: Places | None = None,
    ) -> None:
        self.source, self.first_step, self.sizes = source, first_step, sizes
        self.micro_batch_size, self.rank, self.world_size = micro_batch_size, rank, world_size
        # The rounded borders of parts move with the size of the batch.
        numbers = {number for size in sizes.sizes for number in self._touched(size)}
        self._streams: dict[tuple[int, str], Stream] = {}
        for number in sorted(numbers):
            for name in source.tables:
                key = _key(number, name)
                if first_step and key not in (places or {}):
                    raise RunError(
                        f"checkpoint of step {first_step}: does not say where stream {key} stands; go on from another"
                    )
                place = StreamPlace(*places[key]) if first_step and places else START
                self._streams[number, name] = source.stream(number, name, place)
        self._places: OrderedDict[int, Places] = OrderedDict()
        self._remember(first_step)

    def _shares(self, size: int) -> BatchShares:
        return BatchShares(size, self.micro_batch_size, self.world_size)

    def _mine(self, size: int) -> range:
        """Return this rank's part of a global batch."""
        parts = [part for part in self._shares(size).parts(self.rank) if part]
        return range(parts[0].start, parts[-1].stop)

    def _touched(self, size: int) -> list[int]:
        """List the streams whose parts of batches of this size reach into this rank's at any step."""
        mine, n_streams = self._mine(size), self.source.settings.n_streams
        # From the lowest first to the highest last position of `_part`.
        reach = [(i * size // n_streams, -(-(i + 1) * size // n_streams)) for i in range(n_streams)]
        return [i for i, (start, stop) in enumerate(reach) if max(start, mine.start) < min(stop, mine.stop)]

    def _part(self, step: int, number: int) -> range:
        """Return the positions in a step's batch that a stream fills."""
        size, n_streams = self.sizes.size(step), self.source.settings.n_streams
        # Samples lost to rounding go to another part at the next step.
        offset = self.sizes.before(step) % n_streams
        return range((number * size + offset) // n_streams, ((number + 1) * size + offset) // n_streams)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in count(self.first_step):
            size = self.sizes.size(step)
            mine, own_MT = self._mine(size), self._read(step)
            self._remember(step + 1)
            for part in self._shares(size).parts(self.rank):
                # A micro-batch without a sequence has another's, whose loss has no weight.
                here = part or range(mine.start, mine.start + 1)
                yield torch.from_numpy(own_MT[here.start - mine.start : here.stop - mine.start])

    def _read(self, step: int) -> np.ndarray:
        """Read this rank's part of the batch: int64 ``[n, seq_len + 1]``."""
        size, first, names = self.sizes.size(step), self.sizes.before(step), list(self.source.tables)
        mine = self._mine(size)
        source_B, _ = self.source.order.places(np.arange(first, first + size))
        out_MT = np.empty((len(mine), self.source.seq_len + 1), dtype=np.int64)
        for number, name in self._streams:
            part = self._part(step, number)
            at_N = part.start + np.flatnonzero(source_B[part.start : part.stop] == names.index(name))
            # Also where another rank trains on some of them: that one reads the same.
            rows_NT = self._streams[number, name].take(len(at_N))
            is_mine_N = (at_N >= mine.start) & (at_N < mine.stop)
            out_MT[at_N[is_mine_N] - mine.start] = rows_NT[is_mine_N]
        return out_MT

    def _remember(self, step: int) -> None:
        self._places[step] = {_key(*which): list(stream.place) for which, stream in self._streams.items()}
        while len(self._places) > _REMEMBERED:
            self._places.popitem(last=False)

    def places(self, step: int) -> Places:
        """Return the places of this rank's streams after ``step`` steps, which must be recent."""
        return self._places[step]

    def close(self) -> None:
        """End the streams' threads."""
        # All are told before any is waited for.
        end_all([read for stream in self._streams.values() for read in stream.stop()])


def _key(number: int, name: str) -> str:
    return f"{number}/{name}"
