"""Pretraining run, from config to the last checkpoint: config → birth → data → steps, each in one place."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from rich.console import Console

from ..callbacks.loggers import check_installed, close_loggers
from ..callbacks.stop import stops_before_first_step
from ..callbacks.wandb_run import WandbRun
from ..data.prepare import PreparedData, prepare
from ..errors import UsageError
from ..evaluation.evaluator import Evaluator, Material
from ..measure.measurement import check_attention_weights
from ..measure.metrics_log import write_metrics_csv
from ..measure.ranks import check_clocks, check_same, from_rank_zero, rank, world_size
from ..measure.records import RunDir
from ..models.adapters import base_digest
from ..models.birth import digest
from ..models.decoder import Decoder
from ..models.user_parts import check_user_parts
from ..report.terminal import RunConsole, say
from .checkpoints.folder_io import FolderCheckpointIO
from .checkpoints.stored_tensors import open_checkpoint
from .checkpoints.upload import Uploader
from .config import RunConfig, TrainerConfig
from .devices import growing_segments, keep_freed_memory
from .initial_model import initialize_model
from .loop.profiling import collector_at_rest
from .loop.training_data import ReadAhead, TrainingData
from .module import PretrainModule
from .numerics import decide, numerics
from .optimizers.parameter_groups import parameter_groups
from .processes.heartbeat import watched
from .processes.launched_process import LaunchedProcess, launched_process, stop_with_agent
from .processes.process_group import (
    LauncherEnvironment,
    allow_sockets,
    collective_timeout,
    join_process_group,
    record_collectives,
)
from .provenance import versions
from .run_callbacks import build_callbacks, build_loggers, build_recorder
from .run_folder import begin_run, check_all_see, check_resumable, check_unused
from .saved_config import write_config
from .start_messages import print_data, print_start
from .strategies.lightning_setup import check_launch, set_up_strategy
from .strategies.table import STRATEGIES

#: Largest difference of the nodes' clocks, in seconds: one of them dates all records of a run.
_CLOCKS_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """End of a run."""

    run: RunDir
    step: int
    stopped_by: str | None
    """Name of the signal that stopped it before max_steps."""
    report: Path | None = None
    """File of its page, if one was written."""


def _device(config: RunConfig, process: LaunchedProcess | None) -> torch.device:
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("trainer.device is cuda, but torch sees no GPU: give cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    # With its number: a thread that makes it current needs one.
    return torch.device("cuda", process.local_rank if process is not None else torch.cuda.current_device())


def _check_same_everywhere(config: RunConfig, birth: str, data: PreparedData) -> None:
    """Raise RunError if the processes of a run would not train the same run."""
    check_clocks(_CLOCKS_S)
    check_same("versions", json.dumps(versions()), f"install the same on all nodes (here {versions()})")
    check_same("config", json.dumps(asdict(config)), "start all processes with the same command")
    check_same("corpus", json.dumps(data.record, sort_keys=True), "give all nodes the same data.path and tokenizer")
    check_same("birth digest", birth, "the nodes' libraries compute otherwise; install the same on all of them")


def _prepare_data(config: RunConfig, process: LaunchedProcess | None) -> PreparedData:
    """Prepare the run's data, and raise UsageError if it cannot be trained as the config asks."""
    # One process of a node reads all of its shards again; a damaged one ends the others too.
    checked = config.data if process is None or process.local_rank == 0 else replace(config.data, verify="size")
    data = prepare(
        checked,
        vocab_size=config.model.vocab_size,
        seq_len=config.model.max_seq_len,
        batch_sizes=config.trainer.batch_sizes,
    )
    _check_epochs(config, data)
    _check_documents(config, data)
    return data


def _fitted(config: RunConfig, data: PreparedData) -> RunConfig:
    """Set the run's vocabulary to that of the tokenizer trained on the corpus: a small corpus gives fewer tokens than
    asked.
    """
    if config.data.tokenizer != "bpe" or data.vocab_size == config.model.vocab_size:
        return config
    return replace(config, model=replace(config.model, vocab_size=data.vocab_size))


def _check_epochs(config: RunConfig, data: PreparedData) -> None:
    """Raise UsageError if the run would read a source more often than ``data.epochs``."""
    most, n_samples = config.data.epochs, config.trainer.batch_sizes.before(config.trainer.max_steps)
    for name, epochs in data.epochs(n_samples).items():
        if most is not None and epochs > most:
            raise UsageError(
                f"data.epochs is {most:g}, but the run would read {name or 'the corpus'} {epochs:.3g} times: give more "
                f"text, fewer trainer.max_steps{', a lower weight' if name else ''} or a higher data.epochs"
            )


def _check_documents(config: RunConfig, data: PreparedData) -> None:
    """Raise UsageError if attention should stay within documents, and the data does not say where they end."""
    if config.model.attention.documents and data.borders is None and config.data.path != "backcopy":
        raise UsageError(
            "model.attention.documents: no one end-of-text token in the ids says where documents end; give a "
            "data.tokenizer that has one, the same data.end_token for all sources, token files that hold it, or "
            "leave it out"
        )


def _check_optimizer(config: RunConfig, model: Decoder) -> None:
    """Raise UsageError if the run's optimizer is not installed, or does not suit this model."""
    # DeepSpeed's strategies have optimizers for all models alone, and hold the parameters by themselves.
    if not STRATEGIES[config.trainer.strategy].engine:
        config.optim.optimizer.build(parameter_groups(model, config.optim.optimizer), config.optim.lr)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages that no user of a run can act on within the context."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        for message in (
            r".*treespec.*LeafSpec.*",  # Lightning's own use of torch
            r"`broadcast_buffers` is deprecated",  # its successor is not in every torch that we run with
            r".*compute.* was called before the .*update.*",  # a rank without a sequence of a small probe adds nothing
        ):
            warnings.filterwarnings("ignore", message)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _evaluator(config: RunConfig, material: Material, data: PreparedData) -> Evaluator | None:
    if not config.eval.is_on:
        return None
    return Evaluator(
        config.eval,
        material,
        tokenizer_path=data.tokenizer_path,
        validation=data.val,
        max_seq_len=config.model.max_seq_len,
        batch_size=config.trainer.micro_batch_size,
    )


def _leave_signals_to_us(trainer: L.Trainer) -> None:
    """Keep Lightning from handling signals and from asking other processes about them: StopOnSignal does, and no step
    waits.

    With several processes, Lightning's loop broadcasts before each micro-batch whether a signal came, and waits for the
    device to read it. Its handler joins such a broadcast at any point of the process.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector._sigterm_notifier_fn = lambda signum, _: None  # type: ignore[method-assign]


def _lightning_trainer(
    config: RunConfig,
    run: RunDir,
    process: LaunchedProcess | None,
    device: torch.device,
    step: int,
    strategy: Strategy | str,
    callbacks: list[L.Callback],
    loggers: list[Logger],
) -> L.Trainer:
    settings = config.trainer
    trainer = L.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=process.local_world_size if process else 1,
        num_nodes=process.n_nodes if process else 1,
        strategy=strategy,
        max_steps=settings.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=settings.batch_shares(world_size(), step).accumulation,
        callbacks=callbacks,
        logger=loggers or False,
        plugins=[
            FolderCheckpointIO(asynchronous=True, timeout=collective_timeout(settings.timeout_s)),
            # Given, so that Lightning does not guess: inside a SLURM allocation it would take a run for one of srun's.
            LauncherEnvironment(process) if process else LightningEnvironment(),
        ],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=run.path,
    )
    _leave_signals_to_us(trainer)
    return trainer


def _uploader(settings: TrainerConfig, run: RunDir, say: Callable[[str], object]) -> Uploader | None:
    """Return the copier of checkpoints to a store; None without a store, and on ranks that complete none."""
    if not settings.checkpoint_to or rank():
        return None
    return Uploader(run, settings.checkpoint_to, keep_last=settings.keep_last, keep_every=settings.keep_every, say=say)


def _write_report(run: RunDir) -> Path:
    """Write the pages of the run."""
    # Imported at the run's end: a run need not load the code of pictures when it starts.
    from ..report.run_page import build_pages

    build_pages([run], run.report)
    return run.report


# Before the device is looked at: that may initialise CUDA, and torch reads only then how memory is allocated.
@growing_segments()
def pretrain(
    config: RunConfig, run: RunDir, *, resume: bool = False, console: Console | None = None, report: bool = False
) -> Outcome:
    """Train ``config`` in ``run``'s directory until its last step, a signal, or an error.

    Args:
        config: the whole run.
        run: an unused directory, or with ``resume`` one that holds this run.
        resume: go on from the last checkpoint, or from birth where there is none yet.
        console: console for the progress; by default the terminal.
        report: write the run's page at the end; W&B gets it, so that a run that is logged there always has one.

    Raises:
        UsageError: the config asks for something impossible.
        RunError: the run failed on the way; all checkpoints so far are intact.
    """
    check_installed(config.log)
    process = check_launch(config.trainer, launched_process())
    stop_with_agent()
    asked = config
    device = _device(config, process)
    if config.snapshot.enabled:
        check_attention_weights(config.snapshot.attention_weights, device.type)
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda" and process is not None:
        record_collectives(run.path)
    if process is not None:
        allow_sockets(process, engine=STRATEGIES[config.trainer.strategy].engine)
    timeout = collective_timeout(config.trainer.timeout_s)
    with (
        _quiet(),
        ExitStack() as last,
        ExitStack() as signals,
        join_process_group(process, device, timeout),
        ExitStack() as held,
    ):
        if world_size() == 1:
            # Of several, the launcher says why it ended them.
            signals.enter_context(stops_before_first_step(run))
        console = (console or RunConsole(run.metrics)) if rank() == 0 else Console(quiet=True)
        # A network's file system may show this run to some nodes a moment later.
        resume = from_rank_zero(partial(bool, resume))
        # Asked here so that a mistake ends the run at once, and again in begin_run, which holds the run's lock.
        from_rank_zero(lambda: check_resumable(config, run) if resume else check_unused(run))
        tell = partial(say, console)
        upload = _uploader(config.trainer, run, tell)
        from_rank_zero(lambda: None if upload is None else upload.check())

        config = replace(config, trainer=decide(config.trainer, device, run if resume else None))
        held.enter_context(numerics(config.trainer, device))
        # Before the data, which may take hours: a class of the user's own may be none that a model can be built of.
        with torch.device("meta"):
            Decoder(config.model)
        check_user_parts(config.model, device)
        material = Material.read(config.eval)
        data = _prepare_data(config, process)
        config = _fitted(config, data)
        evaluator = _evaluator(config, material, data)
        # Another number of processes may go on with the run: its config.yaml keeps the micro-batch that was asked for.
        running = replace(config, trainer=config.trainer.shared_by(process.world_size if process else 1))
        # Not before the data: a corpus may take hours to prepare, and processes are forked for it.
        progress = held.enter_context(watched(config.trainer.timeout_s, run, process))
        strategy = set_up_strategy(running.trainer, config.optim.grad_clip, device)
        # These refusals must precede the birth: a run with a birth keeps its snapshots and its optimizer.
        reference = partial(initialize_model, config, device=device, shard=strategy.shard_reference)
        recorder = build_recorder(config, run, data, reference, tell)
        model = initialize_model(config, config.init_seed, device if strategy.shard else "cpu", strategy.shard)
        _check_optimizer(config, model)
        birth = digest(model)
        base = base_digest(model) if config.adapter.is_on else None
        _check_same_everywhere(config, birth, data)

        start = from_rank_zero(lambda: held.enter_context(begin_run(config, run, model, birth, data, resume=resume)))
        check_all_see(run, start.checkpoint, shared=STRATEGIES[config.trainer.strategy].shards_optimizer)
        if upload is not None:
            # Last of all, when no process waits for this one.
            last.push(lambda kind, error, trace: upload.finish(error))
        from_rank_zero(lambda: None if upload is None else upload.begin(start.step))
        print_start(console, running, asked, run, start, device, resumed=resume)
        print_data(console, config, data)
        if start.step >= config.trainer.max_steps:
            # No step loads the checkpoint; a damaged one is refused all the same, and leaves the config as it was.
            if start.checkpoint is not None:
                open_checkpoint(start.checkpoint)
            from_rank_zero(lambda: write_config(config, run.config))
            from_rank_zero(lambda: write_metrics_csv(run))
            return Outcome(run, start.step, None, from_rank_zero(lambda: _write_report(run) if report else None))

        progress.enter("set-up", start.step)
        loggers = build_loggers(config, run, start, device, process, console) if rank() == 0 else []
        held.push(lambda kind, error, trace: close_loggers(loggers, error))
        for logger in loggers:
            if isinstance(logger, WandbRun):
                progress.on_fault = logger.end_in_fault
                tell(f"W&B: {logger.where}")
        callbacks, stop = build_callbacks(
            running,
            run,
            data,
            start.birth["n_params"],
            reference,
            device,
            console,
            progress,
            recorder,
            evaluator,
            upload,
        )
        if resume:
            # Once all is loaded: a checkpoint that is refused leaves the config that the run was trained with.
            write = partial(from_rank_zero, lambda: write_config(config, run.config))
            callbacks.insert(0, LambdaCallback(on_train_start=lambda trainer, module: write()))
        signals.enter_context(stop.listen())
        trainer = _lightning_trainer(running, run, process, device, start.step, strategy.lightning, callbacks, loggers)
        module = PretrainModule(
            model,
            config.optim,
            running.trainer,
            progress,
            data.n_targets,
            data.borders,
            base,
            config.data.data_seed,
            strategy.context,
        )
        steps = TrainingData(
            running,
            data,
            lambda batches: held.enter_context(
                ReadAhead(batches, device, progress, keep=config.model.experts.balances_load)
            ),
            held.callback,
        )
        try:
            with collector_at_rest(device):
                trainer.fit(module, datamodule=steps, ckpt_path=start.checkpoint)
        except SystemExit:
            # So Lightning answers a KeyboardInterrupt, which it does not hand on.
            raise KeyboardInterrupt from None
        from_rank_zero(lambda: write_metrics_csv(run))
        to_wandb = any(isinstance(logger, WandbRun) for logger in loggers)
        page = from_rank_zero(lambda: _write_report(run) if report or to_wandb else None)
        return Outcome(run, trainer.global_step, stop.received.name if stop.received else None, page)
