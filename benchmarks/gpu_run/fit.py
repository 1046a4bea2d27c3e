"""Training as in a run, our module under Lightning's trainer, on random tokens: its speed and its memory."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from device import Peak, release
from libraries import drawn
from lightning.fabric.plugins.environments import LightningEnvironment

from birthmark.measure.config import SnapshotConfig
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.trainer.config import OptimConfig, RunConfig, TrainerConfig
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.strategies.lightning_setup import set_up_strategy
from birthmark.trainer.throughput import flops_per_token, peak_flops


@dataclass(frozen=True)
class Fit:
    """Speed and memory of a training."""

    micro_batch_size: int
    parameters: int
    step_s: float
    """Median seconds of a step, with its optimizer."""
    tokens_per_s: float
    mfu: float | None
    """None where the device's peak is not known."""
    peak_bytes: int | None
    """Peak over the bytes held before the model was made; None if the system does not report it."""
    first_step_s: float
    """Seconds of the first step, with everything that is compiled or chosen once."""


class _Marks(L.Callback):
    """Marks of the beginning of every step on the device's own clock; nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def _mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._mark()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._mark()

    def seconds(self, accumulation: int) -> list[float]:
        """Return the seconds of every step of so many micro-batches."""
        pairs = list(pairwise(self.marks[::accumulation]))
        if self.device.type != "cuda":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


def _fit(config: RunConfig, device: torch.device, warmup: int) -> Fit:
    settings, peak = config.trainer, Peak(device)
    peak.start()
    strategy = set_up_strategy(settings, config.optim.grad_clip, device)
    if strategy.shard is None:
        model = drawn(config.model, device)
    else:
        model = born(config.model, config.init_seed, device, strategy.shard)
    n_params = sum(p.numel() for p in model.parameters())
    shape = settings.micro_batch_size, config.model.max_seq_len + 1
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(4)]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    accumulation = settings.global_batch_size // settings.micro_batch_size
    data = [batches[i % len(batches)] for i in range(settings.max_steps * accumulation)]
    marks = _Marks(device)
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy.lightning,
        max_steps=settings.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulation,
        callbacks=[marks],
        plugins=[LightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(PretrainModule(model, config.optim, settings), loader)
    seconds = marks.seconds(accumulation)
    step = statistics.median(seconds[warmup:])
    speed = settings.global_batch_size * config.model.max_seq_len / step
    ceiling = peak_flops(device, settings.precision)
    flops = flops_per_token(config.model, n_params, config.model.max_seq_len)
    mfu = None if ceiling is None else speed * flops / ceiling
    return Fit(settings.micro_batch_size, n_params, step, speed, mfu, peak.above(), seconds[0])


def run_config(model: ModelConfig, trainer: TrainerConfig, optim: OptimConfig | None = None) -> RunConfig:
    """Return the config of a run of this model without snapshots."""
    snapshot = SnapshotConfig(enabled=False)
    return RunConfig(model=model, trainer=trainer, optim=optim or OptimConfig(), snapshot=snapshot)


def fit(config: RunConfig, device: str, warmup: int) -> Fit:
    """Train ``config.trainer.max_steps`` steps; the first ``warmup`` do not count.

    If a micro-batch does not fit into the device's memory, half of it is tried, down to one sequence.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    size = config.trainer.micro_batch_size
    accumulation = config.trainer.global_batch_size // size
    while True:
        trainer = replace(config.trainer, micro_batch_size=size, global_batch_size=size * accumulation)
        try:
            return _fit(replace(config, trainer=trainer), torch.device(device), warmup)
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        # Here, where the error no longer holds the frames that hold the tensors.
        size //= 2
        release(device)
