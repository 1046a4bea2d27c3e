"""Messages of a run's start: what it trains, and how this machine and its data differ from the config's words."""

from __future__ import annotations

import math
import shlex

import torch
from rich.console import Console

from ..data.prepare import PreparedData
from ..data.process_batches import StreamSource
from ..data.splitting import duplicates_in_words
from ..findings.formatting import number_of
from ..kernel_devices import why_not_triton
from ..measure.ranks import world_size
from ..measure.records import RunDir
from ..models.attention.kernel_choice import explicit_because, kernel_sentence, kernels_of
from ..report.terminal import say
from .config import RunConfig
from .lr_schedule import continued_rate
from .numerics import decisions
from .run_folder import RunStart


def print_start(
    console: Console,
    config: RunConfig,
    asked: RunConfig,
    run: RunDir,
    start: RunStart,
    device: torch.device,
    *,
    resumed: bool,
) -> None:
    """Print the start: its kind, the amount of training, departures from ``asked``, and the computation of attention if
    no fused kernel does it.
    """
    kind = "start" if config.init_from else "birth"
    birth = f"{start.birth['n_params']:,} parameters  {kind} {start.birth['digest'][:12]}…"
    say(
        console,
        f"{birth}  "
        + (f"resumed at step {start.step}" if resumed else config.init_from or f"init_seed {config.init_seed}")
        + (f"  adapter {config.adapter.kind}" if config.adapter.is_on else "")
        + (f"  {world_size()} processes" if world_size() > 1 else ""),
        title=str(run.path),
    )
    if start.log_lacks_from is not None:
        say(
            console,
            f"{run.metrics}: has no training loss between step {start.log_lacks_from:,} and {start.step:,}, though the "
            "run has been there: lines were lost, and its page lacks them",
        )
    settings = config.trainer
    first, last = (
        settings.batch_sizes.size(step) * config.model.max_seq_len for step in (start.step, settings.max_steps - 1)
    )
    say(
        console,
        f"{number_of(settings.max_steps - start.step, 'step')} of {first:,} "
        f"{f'to {last:,} ' if last > first else ''}tokens, "
        f"{config.tokens_after(settings.max_steps) - config.tokens_after(start.step):,} in all",
    )
    if config.init_from and not resumed and (rate := continued_rate(config.init_from)).lr == config.optim.lr:
        say(console, f"optim.lr {rate.lr:g}: {rate.why}")
    if (n_tokens := config.model.vocab_size) != asked.model.vocab_size and asked.data.tokenizer == "bpe":
        say(
            console,
            f"vocabulary: the corpus gives {n_tokens:,} BPE tokens, not model.vocab_size {asked.model.vocab_size:,}: "
            "the model has as many, and config.yaml records it",
        )
    last_step = max(start.step, settings.max_steps - 1)
    if (sizes := settings.batch_shares(world_size(), last_step).sizes) != [asked.trainer.micro_batch_size]:
        say(
            console,
            f"micro-batches of {' or '.join(map(str, sizes))} sequences for trainer.micro_batch_size "
            f"{asked.trainer.micro_batch_size}: so "
            f"{world_size()} process{'es' if world_size() > 1 else ''} can share the "
            f"{settings.batch_sizes.size(last_step)} of a step, each of which counts alike",
        )
    for line in decisions(asked.trainer, settings, device):
        say(console, line)
    wants_joint = config.model.squares == "joint" or device.type == "cuda"
    if wants_joint and "joint" in kernels_of(config.model) and (why := why_not_triton(device.type)):
        say(console, f"n_eff: by another attention, model.attention.calibration.squares joint does not run ({why})")
    if console.is_terminal:
        path = shlex.quote(str(run.path))
        say(console, f"watch it: birthmark report {path} --watch")
    if explicit_because(config.model) is not None:
        say(console, f"attention: {kernel_sentence(config.model)}")


def print_data(console: Console, config: RunConfig, data: PreparedData) -> None:
    """Print the properties of the data that the config does not state: unused rows, sources, duplicates, streams."""
    if data.tokenizer_path is not None and data.vocab_size < config.model.vocab_size:
        say(
            console,
            f"vocabulary: the tokenizer has {data.vocab_size:,} tokens, the model {config.model.vocab_size:,} rows "
            "(model.vocab_size): text has no others, and the random probe draws from all rows",
        )
    if data.mixture is not None:
        say(console, _mixture_line(config, data))
    if documents := duplicates_in_words(data.record):
        say(console, documents)
    if split := data.record.get("split"):
        say(console, f"tokens of {data.record['format']} files; validation: {split}")
    for line in _stream_lines(data.train) if isinstance(data.train, StreamSource) else []:
        say(console, line)


def _mixture_line(config: RunConfig, data: PreparedData) -> str:
    """Describe the shares of the sources, their changes, and the run's passes over each."""
    assert data.mixture is not None
    epochs = data.epochs(config.trainer.batch_sizes.before(config.trainer.max_steps))
    often = {name: f" ({times:.2g} ×)" for name, times in epochs.items()}
    said = ", ".join(f"{name} {share:.1%}{often.get(name, '')}" for name, share in data.mixture.shares.items())
    for change, stage in zip(config.data.schedule, data.mixture.stages[1:], strict=True):
        said += f"; after step {change.step:,} "
        said += ", ".join(f"{name} {share:.1%}" for name, share in stage.shares.items() if share)
    weights = [source.weight for source in config.data.sources if source.weight is not None]
    if not weights or math.isclose(sum(weights), 1):
        return f"sources: {said}"
    return f"sources: {said}; weights add up to {sum(weights):g}, and each is taken relative to that"


def _stream_lines(source: StreamSource) -> list[str]:
    """Describe the reading of streamed sets, and the parts of it that depend on more than the data."""
    settings, files = source.settings, sum(table.n_files for table in source.tables.values())
    fewest, n_streams = min(table.n_files for table in source.tables.values()), settings.n_streams
    lines = [
        f"stream: {number_of(files, 'file')} in {number_of(n_streams, 'stream')}, {settings.buffer} sequences of each "
        "shuffled at a time; the order is the same on any number of processes, as long as files keep names and sizes"
    ]
    if fewest < n_streams:
        lines.append(
            f"stream: up to {-(-n_streams // fewest)} streams read each file and take turns at its rows: fewer "
            "data.n_streams, or more files, read less"
        )
    if world_size() > n_streams:
        lines.append(
            f"stream: up to {-(-world_size() // n_streams)} of the {world_size()} processes read and tokenise each "
            "stream: more data.n_streams, from a run's start on, read less"
        )
    return lines
