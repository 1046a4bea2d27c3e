"""Batches of a run's steps, from the step that it has reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch

from ...data.prepare import PreparedData
from ...data.process_batches import MicroBatches, Places, StreamedBatches, StreamSource
from ...measure.ranks import gather_objects
from ..config import RunConfig
from .read_ahead import ReadAhead


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
        which: dict[str, Any] = {
            "first_step": self.trainer.global_step,
            "sizes": self.config.trainer.batch_sizes,
            "micro_batch_size": self.config.trainer.micro_batch_size,
            "rank": self.trainer.global_rank,
            "world_size": self.trainer.world_size,
        }
        if not isinstance(self.data.train, StreamSource):
            return self.read_ahead(MicroBatches(self.data.train, **which))
        self._streamed = StreamedBatches(self.data.train, **which, places=self._places)
        ahead = self.read_ahead(self._streamed)
        # Before the thread that reads ahead, which waits for theirs.
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
