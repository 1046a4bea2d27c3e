"""When checkpoints are written. How is the strategy's and its CheckpointIO's business."""

from __future__ import annotations

import lightning as L

from .records import RunDir
from .schedule import MilestoneCallback


class Checkpoint(MilestoneCallback):
    """Writes a checkpoint at every milestone after birth; a birth needs none, its seed re-creates it."""

    def __init__(self, every: int, run: RunDir) -> None:
        super().__init__(every, at_birth=False)
        self.run = run

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Write it."""
        trainer.save_checkpoint(self.run.checkpoint(step))
