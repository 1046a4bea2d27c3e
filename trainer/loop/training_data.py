"""The batches of a run's steps, from the step that it has reached, read by a thread one step ahead."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ...data.prepare import PreparedData
from ...data.process_batches import MicroBatches, Places, StreamedBatches, StreamSource
from ...measure.ranks import gather_objects
from ...models.attention.context_parallel import context_ranks
from ..config import RunConfig
from ..processes.joint_failure import Progress

#: Batches that lie ready; Lightning holds one more.
_DEPTH = 2
#: Time, in seconds, that the end of a run waits for an unfinished read.
_END_S = 5.0


class ReadAhead(Iterator[Tensor]):
    """Iterator over the same batches in the same order. Its thread starts with the first request, and ends with the
    context.

    An error in the thread is raised when its batch is requested.

    Args:
        batches: source of the batches; read only by the thread.
        device: device that they go to. From pinned memory a GPU copies while it computes.
        progress: learns how long the main thread waited, and for what, so that a hang in the data shows.
        keep: keep delivered batches until :meth:`upcoming` passes them; only for its callers.
    """

    def __init__(
        self, batches: Iterable[Tensor], device: torch.device, progress: Progress, *, keep: bool = False
    ) -> None:
        self.batches, self.device, self.progress = batches, device, progress
        self._ready: SimpleQueue[Tensor | BaseException] = SimpleQueue()
        self._room = threading.Semaphore(_DEPTH)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._keep, self._kept, self._first_kept = keep, deque[Tensor](), 0
        self._n_given = 0
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        self._over.set()
        self._room.release()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _read(self) -> None:
        try:
            if self.device.type == "cuda":
                # A thread has a current device of its own, and pinning makes a context there.
                torch.cuda.set_device(self.device)
            batches = iter(self.batches)
            while self._room.acquire() and not self._over.is_set():
                batch = next(batches)
                self._ready.put(batch.pin_memory() if self.device.type == "cuda" else batch)
        except BaseException as error:
            self._ready.put(error)

    def __iter__(self) -> ReadAhead:
        if not self._thread.ident:
            self._thread.start()
        return self

    def __next__(self) -> Tensor:
        if not self._keep:
            return self._take()
        if self._n_given == self._first_kept + len(self._kept):
            self._kept.append(self._take())
        self._n_given += 1
        return self._kept[self._n_given - 1 - self._first_kept]

    def upcoming(self, first: int, n: int) -> list[Tensor]:
        """Look at the ``n`` batches from number ``first`` on, counted from 0, delivered or not; they stay queued. Those
        before ``first`` are dropped. Lightning fetches a batch before it trains on the one before.
        """
        while self._first_kept < min(first, self._n_given):
            self._kept.popleft()
            self._first_kept += 1
        while self._first_kept + len(self._kept) < first + n:
            self._kept.append(self._take())
        return [self._kept[i - self._first_kept] for i in range(first, first + n)]

    def _take(self) -> Tensor:
        if self._failure is not None:
            raise self._failure
        try:
            batch = self._ready.get_nowait()
        except Empty:
            began, self.progress.waits_for = time.perf_counter(), self._thread.ident
            batch = self._ready.get()
            self.progress.waits_for = None
            self.progress.waited_s += time.perf_counter() - began
        self._room.release()
        if isinstance(batch, BaseException):  # StopIteration too
            self._failure = batch
            raise batch
        return batch


# ---------------------------------------------------------------- training data
# Batches of a run's steps, from the step that it has reached.


class TrainingData(L.LightningDataModule):
    """Training batches from the step that the trainer has reached.

    Data are a function of the step, or, where they are streamed, of it and of where the streams stood. A checkpoint has
    that under this class's name.
    """

    def __init__(
        self,
        config: RunConfig,
        data: PreparedData,
        read_ahead: Callable[[Iterable[torch.Tensor]], ReadAhead],
        at_end: Callable[[Callable[[], None]], object],
    ) -> None:
        super().__init__()
        self.config, self.data, self.read_ahead, self.at_end = config, data, read_ahead, at_end
        self._streamed: StreamedBatches | None = None
        self._places: Places | None = None

    def train_dataloader(self) -> ReadAhead:
        """Return micro-batches ``[micro_batch_size, T+1]`` of the steps to come, without end."""
        assert self.trainer is not None
        settings = self.config.trainer
        which: dict[str, Any] = {
            "first_step": self.trainer.global_step,
            "sizes": settings.batch_sizes,
            "micro_batch_size": settings.micro_batch_size,
            # The processes of a context group train on the same samples.
            "rank": context_ranks(self.trainer.global_rank, settings.context_parallel)[0],
            "world_size": settings.data_shares(self.trainer.world_size),
        }
        if not isinstance(self.data.train, StreamSource):
            from_store = self.config.data.cache_gb is not None
            return self.read_ahead(MicroBatches(self.data.train, **which, from_store=from_store))
        self._streamed = StreamedBatches(self.data.train, **which, places=self._places)
        ahead = self.read_ahead(self._streamed)
        # Before the thread that reads ahead, which waits for those of other ranks.
        self.at_end(self._streamed.close)
        return ahead

    def state_dict(self) -> dict[str, Any]:
        """Return the places of all streams, including those of other ranks. Collective: call on every rank."""
        if self._streamed is None:
            return {}
        assert self.trainer is not None
        places: Places = {}
        for of_rank in gather_objects(self._streamed.places(self.trainer.global_step)):
            places |= of_rank
        return {"streams": places}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the places of the streams."""
        self._places = state_dict["streams"]
