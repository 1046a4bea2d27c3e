"""Callbacks of a run, in the order in which they act, and loggers for their figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from rich.console import Console

from ..callbacks.checkpoint import Checkpoint, CheckpointFirst
from ..callbacks.evaluation import Evaluation
from ..callbacks.fingerprint import FingerprintSnapshot
from ..callbacks.loggers import CsvLogger, JsonLinesLogger, tensorboard_logger
from ..callbacks.milestones import MilestoneCallback, never
from ..callbacks.progress import RunProgress
from ..callbacks.snapshot import BiasSnapshot
from ..callbacks.stop import StopOnSignal
from ..callbacks.training import FiniteGuard, MilestoneTimes, TrainingLog, Validation
from ..callbacks.wandb_run import Identity, wandb_run
from ..data.prepare import PreparedData
from ..data.probes import random_probe
from ..errors import UsageError
from ..evaluation.evaluator import Evaluator
from ..measure.config import FEWEST_SEQUENCES
from ..measure.ranks import from_rank_zero, rank, world_size
from ..measure.recorder import SnapshotRecorder
from ..measure.records import RunDir
from ..models.decoder import Decoder
from ..report.terminal import say
from .checkpoints.upload import Uploader
from .config import RunConfig
from .loop.profiling import CleanUp, StepProfile, check_room
from .module import next_token_losses
from .optimizers.weight_average import AverageMeasured, WeightAverage
from .processes.joint_failure import Progress
from .processes.launched_process import LaunchedProcess
from .provenance import code, environment
from .run_folder import RunStart
from .strategies.table import STRATEGIES
from .throughput import flops_per_token, peak_flops, peak_memory, synchronize


def _probes(config: RunConfig, data: PreparedData, say: Callable[[str], object]) -> dict[str, np.ndarray]:
    snapshot, found = config.snapshot, dict[str, np.ndarray]()
    length = snapshot.seq_len
    for name, n in snapshot.sequences(reads_text=config.data.reads_text).items():
        if name == "random":
            found[name] = random_probe(config.model.vocab_size, n, length, snapshot.probe_seed)
        elif snapshot.probes is not None:
            try:
                found[name] = data.text_probe(n, length)
            except UsageError as error:
                raise UsageError(f"snapshot.n_sequences, {error}") from None
        else:
            try:
                found[name] = data.text_probe(n, length, FEWEST_SEQUENCES)
            except UsageError as error:
                say(f"snapshots measure random tokens alone, not text: {error}")
            else:
                if (there := len(found[name])) < n:
                    say(f"snapshots measure {there} sequences of text, not {n}: validation has no more of {length}")
    return found


def build_recorder(
    config: RunConfig,
    run: RunDir,
    data: PreparedData,
    reference: Callable[[int], Decoder],
    say: Callable[[str], object] = print,
) -> SnapshotRecorder | None:
    """Build the recorder of the run's snapshots, if it takes any; nothing is written yet.

    Raises:
        UsageError: the data cannot give a probe, or ``snapshot.metrics`` names something that is not a metric.
    """
    if not config.snapshot.enabled:
        return None
    return SnapshotRecorder(
        run.path,
        # A run of this package is there to be measured.
        replace(config.snapshot, on_error=config.snapshot.on_error or "raise"),
        probes=_probes(config, data, say),
        newborn=reference,
        init_seed=config.init_seed,
        token_texts=data.token_texts,
        tokens_per_step=config.tokens_after,
        borders=data.borders,
        init_from=config.init_from,
    )


def build_callbacks(
    config: RunConfig,
    run: RunDir,
    data: PreparedData,
    n_params: int,
    reference: Callable[[int], Decoder],
    device: torch.device,
    console: Console,
    progress: Progress,
    recorder: SnapshotRecorder | None,
    evaluator: Evaluator | None = None,
    upload: Uploader | None = None,
) -> tuple[list[L.Callback], StopOnSignal]:
    """Build the callbacks in the order in which they act at a step: stop, clock, trace, check, validate, measure,
    evaluate, measure the average, save, print, clean up.

    A stop saves before it validates.
    """
    settings, seq_len = config.trainer, config.model.max_seq_len
    every = settings.checkpoint_every
    more = config.snapshot.asks if config.snapshot.enabled else never
    peak = peak_flops(device, settings.precision)
    stop, say = StopOnSignal(), partial(console.print, highlight=False, soft_wrap=True, markup=False)
    training = TrainingLog(
        settings.log_every,
        config.tokens_after,
        flops_per_token(config.model, n_params, seq_len, frozen=config.adapter.is_on),
        None if peak is None else peak * world_size(),
        synchronize=partial(synchronize, device),
        milestones=every,
        say=say,
        peak_memory=partial(peak_memory, device),
        by_source=data.tokens_by_source,
        more=more,
    )
    n_val = min(settings.val_sequences, data.val.n_samples or settings.val_sequences)
    validation = Validation(
        every,
        data.val.batch(0, n_val),
        settings.micro_batch_size,
        partial(next_token_losses, borders=data.borders),
        data.bytes_per_token,
        data.groups,
        data.mixture.shares if data.mixture else {},
        more,
    )
    snapshot = None if recorder is None else BiasSnapshot(recorder, every=every)
    average = None
    if config.optim.ema is not None:
        facts = STRATEGIES[settings.strategy]
        average = WeightAverage(config.optim.ema, divides=facts.shards_optimizer and not facts.shards_weights)
    checkpoint = Checkpoint(
        every, run, keep_last=settings.keep_last, keep_every=settings.keep_every, say=say, upload=upload
    )

    guard = FiniteGuard(every, at_birth=False, more=more)
    milestones: dict[str, MilestoneCallback] = {"validation": validation}
    if snapshot is not None:
        milestones["snapshot"] = snapshot
    if config.snapshot.fingerprint.enabled:
        milestones["fingerprint"] = FingerprintSnapshot(
            config.snapshot.fingerprint,
            every=every,
            newborn=reference,
            init_seed=config.init_seed,
            more=more,
        )
    evaluation = None
    if evaluator is not None:
        milestones["evaluation"] = evaluation = Evaluation(
            config.eval.every or every,
            evaluator if average is None else average.beside(evaluator),
            evaluator.title,
            config.eval.share,
            lambda: training.step_s,
            say,
        )
    if average is not None:
        milestones["average"] = AverageMeasured(average, every, validation, recorder, more)
    milestones["checkpoint"] = checkpoint
    for phase, callback in milestones.items():
        callback.announce = partial(progress.enter, phase)
    shown = RunProgress(every, console, training, validation, snapshot, evaluation, more)
    last = [MilestoneTimes(every, milestones, more), shown, CleanUp(every, device, more)]
    # On the rank that logs: traces of the others say the same, but for who waits.
    traces = run.path / "profile"
    if settings.profile:
        from_rank_zero(lambda: check_room(traces))
    traced = [StepProfile(settings.profile, traces, device)] if settings.profile and rank() == 0 else []
    first = [stop] if average is None else [stop, average]
    before = [*first, training, *traced, guard, CheckpointFirst(checkpoint, more)]
    return [*before, *milestones.values(), *last], stop


def build_loggers(
    config: RunConfig, run: RunDir, start: RunStart, device: torch.device, process: LaunchedProcess | None,
    console: Console,
) -> list[Logger]:  # fmt: skip
    """Build the run's own log, and the loggers that ``log.loggers`` names. Only rank 0 logs."""
    found: list[Logger] = [JsonLinesLogger(run)]
    if "csv" in config.log.loggers:
        found.append(CsvLogger(run))
    if "tensorboard" in config.log.loggers:
        found.append(tensorboard_logger(run, 0 if start.checkpoint is None else start.step + 1))
    # Facts of this start: a resumed run may do so elsewhere.
    made_with = {"birth": start.birth["digest"], "code": code(), "environment": environment(device, process)}
    record = {**asdict(config), **made_with}
    identity, tell = _identity(config, run, start), partial(say, console)
    wandb = wandb_run(config.log, run, identity, record, config.tokens_after, tell)
    return found if wandb is None else [*found, wandb]


def _identity(config: RunConfig, run: RunDir, start: RunStart) -> Identity:
    """Return a run's identity in W&B: its name is its folder's, unless that is only its seed; its group is its name
    without the seed.
    """
    name, seed = config.name or run.path.name, re.escape(str(config.init_seed))
    of_seed_alone = re.fullmatch(r"(seed[-_]?)?\d+", run.path.name)
    return Identity(
        id=start.birth["run_id"],
        name=name if of_seed_alone else run.path.name,
        group=re.sub(rf"[-_](seed[-_]?)?{seed}$", "", name),
        job_type="adapt" if config.adapter.is_on else "continue" if config.init_from else "pretrain",
    )
