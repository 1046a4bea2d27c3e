"""The figures of training itself: loss and its spikes, learning rate, gradient norm, throughput, validation loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..data.packing import PADDING
from ..errors import RunError
from ..measure.measurement import evaluation_mode
from ..measure.ranks import batches_of_rank, rank, sum_over_ranks, world_size
from .milestones import MilestoneCallback, StepCallback, is_due, log_metrics, never

#: Steps that a step is compared with; fewer than the least, and none is a spike.
WINDOW, LEAST = 128, 32
#: So many robust standard deviations above their median is a spike.
FAR = 6.0
#: A standard deviation over the median absolute deviation, of a normal distribution.
_SD_OVER_MAD = 1.4826


class Spike(NamedTuple):
    """A spike."""

    step: int
    value: float
    z: float
    """Robust standard deviations above the median."""


class Spikes:
    """Counter of the spikes of one quantity.

    A spike is larger than all of the 128 values before it (32 at least), and more than 6 robust standard deviations
    above their median; one is 1.4826 times their median absolute deviation. It enters the window as any other value:
    the first steps of a new level are spikes, not all of them. A value that is not finite is of a skipped step, and
    left out.
    """

    def __init__(self) -> None:
        self.count = 0
        self._window: deque[float] = deque(maxlen=WINDOW)

    def take(self, steps: Sequence[int], values: Sequence[float]) -> list[Spike]:
        """Return the spikes among the next steps."""
        found = []
        for step, value in zip(steps, values, strict=True):
            if not math.isfinite(value):
                continue
            if (z := self._z(value)) > FAR:
                self.count += 1
                found.append(Spike(step, value, z))
            self._window.append(value)
        return found

    def _z(self, value: float) -> float:
        if len(self._window) < LEAST or value <= max(self._window):
            return 0.0
        middle = median(self._window)
        spread = _SD_OVER_MAD * median(abs(other - middle) for other in self._window)
        return (value - middle) / spread if spread else math.inf

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"count": self.count, "window": list(self._window)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state` from a checkpoint."""
        self.count, self._window = state["count"], deque(state["window"], maxlen=WINDOW)


# ---------------------------------------------------------------- log of the training itself
# Loss, learning rate, gradient norm, throughput; and the validation loss.


class TrainingLog(StepCallback):
    """Callback that logs a line every ``every`` steps. Place it before the milestone callbacks, so that their time is
    not counted.

    Args:
        every: optimizer steps between lines.
        tokens_after: tokens that the first so many steps train on.
        flops_per_token: model FLOPs of one trained token.
        peak_flops: the device's peak FLOP/s over all devices, where it is known.
        synchronize: waits until the device has computed what it was given.
        milestones: optimizer steps between milestones.
        say: called with a line for each skipped step and each spike.
        peak_memory: the most memory in GB that was allocated.
        by_source: shares a number of tokens among the sources that gave them; none where there is one corpus.
        more: asks for milestones at further steps.
    """

    def __init__(
        self,
        every: int,
        tokens_after: Callable[[int], int],
        flops_per_token: float,
        peak_flops: float | None,
        synchronize: Callable[[], None],
        milestones: int,
        say: Callable[[str], None],
        peak_memory: Callable[[], float],
        by_source: Callable[[int], Mapping[str, int]] = lambda n_tokens: {},
        more: Callable[[int], bool] = never,
    ) -> None:
        self.more = more
        self.by_source = by_source
        self.every, self.tokens_after = every, tokens_after
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.synchronize, self.milestones, self.say = synchronize, milestones, say
        self.peak_memory = peak_memory
        self.spikes = {"loss": Spikes(), "gradient norm": Spikes()}
        self.last: dict[str, float] = {}
        self._last_step, self._waited_s = 0, 0.0
        self._laps: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begin the counts for rates."""
        self._last_step, self._waited_s = trainer.global_step, pl_module.progress.waited_s

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop the clock before the milestones take their time."""
        ends_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        due = is_due(trainer, self.every) or is_due(trainer, self.milestones, self.more)
        if ends_step and not due:
            pl_module.stopwatch.lap()
        elif ends_step:
            # Work that the device still has to do for these steps is their time, not that of the following. Without a
            # wait the clock runs on: the device does too.
            self.synchronize()
            pl_module.stopwatch.lap()
            pl_module.stopwatch.pause()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_step_end(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Log if it is due."""
        logs = is_due(trainer, self.every)
        # Log at milestones too, so that a checkpoint includes the steps before it.
        if not logs and not is_due(trainer, self.milestones, self.more) and not module.watch.full:
            return
        module.check_finite()
        losses, norms = self._judge(module.watch)
        self._laps += module.stopwatch.take_laps()
        if not logs:
            return
        tokens, seconds = self.tokens_after(step) - self.tokens_after(self._last_step), module.stopwatch.take()
        self._last_step = step
        self.last = {
            "train/loss": losses[-1],
            "train/lr": module.learning_rate(step),
            "train/grad_norm": norms[-1],
            "train/tokens": self.tokens_after(step),
            "train/tokens_per_s": tokens / seconds,
            "train/flops_per_s": tokens / seconds * self.flops_per_token,
            "train/skipped_steps": module.watch.n_skipped,
            "train/loss_spikes": self.spikes["loss"].count,
            "train/grad_norm_spikes": self.spikes["gradient norm"].count,
            **self._pace(seconds, module.progress.waited_s),
        }
        for name, n_tokens in self.by_source(self.tokens_after(step)).items():
            self.last[f"train/tokens/{name}"] = n_tokens
        if module.optim.z_loss:
            self.last["train/z_loss"] = float(sum_over_ranks(module.z_loss)) / world_size()
        if module.routing is not None:
            for name, cost in module.routing._asdict().items():
                self.last[f"train/{name}"] = float(sum_over_ranks(cost)) / world_size()
        if self.peak_flops is not None:
            self.last["train/mfu"] = self.last["train/flops_per_s"] / self.peak_flops
        log_metrics(trainer, self.last, step)

    def _pace(self, seconds: float, waited_s: float) -> dict[str, float]:
        """Collect step times, waits for data and memory since the last line, over all ranks."""
        laps, self._laps = np.array(self._laps), []
        waited, self._waited_s = waited_s - self._waited_s, waited_s
        own = torch.zeros(world_size(), 3, dtype=torch.float64)
        own[rank()] = torch.tensor([np.quantile(laps, 0.5), waited / seconds, self.peak_memory()])
        p50, wait, memory = sum_over_ranks(own).unbind(-1)
        found = {
            "train/step_p50_s": float(p50[0]),
            "train/step_p99_s": float(np.quantile(laps, 0.99)),
            "train/data_wait": float(wait.max()),
            "train/peak_memory": float(memory.max()),
        }
        if world_size() > 1:
            found |= {"train/slowest_rank": int(p50.argmax()), "train/slowest_rank_p50_s": float(p50.max())}
        return found

    @property
    def step_s(self) -> float | None:
        """Median time of a step since the last line, or of the line before if that was just written; None as long as no
        step is timed.
        """
        return float(np.median(self._laps)) if self._laps else self.last.get("train/step_p50_s")

    def _judge(self, watch: Any) -> tuple[Sequence[float], Sequence[float]]:
        """Return the losses of the global batch and the gradient norms since the last look, and report unusual ones."""
        seen = watch.take()
        steps, norms = [s.step for s in seen], [s.grad_norm for s in seen]
        losses = (sum_over_ranks(torch.tensor([s.loss for s in seen])) / world_size()).tolist()
        if skipped := [s for s in seen if s.skipped]:
            which = f"{len(skipped)} steps from" if len(skipped) > 1 else "step"
            allowed = f"more than trainer.max_skipped {watch.max_skipped} end the run"
            self.say(f"{which} {skipped[0].step} skipped: {skipped[0].fault}; {watch.n_skipped} so far, {allowed}")
        for (name, spikes), values in zip(self.spikes.items(), (losses, norms), strict=True):
            if found := spikes.take(steps, values):
                worst = max(found, key=lambda spike: spike.z)
                more = f"; {len(found)} such steps since the last line" if len(found) > 1 else ""
                self.say(
                    f"{name} {worst.value:.4g} at step {worst.step} is a spike: {worst.z:.1f} robust standard "
                    f"deviations above the steps before{more}"
                )
        return losses, norms

    def state_dict(self) -> dict[str, Any]:
        """Return the spikes so far, and the values that the next steps are compared with."""
        return {name: spikes.state() for name, spikes in self.spikes.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts."""
        for name, spikes in self.spikes.items():
            spikes.load(state_dict[name])


class FiniteGuard(MilestoneCallback):
    """Callback that ends a run that skips too many steps, or whose weights are not finite, before it is measured or
    saved.

    Stands before the other milestone callbacks.
    """

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Check."""
        module.check_finite(weights=True)


class Validation(MilestoneCallback):
    """Callback that computes the validation loss at every milestone, over the same sequences each time.

    Args:
        every: optimizer steps between validations.
        sequences_NT: token ids ``[N, T+1]``.
        batch_size: sequences in one pass; each rank passes its part of them.
        losses: function from (model, batch ``[B, T+1]``) to per-token losses, ``[B, T]`` or of the last positions only.
        bytes_per_token: bytes per token of the validation text, for bits per byte.
        groups: masks ``[B, T]`` of positions by name, from the inputs; each gets a separate loss.
        shares: shares of several sources, by name, that take turns in ``sequences_NT``: each gets a separate loss, and
            the total is their weighted mean.
        more: function that says if a step is a further one.
    """

    def __init__(
        self,
        every: int,
        sequences_NT: np.ndarray,
        batch_size: int,
        losses: Callable[[Any, Tensor], Tensor],
        bytes_per_token: float | None,
        groups: Mapping[str, Callable[[Tensor], Tensor]],
        shares: Mapping[str, float],
        more: Callable[[int], bool] = never,
    ) -> None:
        super().__init__(every, more=more)
        self.shares = shares
        self.sequences_NT, self.batch_size = torch.from_numpy(sequences_NT), batch_size
        self.losses, self.bytes_per_token, self.groups = losses, bytes_per_token, groups
        self.last: dict[str, float] = {}

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Validate and log."""
        self.last = self.means(module, step)
        log_metrics(trainer, self.last, step)

    def means(self, module: Any, step: int) -> dict[str, float]:
        """Compute the losses by their logged names. Collective.

        Raises:
            RunError: the loss is not finite.
        """
        names, sources = ["", *self.groups], list(self.shares) or [""]
        # Sums and numbers of losses, by source and group.
        totals_SG2 = torch.zeros(len(sources), len(names), 2, dtype=torch.float64)
        with evaluation_mode(module), module.forward_context():
            for rows_B, counts in batches_of_rank(torch.arange(len(self.sequences_NT)), self.batch_size):
                batch_BT = self.sequences_NT[rows_B]
                losses_BT = self.losses(module.model, batch_BT.to(module.device)).double().cpu()
                if not counts:
                    continue
                for g, name in enumerate(names):
                    mask_BT = (
                        self.groups[name](batch_BT[:, :-1])
                        if name
                        else torch.ones_like(batch_BT[:, 1:], dtype=torch.bool)
                    )
                    mask_BT = (mask_BT & (batch_BT[:, 1:] != PADDING))[:, -losses_BT.shape[1] :]
                    found_B2 = torch.stack([(losses_BT * mask_BT).sum(1), mask_BT.sum(1).double()], dim=-1)
                    totals_SG2[:, g].index_add_(0, rows_B % len(sources), found_B2)
        totals_SG2 = sum_over_ranks(totals_SG2)
        means_SG = totals_SG2[..., 0] / totals_SG2[..., 1]
        shares_S = torch.tensor(list(self.shares.values()) or [1.0], dtype=torch.float64)
        means = {
            f"val/loss{'_' if name else ''}{name}": float(mean)
            for name, mean in zip(names, shares_S @ means_SG, strict=True)
        }
        means |= {f"val/loss/{source}": float(means_SG[s, 0]) for s, source in enumerate(self.shares)}
        if self.bytes_per_token is not None:
            means["val/bits_per_byte"] = means["val/loss"] / math.log(2) / self.bytes_per_token
        # The same on all ranks. Weights that give such a loss can be finite: no checkpoint is written of them either.
        # All positions are in it; a group may have none here, and then no loss.
        if not math.isfinite(loss := means["val/loss"]):
            if step == 0:
                raise RunError(
                    f"val/loss is {loss} before the first step: look at model.init or init_from, or a part of your own"
                )
            raise RunError(
                f"val/loss is {loss} after step {step}, though all weights are finite: lower optim.lr or raise "
                "optim.warmup_steps, and go on from an earlier checkpoint"
            )
        return means


class MilestoneTimes(MilestoneCallback):
    """Callback that logs the time of each part of a milestone, during which training paused. Place it after them.

    Args:
        every: optimizer steps between milestones.
        parts: parts that act at milestones, by name, at some of the steps or at all.
        more: asks for further steps.
    """

    def __init__(self, every: int, parts: Mapping[str, MilestoneCallback], more: Callable[[int], bool] = never) -> None:
        super().__init__(every, more=more)
        self.parts = parts

    def on_milestone(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Log the times."""
        acted = {name: part for name, part in self.parts.items() if part.acted_at == step}
        log_metrics(trainer, {f"train/{name}_s": part.seconds for name, part in acted.items()}, step)
