"""When checkpoints are written and which are kept. How is the strategy's and its CheckpointIO's business."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Protocol, cast

import lightning as L

from ..files import delete_folder
from ..measure.records import RunDir
from .milestones import MilestoneCallback, StepCallback, is_due


class _Writer(Protocol):
    """A CheckpointIO that may still be writing when it returns."""

    on_complete: Callable[[], None] | None
    """What it calls when a checkpoint is there."""

    def finish(self) -> None:
        """Wait until it is; every rank calls."""

    def settle(self, error: BaseException) -> None:
        """Wait, after a failure of the run; raises nothing."""


def _writer(trainer: L.Trainer) -> _Writer:
    return cast(_Writer, trainer.strategy.checkpoint_io)


class Checkpoint(MilestoneCallback):
    """Writes a checkpoint at every milestone after birth; a birth needs none, its seed re-creates it.

    Args:
        every: optimizer steps between milestones.
        run: whose checkpoints these are.
        keep_last: how many of the latest are kept; None keeps all.
        keep_every: of the older ones, those of steps that it divides are kept too.
    """

    def __init__(self, every: int, run: RunDir, *, keep_last: int | None = None, keep_every: int | None = None) -> None:
        super().__init__(every, at_birth=False)
        self.run, self.keep_last, self.keep_every = run, keep_last, keep_every
        self._saved: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Old ones go when a new one is there."""
        _writer(trainer).on_complete = self._delete_old

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Write it, unless it was written first."""
        if self._saved == step:
            return
        _writer(trainer).finish()
        trainer.save_checkpoint(self.run.checkpoint(step))
        self._saved = step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last one is there when the run is over."""
        _writer(trainer).finish()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """So is the one before a failure, where it can be."""
        _writer(trainer).settle(exception)

    def _delete_old(self) -> None:
        if self.keep_last is None:
            return
        for left in (self.run.path / "checkpoints").glob(".step-*.deleted"):
            shutil.rmtree(left, ignore_errors=True)
        there = self.run.checkpoints_by_step()
        for step in sorted(there)[: -self.keep_last]:
            if self.keep_every is None or step % self.keep_every:
                delete_folder(there[step])


class CheckpointFirst(StepCallback):
    """Writes the checkpoint of a stop before anything is measured: what stops a run may soon kill it.

    Stands right before the callbacks that measure. Where a checkpoint is due anyway the order stays: a resumed run
    measures nothing of the step that it goes on from, so what was due there must stand before its checkpoint does.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Write it and wait until it is there."""
        if trainer.should_stop and not is_due(trainer, self.checkpoint.every, stopping=False):
            self.checkpoint.act(trainer, module, step)
            _writer(trainer).finish()
