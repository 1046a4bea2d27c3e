"""LightningModule of pretraining: one decoder, its loss, its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ..data.batch_sizes import BatchShares
from ..data.packing import DocumentBorders
from ..errors import RunError
from ..measure.ranks import max_over_ranks, sum_over_ranks, world_size
from ..models.adapters import is_adapter
from ..models.attention.context_parallel import ContextGroup, context_ranks
from ..models.decoder import Decoder
from ..models.dropout import Dropout, keys_of_samples
from ..models.experts.routing_losses import GlobalChoices, RoutingCost
from ..models.linear_cross_entropy import TokenLosses
from ..models.tensor_shards import full_tensor, shard_of
from .activation_checkpointing import set_train_passes
from .checkpoints.state_file import BASE
from .config import OptimConfig, TrainerConfig
from .loop.steps import StepGuard, StepWatch, UpdateSkippedError
from .loop.training_data import ReadAhead
from .lr_schedule import LearningRate
from .numerics import use_fp8
from .optimizers.parameter_groups import parameter_groups, renumber_optimizer_state
from .processes.joint_failure import Progress, raise_on_every_rank
from .strategies.table import STRATEGIES
from .throughput import GpuClock, Stopwatch

#: Squares of larger numbers are infinite in float32, and with them every norm.
_LARGEST = torch.finfo(torch.float32).max ** 0.5
_LOWER = "lower optim.lr, raise optim.warmup_steps or set optim.grad_clip; the checkpoints before it are intact"


def next_token_loss(
    model: Decoder,
    batch_BT: Tensor,
    z_loss: float = 0.0,
    borders: DocumentBorders | None = None,
    dropout: Dropout | None = None,
    global_choices: GlobalChoices | None = None,
    context: ContextGroup | None = None,
) -> TokenLosses:
    """Compute losses of every next token of ``[B, T+1]`` ids, in nats; ``per_token`` is ``[B, T − skipped]``.

    The positions of a prefix see one another, so all but the last would predict tokens that they see: they are skipped.
    Padding is never a target, and since it comes at the end no token sees it. ``borders`` mark the beginnings of
    documents for a model with ``attention.documents``; the token after a document's last one is a target like any
    other. ``global_choices`` sums the experts' choices over the global batch. With ``context`` this process passes its
    part of the sequences, and losses are its share (:class:`~birthmark.models.decoder.Decoder`).
    """
    skipped = model.config.attention.first_prediction
    inputs_BT = batch_BT[:, :-1].clamp_min(0)
    # The module's call, not its forward: strategies gather weights in its hooks.
    losses: TokenLosses = model(
        inputs_BT,
        targets_BS=batch_BT[:, 1 + skipped :],
        z_loss=z_loss,
        dropout=dropout,
        global_choices=global_choices,
        documents_BT=documents_of(model, batch_BT[:, :-1], borders),
        context=context,
    )
    return losses


@torch.no_grad()
def next_token_losses(model: Decoder, batch_BT: Tensor, borders: DocumentBorders | None = None) -> Tensor:
    """Compute the cross-entropy of every next token, ``[B, T − skipped]``, for inspection: without gradients."""
    return next_token_loss(model, batch_BT, borders=borders).per_token


def documents_of(model: Decoder, tokens_BT: Tensor, borders: DocumentBorders | None) -> Tensor | None:
    """Return the number of each token's document for a model with ``attention.documents``; None for others."""
    return borders.documents(tokens_BT) if borders is not None and model.config.attention.documents else None


def _count_as(counts: dict[str, int], ready: int) -> None:
    """Shift Lightning's counts of micro-batches: it ends a step when their number is a multiple of a step's
    micro-batches.
    """
    shift = ready - counts["ready"]
    counts.update({name: n + shift for name, n in counts.items()})


class PretrainModule(L.LightningModule):
    """Module that trains a decoder on batches ``[B, T+1]`` of token ids.

    Args:
        model: the decoder, already born.
        optim: optimizer and learning rate.
        trainer: settings of the trainer, read for ``max_steps`` (the schedule's length), ``compile`` and
            ``max_skipped``.
        progress: learns the phase of the training.
        n_targets: function from sample numbers to tokens to predict; None if all have the same number.
        borders: rule by which ids mark the beginnings of documents.
        base: digest of everything beside the adapter, for a model with one: checkpoints hold only the adapter, and name
            the digest. It is trained without dropout.
        data_seed: seed of dropout for each sample.
        context: group whose processes train on parts of the same sequences.
    """

    def __init__(
        self,
        model: Decoder,
        optim: OptimConfig,
        trainer: TrainerConfig,
        progress: Progress | None = None,
        n_targets: Callable[[np.ndarray], np.ndarray] | None = None,
        borders: DocumentBorders | None = None,
        base: str | None = None,
        data_seed: int = 0,
        context: ContextGroup | None = None,
    ) -> None:
        super().__init__()
        self._base, self._data_seed, self._context = base, data_seed, context
        self._n_targets, self._borders = n_targets, borders
        self.progress, self._first_step = progress or Progress(), 0
        self.model = model
        self.optim, self.optimizer_config = optim, optim.optimizer
        self.batch_sizes, self._micro_batch_size = trainer.batch_sizes, trainer.micro_batch_size
        seq_len = model.config.max_seq_len
        self.rate = LearningRate(optim, trainer.max_steps, lambda step: self.batch_sizes.before(step) * seq_len)
        self.stopwatch = Stopwatch()
        # A compiled function beside the module, not in its place: snapshots go on calling the module as it is.
        self._loss = torch.compile(next_token_loss) if trainer.compile == "step" else next_token_loss
        if trainer.precision == "fp8":
            use_fp8(model)
        set_train_passes(model, trainer)
        self._weights: tuple[float, ...] = (1.0,)
        """Weights of the losses of a step's micro-batches."""
        self._parts: list[range] = []
        """Places of their samples in the global batch."""
        self._n_micro_batches = 0
        """Trained on since this start."""
        self._choices_LE: Tensor | None = None
        """Choices of each expert in this step, counted where several micro-batches add up to it."""
        model.narrow_residual = trainer.residual == "bf16"
        self.precision, self.engine_clips = trainer.precision, STRATEGIES[trainer.strategy].engine
        self.loss_sum: Tensor | None = None
        """Cross-entropy and z-loss of the step's micro-batches so far, ``[2]``; with experts, also the routers'
        costs.
        """
        self.z_loss: Tensor | None = None
        self.routing: RoutingCost | None = None
        """Routing cost of the last step: this rank's part of the global batch."""
        self.watch, self.guard = StepWatch(trainer.max_skipped), StepGuard(model)

    def configure_model(self) -> None:
        """Do nothing: a sharded model is sharded before its birth. Lightning requires this hook for sharded models."""

    def forward_context(self) -> AbstractContextManager[None]:
        """Return the precision context of a pass over the training model."""
        # Without the cache: it would hold the weights of all blocks, gathered, until the pass is over.
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=self.precision in ("bf16", "fp8"), cache_enabled=False
        )

    def training_step(self, batch_BT: Tensor, batch_idx: int) -> Tensor:
        """Compute the mean loss of one micro-batch; the losses of an optimizer step's micro-batches are averaged."""
        if self.loss_sum is None:
            self.guard.begin()
        with self.forward_context():
            losses = self._loss(
                self.model,
                batch_BT,
                self.optim.z_loss,
                self._borders,
                self._dropout(batch_BT, batch_idx),
                self._global_choices(batch_idx),
                self._context,
            )
        self._n_micro_batches += 1
        # A loss that is not finite makes the gradient so, and with it the norm, which all ranks have alike: they skip
        # the step together without a word about the loss. A finite one changes nothing.
        weight = self._weights[batch_idx % len(self._weights)]
        # The cross-entropy alone is the loss: runs with and without a z-loss have the same curve to compare.
        parts = [losses.objective.detach() - losses.z_loss, losses.z_loss]
        if losses.routing is not None:
            parts = [losses.cross_entropy, losses.z_loss, *losses.routing]
        share = torch.stack(parts) * weight / self.trainer.accumulate_grad_batches
        self.loss_sum = share if self.loss_sum is None else self.loss_sum + share
        return losses.objective * (losses.objective.detach() * 0 + weight)

    def _global_choices(self, batch_idx: int) -> GlobalChoices | None:
        """Return a function that sums the choices of experts over the global batch; None if a micro-batch is the whole
        batch.
        """
        if not self.model.config.experts.is_on:
            return None
        n_micro_batches = len(self._weights)
        if n_micro_batches == 1:
            return None if world_size() == 1 else self._summed_over_ranks
        if not self.model.config.experts.balances_load:
            # The cost is only shown: that of the micro-batch, whose choices other processes have too.
            return None if self._context is None else self._context.summed
        if batch_idx % n_micro_batches == 0:
            self._choices_LE = self._count_choices(batch_idx)
        return self._counted_beforehand

    # The collection of choices is not part of a compiled graph.
    @torch.compiler.disable
    def _summed_over_ranks(self, count_LE: Tensor) -> Tensor:
        # A micro-batch of another process's sample has no weight.
        return sum_over_ranks(count_LE * (self._weights[0] > 0))

    @torch.compiler.disable
    def _counted_beforehand(self, _: Tensor) -> Tensor:
        assert self._choices_LE is not None
        return self._choices_LE

    @torch.no_grad()
    def _count_choices(self, batch_idx: int) -> Tensor:
        """Count the choices of each expert ``[L, E]`` over the global batch of the step that begins.

        The gradients of the first micro-batch need the choices of the last. So each is passed once more, without
        gradients, and what the passes move is put back.
        """
        ahead, found = self.trainer.train_dataloader, list[Tensor]()
        assert isinstance(ahead, ReadAhead)

        def keep(count_LE: Tensor) -> Tensor:
            found.append(count_LE)
            return count_LE

        for i, micro_batch_BT in enumerate(ahead.upcoming(self._n_micro_batches, len(self._weights))):
            tokens_BT = micro_batch_BT.to(self.device)
            next_token_loss(
                self.model,
                tokens_BT,
                borders=self._borders,
                dropout=self._dropout(tokens_BT, batch_idx + i),
                global_choices=keep,
                context=self._context,
            )
        self.guard.put_back()
        # A micro-batch of another process's sample has no weight.
        counted = [count_LE for count_LE, weight in zip(found, self._weights, strict=True) if weight > 0]
        return sum_over_ranks(torch.stack(counted).sum(0) if counted else torch.zeros_like(found[0]))

    def _dropout(self, batch_BT: Tensor, batch_idx: int) -> Dropout | None:
        """Return the masks of a micro-batch's samples, which do not depend on the process and micro-batch that a sample
        is in.
        """
        rates = self.model.config.dropout
        if not rates.is_on or self._base is not None:
            return None
        part = self._parts[batch_idx % len(self._parts)]
        first = self.batch_sizes.before(self.global_step) + part.start
        keys_B = keys_of_samples(self._data_seed, range(first, first + len(batch_BT)))
        return Dropout(rates, torch.from_numpy(keys_B).to(batch_BT.device))

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1."""
        return self.optim.lr * self.rate.share(step - 1)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Measure the whole gradient's norm, skip a step that would ruin the weights, clip."""
        if self.engine_clips:
            return
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.see_gradient_norm(norm := full_tensor(norm))
        if self.optim.clip_in_step:
            # The divisor of torch's fused kernels; in place of clip_grads_with_norm_'s factor, with its offset.
            optimizer.grad_scale = ((norm + 1e-6) / self.optim.grad_clip).clamp(min=1.0)  # type: ignore[attr-defined]
        elif self.optim.grad_clip > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optim.grad_clip, norm)
        self.guard.hold(optimizer, parameters, norm, wait=self.device.type == "cpu")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Run Lightning's hook: gradients, clipping and the update, which may belong to a step to skip."""
        with suppress(UpdateSkippedError):
            super().optimizer_step(*args, **kwargs)
        self.guard.settle()

    def see_gradient_norm(self, norm: Tensor) -> None:
        """Keep the norm of the whole gradient, before clipping; on the CPU, end a run that skips too many steps."""
        assert self.loss_sum is not None
        cross_entropy, self.z_loss, *routing = self.loss_sum.unbind()
        self.routing = RoutingCost(*routing) if routing else None
        self.watch.see(self.global_step + 1, cross_entropy, norm)
        self.loss_sum = None
        self.guard.judge(norm)
        # On an accelerator the check would wait for the device at every step: it is made when metrics are logged, and
        # before anything is measured or saved.
        if self.device.type == "cpu" and (error := self._too_many_skipped()) is not None:
            raise error

    def check_finite(self, *, weights: bool = False) -> None:
        """Raise RunError, on every rank, if too many steps have been skipped so far.

        Collective: call on every rank. Waits for the device.

        Args:
            weights: if the weights must be finite too.
        """
        error = self._too_many_skipped()
        if error is None and weights and (what := self._diverged_weight()) is not None:
            error = RunError(f"{what} after step {self.global_step}, though losses and gradients were finite: {_LOWER}")
        if max_over_ranks(int(error is not None)):
            raise_on_every_rank(error)

    def _too_many_skipped(self) -> RunError | None:
        """Return the error with the number of skipped steps and the first one of this start; None if there are few
        enough.
        """
        if self.watch.read():
            return None
        first, most = self.watch.first_skipped, self.watch.max_skipped
        if first is None:
            return RunError(
                f"{self.watch.n_skipped} steps were skipped before this start: raise trainer.max_skipped ({most}), or "
                "go on from an earlier checkpoint"
            )
        what = f"{first.fault} at step {first.step} (learning rate {self.learning_rate(first.step):.3g})"
        if most:
            what = f"{self.watch.n_skipped} steps were skipped, and trainer.max_skipped is {most}; the first: {what}"
        return RunError(f"{what}: {_LOWER}")

    def _diverged_weight(self) -> str | None:
        """Name a weight that is not finite, or too large for any norm, in this rank's part of the model."""
        shards = {name: shard_of(parameter).local for name, parameter in self.model.named_parameters()}
        held = {name: torch.stack(shard.aminmax()).to(self.device) for name, shard in shards.items() if shard.numel()}
        if not held:  # more processes than any tensor has rows
            return None
        for name, ends in zip(held, torch.stack(list(held.values())).tolist(), strict=True):
            if not all(map(math.isfinite, ends)):
                return f"{name} is not finite"
            if max(-ends[0], ends[1]) > _LARGEST:
                return f"{name} has a value of {max(ends, key=abs):.3g}, whose square is not finite,"
        return None

    def on_train_start(self) -> None:
        """Begin the timing of training; runs after all callbacks' hooks."""
        self._first_step = self.global_step + 1
        self._share_batch()
        self.progress.enter("first step", self._first_step)
        if self.device.type == "cuda":
            self.stopwatch = Stopwatch(GpuClock())
        self.stopwatch.resume()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note that the data have arrived."""
        step = self.global_step + 1
        self.progress.enter("first step" if step == self._first_step else "step", step)

    def _share_batch(self) -> None:
        """Share the next step's batch among processes and micro-batches."""
        first, size = self.batch_sizes.before(self.global_step), self.batch_sizes.size(self.global_step)
        n_context = 1 if self._context is None else self._context.size
        shares = BatchShares(size, self._micro_batch_size, self.trainer.world_size // n_context)
        rank, _ = context_ranks(self.trainer.global_rank, n_context)
        # Every rank knows the whole batch, so that its mean over tokens needs no word between them.
        self._weights = (
            shares.weights(rank)
            if self._n_targets is None
            else shares.weights_by(self._n_targets(np.arange(first, first + size)), rank)
        )
        self._parts = shares.parts(rank)
        self.trainer.accumulate_grad_batches = shares.accumulation

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Begin the next step; runs after all callbacks' hooks, so that their work is over."""
        changes = self.batch_sizes.ramp.start or self._n_targets is not None
        if changes and (batch_idx + 1) % (before := self.trainer.accumulate_grad_batches) == 0:
            self._share_batch()
            if self.trainer.accumulate_grad_batches != before:
                progress = self.trainer.fit_loop.epoch_loop.batch_progress
                # Lightning has yet to count this micro-batch as completed.
                for counts in (progress.total, progress.current):
                    _count_as(vars(counts), self.global_step * self.trainer.accumulate_grad_batches)
        over = self.trainer.should_stop or self.global_step == self.trainer.max_steps
        self.progress.enter("end" if over else "data", self.global_step + (not over))
        self.stopwatch.resume()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the skipped steps, and the digest of an adapter's base, to the checkpoint."""
        checkpoint["steps"] = self.watch.state()
        if self._base is not None:
            checkpoint[BASE] = self._base

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state for a checkpoint; for a model with an adapter, the adapter alone."""
        whole: dict[str, Any] = super().state_dict(*args, **kwargs)
        return whole if self._base is None else {name: x for name, x in whole.items() if is_adapter(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state of a checkpoint; for a model with an adapter, the adapter alone: everything else came from the
        model that the run started from.
        """
        if self._base is None:
            return super().load_state_dict(state_dict, strict, assign)
        if strict and (odd := sorted(state_dict.keys() ^ self.state_dict().keys())):
            raise RunError(f"the checkpoint and the model differ in {odd[0]}; the run's config.yaml is another model's")
        return super().load_state_dict(state_dict, False, assign)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take learning rate, decay and betas from the config, not the checkpoint: a resumed run may change them."""
        # Earlier versions ended at the first step that they would have had to skip.
        self.watch.load(checkpoint.get("steps", {"n_skipped": 0}))
        fresh = self.configure_optimizers()
        (stored,) = checkpoint["optimizer_states"]
        renumber_optimizer_state(stored, self.model, self.optimizer_config)
        for group, current in zip(stored["param_groups"], fresh["optimizer"].param_groups, strict=True):
            group.update({name: value for name, value in current.items() if name != "params"})
            group["lr"] = current["initial_lr"] * self.rate.share(checkpoint["global_step"])
        checkpoint["lr_schedulers"][0]["base_lrs"] = fresh["lr_scheduler"]["scheduler"].base_lrs
        # Micro-batches are counted in those of one rank, and their number in a step may be another now.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            _count_as(counts, checkpoint["global_step"] * self.trainer.accumulate_grad_batches)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """See :func:`~birthmark.trainer.optimizers.parameter_groups.parameter_groups`."""
        return parameter_groups(self.model, self.optimizer_config)

    def configure_optimizers(self) -> Any:
        """Build the optimizer ``optim.name`` over the parameter groups; the learning rate changes at every step."""
        optimizer = self.optimizer_config.build(self.parameter_groups(), self.optim.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rate.share(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
