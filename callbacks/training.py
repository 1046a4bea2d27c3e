"""The figures of training itself: loss, learning rate, gradient norm, throughput; and the validation loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..measure.measurement import evaluation_mode
from ..measure.ranks import own_batches, sum_over_ranks, world_size
from .milestones import MilestoneCallback, StepCallback, is_due, log_metrics


class TrainingLog(StepCallback):
    """Logs a line every ``every`` steps. Stands before the milestone callbacks, so that their time is not counted.

    Args:
        every: optimizer steps between lines.
        tokens_per_step: tokens in a global batch.
        flops_per_token: model FLOPs of one trained token.
        peak_flops: the device's peak FLOP/s over all devices, where it is known.
        synchronize: waits until the device has computed what it was given.
        milestones: optimizer steps between milestones.
    """

    def __init__(
        self,
        every: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        synchronize: Callable[[], None],
        milestones: int,
    ) -> None:
        self.every, self.tokens_per_step = every, tokens_per_step
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.synchronize, self.milestones = synchronize, milestones
        self.last: dict[str, float] = {}
        self._last_step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Rates count from here."""
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock before the milestones take their time."""
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if ends_step and (is_due(trainer, self.every) or is_due(trainer, self.milestones)):
            # What the device still has to do of these steps is their time, not that of what follows. Without a wait
            # the clock runs on: the device does too.
            self.synchronize()
            pl_module.stopwatch.pause()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Log where it is due."""
        if not is_due(trainer, self.every):
            module.take_loss()
            return
        module.check_finite()
        tokens, seconds = (step - self._last_step) * self.tokens_per_step, module.stopwatch.take()
        self._last_step = step
        self.last = {
            "train/loss": float(sum_over_ranks(module.take_loss())) / world_size(),
            "train/lr": module.learning_rate(step),
            "train/grad_norm": float(module.grad_norm),
            "train/tokens": step * self.tokens_per_step,
            "train/tokens_per_s": tokens / seconds,
            "train/flops_per_s": tokens / seconds * self.flops_per_token,
        }
        if self.peak_flops is not None:
            self.last["train/mfu"] = self.last["train/flops_per_s"] / self.peak_flops
        log_metrics(trainer, self.last, step)


class FiniteGuard(MilestoneCallback):
    """Ends a run whose losses, gradients or weights are not finite before anything of it is measured or saved.

    Stands before the other milestone callbacks.
    """

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Check."""
        module.check_finite(weights=True)


class Validation(MilestoneCallback):
    """Validation loss at every milestone, over the same sequences each time.

    Args:
        every: optimizer steps between validations.
        sequences_NT: token ids ``[N, T+1]``.
        batch_size: sequences in one pass; each rank passes its part of them.
        losses: per-token losses of (model, batch ``[B, T+1]``), ``[B, T]`` or of the last positions only.
        bytes_per_token: of the validation text, for bits per byte.
        groups: masks ``[B, T]`` of positions by name, from the inputs; each gets a loss of its own.
    """

    def __init__(
        self,
        every: int,
        sequences_NT: np.ndarray,
        batch_size: int,
        losses: Callable[[Any, Tensor], Tensor],
        bytes_per_token: float | None,
        groups: Mapping[str, Callable[[Tensor], Tensor]],
    ) -> None:
        super().__init__(every)
        self.sequences_NT, self.batch_size = torch.from_numpy(sequences_NT), batch_size
        self.losses, self.bytes_per_token, self.groups = losses, bytes_per_token, groups
        self.last: dict[str, float] = {}

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Validate and log."""
        totals = {name: torch.zeros(2, dtype=torch.float64) for name in ["", *self.groups]}
        with evaluation_mode(module), module.forward_context():
            for batch_BT, counts in own_batches(self.sequences_NT, self.batch_size):
                losses_BT = self.losses(module.model, batch_BT.to(module.device)).double().cpu()
                if not counts:
                    continue
                for name, total in totals.items():
                    mask = self.groups[name](batch_BT[:, :-1]) if name else torch.ones_like(losses_BT)
                    mask = mask[:, -losses_BT.shape[1] :]
                    total += torch.stack([(losses_BT * mask).sum(), mask.sum()])
        totals = {name: sum_over_ranks(total) for name, total in totals.items()}
        means = {f"val/loss{'_' if name else ''}{name}": float(s / n) for name, (s, n) in totals.items()}
        if self.bytes_per_token is not None:
            means["val/bits_per_byte"] = means["val/loss"] / math.log(2) / self.bytes_per_token
        self.last = means
        log_metrics(trainer, means, step)
