"""One pretraining run from config to the last checkpoint: config → birth → data → steps, each in one place."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.loggers import Logger
from rich.console import Console
from torch.utils.data import DataLoader

from ..callbacks.checkpoint import Checkpoint
from ..callbacks.fingerprint import FingerprintSnapshot
from ..callbacks.loggers import JsonLinesLogger, close_loggers, wandb_logger
from ..callbacks.progress import RunProgress
from ..callbacks.snapshot import BiasSnapshot
from ..callbacks.stop import StopOnSignal
from ..callbacks.training import TrainingLog, Validation
from ..data.batches import MicroBatches
from ..data.prepare import PreparedData, prepare
from ..data.probes import random_probe, text_probe
from ..errors import RunError, UsageError
from ..files import atomic_path, read_json, write_json
from ..measure.ranks import check_clocks, check_same, from_rank_zero, rank, world_size
from ..measure.recorder import SnapshotRecorder
from ..measure.records import RunDir, truncate_metrics, write_metrics_csv
from ..models.attention.kernel_choice import explicit_because, kernel_sentence
from ..models.birth import certificate, digest
from ..models.decoder import Decoder
from .allocator import keep_freed_memory
from .checkpoints.folder_io import FolderCheckpointIO
from .config import RunConfig
from .initial_weights import newborn
from .launch_environment import Launched
from .module import PretrainModule, next_token_losses
from .processes import Place, joined, place
from .provenance import code, environment, versions
from .stored_config import departures, write_config
from .strategies.lightning_setup import placed, set_up_strategy
from .throughput import flops_per_token, peak_flops

#: Fields that a resumed run must leave as they are: with others it would be another run under the same name.
_FIXED = ("init_seed", "init_from", "model", "data", "optim.name", "snapshot", "trainer.global_batch_size")

_LOCK = ".lock"

#: How far the nodes' clocks may be apart, in seconds: what a run tells of times is told by one of them.
_CLOCKS_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run: RunDir
    step: int
    stopped_by: str | None
    """Name of the signal that stopped it before max_steps."""


def _device(config: RunConfig, where: Place | None) -> torch.device:
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("trainer.device is cuda, but torch sees no GPU: give cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", where.local_rank) if where is not None else torch.device("cuda")


def check_resumable(config: RunConfig, run: RunDir) -> None:
    """UsageError if ``config`` differs from the run's own in what must stay."""
    differing = departures(config, run)
    changed = [name for name in _FIXED if any(f"{field}.".startswith(f"{name}.") for field in differing)]
    if changed:
        raise UsageError(f"{run.path}: a resumed run keeps its {', '.join(changed)}; start a new run to change them")


def _check_unused(run: RunDir) -> None:
    if run.path.exists() and any(file.name != _LOCK for file in run.path.iterdir()):
        raise UsageError(f"--run_dir {run.path}: already in use; give another, or go on with --resume {run.path}")


@contextmanager
def _claimed(run: RunDir) -> Iterator[None]:
    """Hold the run's lock, so that no two processes write one run."""
    run.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run.path / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{run.path}: another process is writing this run; give another --run_dir") from None
    try:
        yield
    finally:
        lock.release()


def _check_same_everywhere(config: RunConfig, birth: str, data: PreparedData) -> None:
    """RunError if the processes of a run would not train one and the same."""
    check_clocks(_CLOCKS_S)
    check_same("versions", json.dumps(versions()), f"install the same on all nodes (here {versions()})")
    check_same("config", json.dumps(asdict(config)), "start all processes with the same command")
    check_same("corpus", json.dumps(data.record, sort_keys=True), "give all nodes the same data.path and tokenizer")
    check_same("birth digest", birth, "the nodes' libraries compute otherwise; install the same on all of them")


def _write_birth(config: RunConfig, run: RunDir, model: Decoder, found: str, data: PreparedData) -> dict[str, Any]:
    """Write ``config.yaml`` and the birth certificate; the certificate is returned."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    birth = certificate(model, config.model, config.init_seed, found)
    record = {
        "digest": birth["digest"],
        "init_seed": config.init_seed,
        "init_from": config.init_from or None,
        "data_seed": config.data.data_seed,
        "probe_seed": config.snapshot.probe_seed,
        "n_params": birth["n_params"],
        "run_id": hashlib.sha256(f"{birth['digest']}{created}{run.path.absolute()}".encode()).hexdigest()[:12],
        "created": created,
        "data": data.record,
        "versions": versions(),
        "code": code(),
        "model": asdict(config.model),
        # Weights that were loaded were drawn from nothing that is known here.
        "parameters": {
            name: {"shape": facts["shape"]} if config.init_from else facts
            for name, facts in birth["parameters"].items()
        },
    }
    write_config(config, run.config)
    if data.tokenizer_path is not None:
        with atomic_path(run.tokenizer) as new:
            shutil.copyfile(data.tokenizer_path, new)
    write_json(run.birth, record)
    return record


def _read_birth(config: RunConfig, run: RunDir, model: Decoder, now: str, data: PreparedData) -> dict[str, Any]:
    """The certificate of a run that goes on; the newborn model and the corpus must be the ones that it names."""
    record = read_json(run.birth)
    if now != record["digest"]:
        raise RunError(
            f"{run.birth}: {config.init_from or f'init_seed {config.init_seed}'} now gives {now[:12]}…, the "
            f"certificate says {record['digest'][:12]}…; it, the config or the certificate was changed"
        )
    if data.record != record["data"]:
        hashes = [facts.get("content_hash") for facts in (data.record, record["data"])]
        raise RunError(
            "data.path: the corpus is not the one this run began with (content hash {}, was {})".format(*hashes)
        )
    write_config(config, run.config)
    return record


def _probes(config: RunConfig, data: PreparedData) -> dict[str, np.ndarray]:
    n, length = config.snapshot.n_sequences, config.snapshot.seq_len
    makers = {
        "random": lambda: random_probe(config.model.vocab_size, n, length, config.snapshot.probe_seed),
        "text": lambda: text_probe(data.val, n, length),
    }
    return {name: makers[name]() for name in config.snapshot.probes}


class _Steps(L.LightningDataModule):
    """Training batches from the step that the trainer has reached: data are a function of the step."""

    def __init__(self, config: RunConfig, data: PreparedData) -> None:
        super().__init__()
        self.config, self.data = config, data

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Micro-batches ``[micro_batch_size, T+1]`` of the steps to come, without end."""
        assert self.trainer is not None
        batches = MicroBatches(
            self.data.train,
            first_step=self.trainer.global_step,
            global_batch_size=self.config.trainer.global_batch_size,
            micro_batch_size=self.config.trainer.micro_batch_size,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )
        return DataLoader(batches, batch_size=None, pin_memory=torch.cuda.is_available())


def _callbacks(
    config: RunConfig,
    run: RunDir,
    data: PreparedData,
    n_params: int,
    reference: Callable[[int], Decoder],
    device: torch.device,
    console: Console,
) -> tuple[list[L.Callback], StopOnSignal]:
    """In the order in which they act at a step: stop, clock, validate, measure, save, tell."""
    settings, seq_len = config.trainer, config.model.max_seq_len
    every, tokens_per_step = settings.checkpoint_every, settings.global_batch_size * seq_len
    peak = peak_flops(device, settings.precision)
    stop = StopOnSignal()
    training = TrainingLog(
        settings.log_every,
        tokens_per_step,
        flops_per_token(config.model, n_params, seq_len),
        None if peak is None else peak * world_size(),
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
    milestones: list[L.Callback] = [stop, training, validation]
    milestones += [snapshot] if snapshot is not None else []
    if config.snapshot.fingerprint.enabled:
        milestones.append(
            FingerprintSnapshot(
                config.snapshot.fingerprint,
                every=every,
                newborn=reference,
                init_seed=config.init_seed,
                max_seq_len=seq_len,
            )
        )
    checkpoint = Checkpoint(every, run, keep_last=settings.keep_last, keep_every=settings.keep_every)
    milestones += [checkpoint, RunProgress(every, console, training, validation, snapshot)]
    return milestones, stop


def _loggers(
    config: RunConfig, run: RunDir, record: dict[str, Any], device: torch.device, where: Place | None
) -> list[Logger]:
    # Of this start: a run that goes on may do so elsewhere.
    made_with = {"birth": record["digest"], "code": code(), "environment": environment(device, where)}
    wandb = wandb_logger(config.log, run, record["run_id"], {**asdict(config), **made_with})
    return [JsonLinesLogger(run), *([wandb] if wandb is not None else [])]


def _quiet() -> None:
    """Silence what Lightning says that no user of this command can act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        r".*does not have many workers",  # batches are a memory map's slice: a worker would only copy them
        r".*treespec.*LeafSpec.*",  # Lightning's own use of torch
        r"`broadcast_buffers` is deprecated",  # its successor is not in every torch that we run with
        r".*compute.* was called before the .*update.*",  # a rank without a sequence of a small probe adds nothing
    ):
        warnings.filterwarnings("ignore", message)


def pretrain(config: RunConfig, run: RunDir, *, resume: bool = False, console: Console | None = None) -> Outcome:
    """Train ``config`` in ``run``'s directory until its last step, a signal, or an error.

    Args:
        config: the whole run.
        run: an unused directory, or with ``resume`` one that holds this run.
        resume: go on from the last checkpoint, or from birth where there is none yet.
        console: where to tell; by default the terminal.

    Raises:
        UsageError: what the config asks cannot be done.
        RunError: it failed on the way; all checkpoints so far are intact.
    """
    where = placed(config.trainer, place())
    device = _device(config, where)
    if device.type == "cpu":
        keep_freed_memory()
    _quiet()
    with joined(where, device), ExitStack() as held:
        console = (console or Console()) if rank() == 0 else Console(quiet=True)
        # Asked here so that a mistake is told at once, and again below, where no other process can come between.
        from_rank_zero(lambda: check_resumable(config, run) if resume else _check_unused(run))
        data = prepare(config.data, vocab_size=config.model.vocab_size, seq_len=config.model.max_seq_len)
        strategy = set_up_strategy(config.trainer, config.optim.grad_clip, device)
        model = newborn(config, config.init_seed, device if strategy.shard else "cpu", strategy.shard)
        birth = digest(model)
        _check_same_everywhere(config, birth, data)

        def begin() -> tuple[Path | None, int, dict[str, Any]]:
            held.enter_context(_claimed(run))
            if not resume:
                _check_unused(run)
            checkpoints = run.checkpoints_by_step() if resume else {}
            step = max(checkpoints, default=0)
            checkpoint = checkpoints.get(step)
            if checkpoint is not None and config.trainer.offload == "nvme":
                raise UsageError(
                    "trainer.offload is nvme, whose state cannot be filled from a checkpoint: go on with cpu or none"
                )
            record = (_read_birth if resume else _write_birth)(config, run, model, birth, data)
            truncate_metrics(run.metrics, step if checkpoint else -1)
            return checkpoint, step, record

        checkpoint, step, record = from_rank_zero(begin)
        console.print(
            f"[bold]{run.path}[/bold]  {record['n_params']:,} parameters  birth {record['digest'][:12]}…  "
            + (f"resumed at step {step}" if resume else config.init_from or f"init_seed {config.init_seed}")
            + (f"  {world_size()} processes" if world_size() > 1 else ""),
            highlight=False,
            soft_wrap=True,
        )
        if explicit_because(config.model) is not None:
            console.print(f"attention: {kernel_sentence(config.model)}", highlight=False, soft_wrap=True)
        if step >= config.trainer.max_steps:
            return Outcome(run, step, None)
        reference = partial(newborn, config, device=device, shard=strategy.shard_reference)
        loggers = _loggers(config, run, record, device, where) if rank() == 0 else []
        held.push(lambda kind, error, trace: close_loggers(loggers, failed=kind is not None))
        callbacks, stop = _callbacks(config, run, data, record["n_params"], reference, device, console)
        trainer = L.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=where.local_world_size if where else 1,
            num_nodes=where.n_nodes if where else 1,
            strategy=strategy.lightning,
            max_steps=config.trainer.max_steps,
            max_epochs=-1,
            accumulate_grad_batches=config.trainer.global_batch_size
            // (config.trainer.micro_batch_size * world_size()),
            callbacks=callbacks,
            logger=loggers or False,
            plugins=[FolderCheckpointIO(asynchronous=True), *([Launched(where)] if where else [])],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=run.path,
        )
        trainer.fit(
            PretrainModule(model, config.optim, config.trainer), datamodule=_Steps(config, data), ckpt_path=checkpoint
        )
        from_rank_zero(lambda: write_metrics_csv(run))
        return Outcome(run, trainer.global_step, stop.received.name if stop.received else None)
