"""Average of the weights over training, held beside them in shards: ``optim.ema``.

After step ``t`` the average is ``Σ d^(t−i) w_i / Σ d^(t−i)`` over the weights ``w_i`` after each step ``i = 1 … t``,
skipped steps included: an exponential moving average without its bias. So the birth has no weight of its own in it, and
a mark that the average shows was in the trained weights. (Adam divides by the same sum, arXiv 1412.6980.)

torch and Lightning average copies of a whole model, which no process holds where weights are sharded; torch's update of
lists of tensors is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...callbacks.milestones import MilestoneCallback, StepCallback, log_metrics
from ...callbacks.training import Validation
from ...errors import RunError
from ...measure.ranks import rank, world_size
from ...measure.recorder import SnapshotRecorder
from ...models.decoder import Decoder
from ...models.tensor_shards import TensorShard, renew, shard_of
from ..checkpoints.state_file import AVERAGE
from ..checkpoints.stored_tensors import StoredTensor, load_into

#: Prefix of the logged names of figures that are the average's.
PREFIX = "ema/"


class WeightAverage(StepCallback):
    """Callback that averages the trained weights after every step, and keeps the average in checkpoints.

    Place it before all callbacks that measure or save.

    Args:
        decay: ``d`` above, between 0 and 1.
        divides: if each process averages an equal part of weights that all hold whole; else all that it holds.
    """

    def __init__(self, decay: float, *, divides: bool) -> None:
        self.decay, self.divides = decay, divides
        self.n = 0
        """Steps in the average."""
        self._parts: dict[str, tuple[TensorShard, TensorShard]] = {}
        """By parameter: this process's part of the weights, and of the average."""
        self._stored: Mapping[str, Any] | None = None

    # ---------------------------------------------------------------- training

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Begin the average, or go on with that of the checkpoint, where the weights lie by now."""
        named = [(name, p) for name, p in pl_module.model.named_parameters() if p.requires_grad]
        for name, parameter in named:
            weights = self._part(shard_of(parameter))
            self._parts[name] = weights, replace(weights, local=weights.local.clone())
        if self._stored is None:
            return
        if odd := sorted(self._stored.keys() ^ self._parts.keys()):
            raise RunError(f"the checkpoint and the model differ in the average of {odd[0]}; start a new run")
        for name, (_, average) in self._parts.items():
            _fill(average, self._stored[name])
        self._stored = None

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Take the weights after a step into the average."""
        self.n += 1
        share = (1 - self.decay) / (1 - self.decay**self.n)
        averages: list[Any] = [average.local for _, average in self._parts.values()]
        update: Callable[..., None] = get_ema_multi_avg_fn(1 - share)
        update(averages, [weights.local for weights, _ in self._parts.values()], None)

    def _part(self, whole: TensorShard) -> TensorShard:
        """Return the part of this process's weights that it averages."""
        if not self.divides:
            return whole
        length = _part_length(whole)
        start = min(rank() * length, whole.numel)
        return TensorShard(whole.local[start : start + length], start, whole.shape)

    # ---------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add this process's part of the average to the checkpoint."""
        weights = {name: average for name, (_, average) in self._parts.items()}
        checkpoint[AVERAGE] = {"steps": self.n, "weights": weights}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the average of the checkpoint until training begins."""
        if AVERAGE not in checkpoint:
            raise RunError(f"the checkpoint has no averaged weights, but optim.ema is {self.decay:g}; leave it out")
        self.n, self._stored = checkpoint[AVERAGE]["steps"], checkpoint[AVERAGE]["weights"]

    # ---------------------------------------------------------------- measuring

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Put the average in the place of the weights within the context; afterwards they are as they were, to the bit.

        Collective: call on every rank.
        """
        held: list[tuple[Tensor, Tensor]] = []
        try:
            for name, parameter in model.named_parameters():
                if name in self._parts:
                    local = shard_of(parameter).local
                    held.append((local, local.clone()))
                    local.copy_(self._gathered(self._parts[name][1]))
            renew(model)
            yield
        finally:
            for local, before in held:
                local.copy_(before)
            renew(model)

    def beside(self, measured: Callable[[Decoder], dict[str, float]]) -> Callable[[Decoder], dict[str, float]]:
        """Return a function that measures a model's weights, and under names with ``ema/`` their average too."""

        def both(model: Decoder) -> dict[str, float]:
            found = measured(model)
            if not self.n:
                return found
            with self.in_place(model):
                return found | prefixed(measured(model))

        return both

    def _gathered(self, part: TensorShard) -> Tensor:
        """Return the average of all weights that this process holds."""
        if not self.divides or world_size() == 1:
            return part.local
        padded = part.local.new_zeros(_part_length(part))
        padded[: part.local.numel()] = part.local
        parts = padded.new_empty(world_size() * len(padded))
        dist.all_gather_into_tensor(parts, padded)
        return parts[: part.numel]


def _part_length(whole: TensorShard) -> int:
    return -(-whole.numel // world_size())


@torch.no_grad()
def _fill(target: TensorShard, stored: Tensor | StoredTensor) -> None:
    """Copy a part from a checkpoint's tensor, which is read whole already or not yet."""
    if isinstance(stored, StoredTensor):
        load_into(target, stored)
    else:
        flat = stored.reshape(-1)
        target.fill(lambda start, stop: flat[start:stop])


def prefixed(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures under the names of the average's."""
    return {f"{PREFIX}{name}": value for name, value in figures.items()}


class AverageMeasured(MilestoneCallback):
    """Callback that validates and measures the average at every milestone, and logs it beside the weights' figures.

    ``ema/val/loss``, ``ema/bias/…``: the scalars of a snapshot that is not written. `RUN@ema` names the average for the
    commands that measure in full.

    Args:
        average: the average.
        every: optimizer steps between milestones.
        validation: the run's validation.
        recorder: the run's snapshots, if it takes any.
        more: asks for further steps.
    """

    def __init__(
        self,
        average: WeightAverage,
        every: int,
        validation: Validation,
        recorder: SnapshotRecorder | None,
        more: Callable[[int], bool],
    ) -> None:
        super().__init__(every, at_birth=False, more=more)
        self.average, self.validation, self.recorder = average, validation, recorder

    def on_milestone(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Measure and log."""
        with self.average.in_place(module.model):
            figures = self.validation.means(module, step)
            if self.recorder is not None:
                snapshot = self.recorder.take_if_possible(module.model, step, writes=False)
                figures |= {} if snapshot is None else snapshot.scalars()
        if rank() == 0:
            log_metrics(trainer, prefixed(figures), step)
