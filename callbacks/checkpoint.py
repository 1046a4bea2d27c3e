"""Times at which checkpoints are written, and the choice of those to keep. The strategy and its CheckpointIO write
them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import lightning as L

from ..files import delete_folder
from ..measure.records import RunDir, step_of
from .milestones import MilestoneCallback, StepCallback, is_due, never


def kept(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> set[int]:
    """Return those of ascending steps whose checkpoints are kept: the last ones, and multiples of ``keep_every``.

    Without ``keep_last`` all are.
    """
    if keep_last is None:
        return set(steps)
    multiples = (step for step in steps if step % keep_every == 0) if keep_every else ()
    return {*steps[-keep_last:], *multiples}


class _Writer(Protocol):
    """A CheckpointIO that may still be writing after it returns."""

    on_complete: Callable[[], None] | None
    """Function that it calls once a checkpoint is complete."""

    def finish(self) -> None:
        """Wait until the checkpoint is complete. Collective: call on every rank."""

    def settle(self, error: BaseException) -> None:
        """Wait, after a failure of the run; raises nothing."""


class _Upload(Protocol):
    """A copier of whole checkpoints, in a thread of its own."""

    busy: Path | None
    """Checkpoint that is being copied."""

    def wake(self) -> None:
        """Copy what is new."""


def _writer(trainer: L.Trainer) -> _Writer:
    return cast(_Writer, trainer.strategy.checkpoint_io)


class Checkpoint(MilestoneCallback):
    """Callback that writes a checkpoint at every milestone after birth; a birth needs none, its seed re-creates it.

    Args:
        every: optimizer steps between milestones.
        run: the run of these checkpoints.
        keep_last: number of latest ones to keep; None keeps all.
        keep_every: also keep older ones whose step is a multiple of this.
        say: called with a line for each old one that could not be deleted.
        upload: copier of whole checkpoints to a store, if there is one.
    """

    def __init__(
        self,
        every: int,
        run: RunDir,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        say: Callable[[str], None] = print,
        upload: _Upload | None = None,
    ) -> None:
        super().__init__(every, at_birth=False)
        self.run, self.keep_last, self.keep_every, self.say = run, keep_last, keep_every, say
        self.upload = upload
        self._saved: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Have a new checkpoint copied once it is complete, and old ones deleted."""
        _writer(trainer).on_complete = self._on_complete

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Write it, unless it was written first."""
        if self._saved == step:
            return
        _writer(trainer).finish()
        trainer.save_checkpoint(self.run.checkpoint(step))
        self._saved = step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Wait for the last checkpoint at the end of the run."""
        _writer(trainer).finish()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Complete the checkpoint before a failure, if possible."""
        _writer(trainer).settle(exception)

    def _on_complete(self) -> None:
        if self.upload is not None:
            self.upload.wake()
        self._delete_old()

    def _delete_old(self) -> None:
        """Delete old checkpoints. A failure is reported and does not end the run: its new checkpoint is complete."""
        if self.keep_last is None:
            return
        folder = self.run.path / "checkpoints"
        try:
            for left in folder.glob(".step-*.deleted"):
                shutil.rmtree(left, ignore_errors=True)
            there = self.run.checkpoints()
        except OSError as error:
            self.say(f"{folder}: trainer.keep_last cannot look for old checkpoints ({error}); the run goes on")
            return
        stay = kept([step_of(one) for one in there], self.keep_last, self.keep_every)
        for old in there:
            # One that is on its way to a store goes when the next is complete.
            busy = self.upload is not None and self.upload.busy == old
            if not busy and step_of(old) not in stay:
                try:
                    delete_folder(old)
                except OSError as error:
                    self.say(f"{old}: trainer.keep_last cannot delete it ({error}); the run goes on")


class CheckpointFirst(StepCallback):
    """Callback that writes the checkpoint of a stop before anything is measured: the process may soon be killed.

    Place it right before the callbacks that measure. If a checkpoint is due anyway the order stays: a resumed run
    measures nothing at the step from which it resumes, so measurements due there must precede its checkpoint.

    Args:
        checkpoint: the callback that writes it.
        more: function that says if a step is a further one with measurements.
    """

    def __init__(self, checkpoint: Checkpoint, more: Callable[[int], bool] = never) -> None:
        self.checkpoint, self.more = checkpoint, more

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Write the checkpoint and wait until it is complete."""
        if trainer.should_stop and not is_due(trainer, self.checkpoint.every, self.more, stopping=False):
            self.checkpoint.act(trainer, module, step)
            _writer(trainer).finish()
