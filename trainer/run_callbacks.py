"""What a run does besides its steps: callbacks in the order in which they act, and where their figures go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console

from ..callbacks.checkpoint import Checkpoint, CheckpointFirst
from ..callbacks.fingerprint import FingerprintSnapshot
from ..callbacks.loggers import JsonLinesLogger, wandb_logger
from ..callbacks.milestones import MilestoneCallback
from ..callbacks.progress import RunProgress
from ..callbacks.snapshot import BiasSnapshot
from ..callbacks.stop import StopOnSignal
from ..callbacks.training import FiniteGuard, TrainingLog, Validation
from ..data.prepare import PreparedData
from ..data.probes import random_probe, text_probe
from ..measure.ranks import world_size
from ..measure.recorder import SnapshotRecorder
from ..measure.records import RunDir
from ..models.decoder import Decoder
from .config import RunConfig
from .module import next_token_losses
from .processes.launched_process import LaunchedProcess
from .processes.phases import Progress
from .provenance import code, environment
from .throughput import flops_per_token, peak_flops, synchronize


def _probes(config: RunConfig, data: PreparedData) -> dict[str, np.ndarray]:
    n, length = config.snapshot.n_sequences, config.snapshot.seq_len
    makers = {
        "random": lambda: random_probe(config.model.vocab_size, n, length, config.snapshot.probe_seed),
        "text": lambda: text_probe(data.val, n, length),
    }
    return {name: makers[name]() for name in config.snapshot.probes}


def build_callbacks(
    config: RunConfig,
    run: RunDir,
    data: PreparedData,
    n_params: int,
    reference: Callable[[int], Decoder],
    device: torch.device,
    console: Console,
    progress: Progress,
) -> tuple[list[L.Callback], StopOnSignal]:
    """In the order in which they act at a step: stop, clock, check, validate, measure, save, print.

    A stop saves before it validates.
    """
    settings, seq_len = config.trainer, config.model.max_seq_len
    every, tokens_per_step = settings.checkpoint_every, settings.global_batch_size * seq_len
    peak = peak_flops(device, settings.precision)
    stop = StopOnSignal()
    training = TrainingLog(
        settings.log_every,
        tokens_per_step,
        flops_per_token(config.model, n_params, seq_len),
        None if peak is None else peak * world_size(),
        synchronize=partial(synchronize, device),
        milestones=every,
    )
    n_val = min(settings.val_sequences, data.val.n_samples or settings.val_sequences)
    validation = Validation(
        every,
        data.val.batch(0, n_val),
        settings.micro_batch_size,
        next_token_losses,
        data.bytes_per_token,
        data.groups,
    )
    snapshot = (
        BiasSnapshot(
            SnapshotRecorder(
                run.path,
                config.snapshot,
                probes=_probes(config, data),
                newborn=reference,
                init_seed=config.init_seed,
                token_texts=data.token_texts,
                tokens_per_step=tokens_per_step,
            ),
            every=every,
        )
        if config.snapshot.enabled
        else None
    )
    checkpoint = Checkpoint(every, run, keep_last=settings.keep_last, keep_every=settings.keep_every)

    guard = FiniteGuard(every, at_birth=False)
    milestones: dict[str, MilestoneCallback] = {"validation": validation}
    if snapshot is not None:
        milestones["snapshot"] = snapshot
    if config.snapshot.fingerprint.enabled:
        milestones["fingerprint"] = FingerprintSnapshot(
            config.snapshot.fingerprint,
            every=every,
            newborn=reference,
            init_seed=config.init_seed,
            max_seq_len=seq_len,
        )
    milestones["checkpoint"] = checkpoint
    for phase, callback in milestones.items():
        callback.announce = partial(progress.enter, phase)
    shown = RunProgress(every, console, training, validation, snapshot)
    return [stop, training, guard, CheckpointFirst(checkpoint), *milestones.values(), shown], stop


def build_loggers(
    config: RunConfig, run: RunDir, record: dict[str, Any], device: torch.device, process: LaunchedProcess | None
) -> list[Logger]:
    """The run's own log and, where it is wanted and there, W&B's. Only rank 0 logs."""
    # Of this start: a run that goes on may do so elsewhere.
    made_with = {"birth": record["digest"], "code": code(), "environment": environment(device, process)}
    wandb = wandb_logger(config.log, run, record["run_id"], {**asdict(config), **made_with})
    return [JsonLinesLogger(run), *([wandb] if wandb is not None else [])]
