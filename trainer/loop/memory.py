"""Clean-up of memory between steps, at a fixed cadence."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning as L
import torch

from ...callbacks.milestones import StepCallback, is_due, never

#: Optimizer steps between collections of young objects.
_EVERY = 50


@contextmanager
def collector_at_rest(device: torch.device) -> Iterator[None]:
    """Let Python's garbage collector run, within the context, only when called, and skip all objects that exist now.

    By itself it runs whenever enough objects were made, scans all of a large library's, and does so at different times
    on each rank, while all others wait. It is restored afterwards.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    # Objects that are garbage now would stay forever. For a GPU's memory a full scan pays.
    gc.collect(1 if device.type == "cpu" else 2)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


class CleanUp(StepCallback):
    """Callback that collects garbage at the same steps on every rank, and returns a GPU's cached memory after
    milestones.

    Stands after all that measures and saves: what that needed is not what a step needs.

    Args:
        every: optimizer steps between milestones.
        device: device of the run.
        more: asks for further steps.
    """

    def __init__(self, every: int, device: torch.device, more: Callable[[int], bool] = never) -> None:
        self.every, self.device, self.more = every, device, more

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Clean up after the measurement of birth."""
        if trainer.global_step == 0:
            self._after_milestone()

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Collect garbage if it is due."""
        if is_due(trainer, self.every, self.more):
            self._after_milestone()
        elif step % _EVERY == 0:
            gc.collect(1)

    def _after_milestone(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
