"""Timing of callbacks: at optimizer steps, not micro-batches, and together at milestones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L


class StepCallback(L.Callback):
    """Callback that calls :meth:`on_step_end` after every optimizer step (once per global batch)."""

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Act after ``step`` optimizer steps."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run Lightning's hook; see :meth:`on_step_end`."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.on_step_end(trainer, pl_module, trainer.global_step)


def never(step: int) -> bool:
    """Request no steps beyond those of a cadence."""
    return False


def is_due(
    trainer: L.Trainer,
    every: int,
    more: Callable[[int], bool] = never,
    *,
    stopping: bool = True,
    since: int | None = None,
) -> bool:
    """Return True if a task of every ``every`` steps and of the run's end is due after this step.

    Args:
        trainer: trainer of the run.
        every: optimizer steps between two.
        more: function that says if a step is a further one.
        stopping: count a stop of the run as its end.
        since: the step before, where several may be counted at once: each optimizer of a manual optimization is one.
    """
    step = trainer.global_step
    passed = range(step if since is None else since + 1, step + 1)
    at_one = any(at % every == 0 or more(at) for at in passed)
    return at_one or step == trainer.max_steps or (stopping and trainer.should_stop)


class MilestoneCallback(StepCallback):
    """Callback that calls :meth:`on_milestone` at birth, every ``every`` steps, at the last step, and when the run is
    being stopped.

    Args:
        every: optimizer steps between milestones.
        at_birth: if step 0, before any training, is a milestone.
        more: asks for further steps.
    """

    def __init__(self, every: int, *, at_birth: bool = True, more: Callable[[int], bool] = never) -> None:
        self.every, self.at_birth, self.more = every, at_birth, more
        self.announce: Callable[[int], None] | None = None
        """Function called with the step before the callback acts."""
        self.seconds = 0.0
        """Seconds that it took at the last step at which it acted."""
        self.acted_at: int | None = None
        """The last step at which it acted in this process."""

    def act(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Announce the action and act."""
        if self.announce is not None:
            self.announce(step)
        began = time.perf_counter()
        self.on_milestone(trainer, module, step)
        # A checkpoint is asked for twice where it is written first.
        before = self.seconds if self.acted_at == step else 0.0
        self.seconds, self.acted_at = before + time.perf_counter() - began, step

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Act after ``step`` optimizer steps."""
        raise NotImplementedError

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run Lightning's hook; birth is a milestone."""
        if self.at_birth and trainer.global_step == 0:
            self.act(trainer, pl_module, 0)

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Act if a milestone is due."""
        if is_due(trainer, self.every, self.more):
            self.act(trainer, module, step)


def log_metrics(trainer: L.Trainer, metrics: dict[str, float], step: int) -> None:
    """Log to all loggers, which rank 0 alone has; ``step`` is the number of optimizer steps taken."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step)
