"""What a process of a run is doing, and how long that may take before the run counts as hung (heartbeat.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning as L

from ...callbacks.milestones import MilestoneCallback

#: What takes longer than a step may take this many times ``trainer.timeout_s``: by default half an hour.
LONGER = 15

#: Phase → how many times ``trainer.timeout_s`` a process may be in one. The first step of a start compiles.
PHASES = {
    "birth": LONGER,
    "set-up": LONGER,
    "first step": LONGER,
    "data": 1,
    "step": 1,
    "validation": LONGER,
    "snapshot": LONGER,
    "fingerprint": LONGER,
    "checkpoint": LONGER,
    "end": LONGER,
}


class Place(NamedTuple):
    """Where a process is in its run. All processes of a run come by the same places."""

    number: int
    """Of all that it has come by, from 1."""
    phase: str
    """A key of ``PHASES``."""
    step: int
    """The optimizer step that is being taken, or after which this happens."""

    def __str__(self) -> str:
        return f"{self.phase} (step {self.step})"


class Progress:
    """Where this process is. Moving on costs an assignment; other threads read it."""

    def __init__(self) -> None:
        self.place = Place(1, "birth", 0)

    def enter(self, phase: str, step: int) -> None:
        """A new place. Every rank must call, in the same order."""
        self.place = Place(self.place.number + 1, phase, step)


class BeforeStep(L.Callback):
    """Enters the steps, and the end of a run. Stands first."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._first = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The step with which this start begins takes longer."""
        self._first = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The data are there."""
        phase = "first step" if trainer.global_step == self._first else "step"
        self.progress.enter(phase, trainer.global_step + 1)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last checkpoint may still be on its way."""
        self.progress.enter("end", trainer.global_step)


class BeforeMilestone(MilestoneCallback):
    """Enters what the next callback does at milestones."""

    def __init__(self, every: int, progress: Progress, phase: str, *, at_birth: bool = True) -> None:
        super().__init__(every, at_birth=at_birth)
        self.progress, self.phase = progress, phase

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """It begins."""
        self.progress.enter(self.phase, step)


class BeforeData(L.Callback):
    """Enters the wait for the next batch. Stands last."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """All that follows a batch is done."""
        self.progress.enter("data", trainer.global_step + 1)
