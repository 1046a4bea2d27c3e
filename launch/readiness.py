"""Readiness of this machine for a run: libraries, devices, launchers, disk and W&B, and whether the run would start."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UsageError
from ..measure.records import RunDir
from ..messages import one_line
from ..trainer.config import RunConfig
from ..trainer.strategies.table import STRATEGIES

if TYPE_CHECKING:
    import torch

State = Literal["ok", "note", "stop"]

#: Optional libraries → their purpose, and the command that installs them.
_OPTIONAL = {
    "matplotlib": ("figures", "pip install matplotlib"),
    "wandb": ("Weights & Biases", "pip install wandb"),
    "tensorboard": ("log.loggers: [tensorboard]", "pip install tensorboard"),
    "datasets": ("hf: and tabular corpora", "pip install datasets"),
    "deepspeed": ("zero1 to zero3", "DS_BUILD_OPS=0 pip install deepspeed"),
    "transformers": ("exchange with transformers", "pip install transformers"),
    "argcomplete": ("completion in the shell", "pip install argcomplete"),
}

#: Bytes of a checkpoint per parameter: float32 weights and AdamW's two moments.
_CHECKPOINT_BYTES = 12
#: Bytes per parameter that training holds on one device, the gradient included.
_TRAINING_BYTES = 16


@dataclass(frozen=True)
class Finding:
    """Result of one check of the machine."""

    name: str
    state: State
    """``ok``; ``note``: missing or slow, but a run would start; ``stop``: no run would."""
    text: str
    mend: str = ""


def examine(config: RunConfig) -> Iterator[Finding]:
    """Check this machine for the run of ``config``. Nothing is downloaded, and nothing is written."""
    libraries = list(_libraries())
    yield from libraries
    if any(finding.state == "stop" for finding in libraries):
        return  # the rest is looked at with them
    yield from _devices(config)
    yield from _launchers(config)
    yield from _data(config)
    yield from _room(config)
    yield _loggers(config)


def would_run(config: RunConfig, name: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return strategy, precision, processes, device and start command of the run, as JSON-able values.

    Args:
        config: the run.
        name: the config's name for ``--config``.
        overrides: dotted fields that the command line replaced.
    """
    import torch

    from ..trainer.numerics import fast_in_bf16

    processes, gpus = _processes(config)
    settings = config.trainer.shared_by(processes)
    launched = STRATEGIES[settings.strategy].launched
    fast = fast_in_bf16(torch.device("cuda" if gpus else "cpu"))
    start = ["launch", "torchrun", *([] if gpus else ["--nproc", "2"])] if launched else ["pretrain"]
    fields = [f"--{field}={value}" for field, value in overrides.items()]
    return {
        "strategy": settings.strategy,
        "precision": ("bf16" if fast else "fp32") if settings.precision == "auto" else settings.precision,
        "processes": processes,
        "device": torch.cuda.get_device_name() if gpus else "cpu",
        "micro_batch_size": settings.micro_batch_size,
        "global_batch_size": settings.global_batch_size,
        "command": shlex.join(["birthmark", *start, "--config", name, *fields]),
    }


def _processes(config: RunConfig) -> tuple[int, int]:
    """Return the number of processes and of GPUs that would run; two processes if a launcher starts them and there is
    no GPU.
    """
    import torch

    gpus = torch.cuda.device_count() if config.trainer.device != "cpu" and torch.cuda.is_available() else 0
    return (gpus or 2) if STRATEGIES[config.trainer.strategy].launched else 1, gpus


# ── libraries ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _libraries() -> Iterator[Finding]:
    from packaging.requirements import InvalidRequirement, Requirement

    yield Finding("python", "ok", f"{platform.python_version()}  {sys.executable}")
    try:
        asked = [Requirement(line) for line in metadata.requires("birthmark") or []]
    except (metadata.PackageNotFoundError, InvalidRequirement):
        yield Finding("birthmark", "note", "not installed as a package: versions are not checked")
        asked = [Requirement(name) for name in ("torch", "lightning", "torchmetrics", "numpy", "tokenizers", "scipy")]
    needed = [line for line in asked if line.marker is None]
    bounds = {line.name: line.specifier for line in asked}
    for name in [line.name for line in needed]:
        found = _version(name)
        if found is None or not bounds[name].contains(found, prereleases=True):
            why = "not installed" if found is None else f"{found}, which is not {bounds[name]}"
            yield Finding(name, "stop", why, f"pip install '{name}{bounds[name]}'")
        elif name in ("torch", "lightning"):
            yield _imported(name, found)
    for name, (use, install) in _OPTIONAL.items():
        found = _version(name)
        if found is None:
            yield Finding(name, "note", f"not installed, for {use}", install)
        elif name in bounds and not bounds[name].contains(found, prereleases=True):
            yield Finding(name, "note", f"{found}, which is not {bounds[name]}, for {use}", install)
        else:
            yield Finding(name, "ok", found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _imported(name: str, version: str) -> Finding:
    """Check that an installed library loads.

    It may still fail to: one of its own dependencies is missing, or belongs to another version.
    """
    try:
        import_module(name)
    except Exception as error:
        return Finding(
            name, "stop", f"{version} does not load: {one_line(error)}", f"pip install --force-reinstall {name}"
        )
    return Finding(name, "ok", version)


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _devices(config: RunConfig) -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    yield Finding("cpu", "ok", f"{cores} cores, {torch.get_num_threads()} threads, {memory / 1e9:.0f} GB of memory")
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    for gpu in gpus:
        facts = torch.cuda.get_device_properties(gpu)
        yield Finding(f"gpu {gpu}", "ok", f"{facts.name}, {facts.total_memory / 1e9:.0f} GB")
        memory = facts.total_memory if gpu == 0 else min(memory, facts.total_memory)
    if not gpus:
        wanted = config.trainer.device == "cuda"
        mend = "give --trainer.device cpu, or install a torch with CUDA and a driver" if wanted else ""
        yield Finding("gpu", "stop" if wanted else "note", "torch sees none", mend)
    on_gpu = bool(gpus) and config.trainer.device != "cpu"
    yield _bf16(config, torch.device("cuda" if on_gpu else "cpu"))
    needed = _TRAINING_BYTES * _n_params(config)
    if not STRATEGIES[config.trainer.strategy].shards_optimizer and needed > memory:
        yield Finding(
            "memory",
            "stop",
            f"weights, gradients and optimizer take {needed / 1e9:.0f} GB of {memory / 1e9:.0f} on one device",
            "birthmark plan says which strategy fits, on how many GPUs",
        )


def _bf16(config: RunConfig, device: torch.device) -> Finding:
    """Measure the speed of bf16 here relative to float32: the product of two square matrices, the best of three."""
    import torch

    n, seconds = (4096 if device.type == "cuda" else 512), {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(n, n, dtype=dtype, device=device)
        times = []
        for _ in range(4):  # the first warms up
            start = time.perf_counter()
            (matrix @ matrix)[0, 0].item()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times[1:])
    share = seconds[torch.float32] / seconds[torch.bfloat16]
    rate = 2 * n**3 / seconds[torch.bfloat16] / 1e9
    text = f"{share:.1f} × float32's speed on {device.type} ({rate:,.0f} GFLOP/s, {n} × {n} matrices)"
    if share < 1 and config.trainer.precision == "bf16":
        return Finding("bf16", "note", text, "--trainer.precision fp32 is faster here")
    return Finding("bf16", "ok", text)


def _n_params(config: RunConfig) -> int:
    from ..plan.describe import describe

    return int(describe(config.model)["n_params"])


# ── launchers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _launchers(config: RunConfig) -> Iterator[Finding]:
    strategy = config.trainer.strategy
    try:
        config.trainer.shared_by(_processes(config)[0])
    except UsageError as error:
        problem, _, mend = str(error).partition(": ")
        yield Finding("batch", "stop", problem, mend)
    yield Finding("torchrun", "ok", "birthmark launch torchrun")
    if importlib.util.find_spec("deepspeed") is not None:
        yield Finding("deepspeed", "ok", "birthmark launch deepspeed")
    elif STRATEGIES[strategy].engine:
        yield Finding(
            "deepspeed", "stop", f"not installed, and trainer.strategy is {strategy}", _OPTIONAL["deepspeed"][1]
        )
    srun = shutil.which("srun")
    inside = f", inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    yield Finding("srun", "ok", f"{srun}{inside}") if srun else Finding("srun", "note", "not found: no SLURM here")


# ── data, disk, W&B ──────────────────────────────────────────────────────────────────────────────────────────────────


def _data(config: RunConfig) -> Iterator[Finding]:
    from ..data.config import is_remote
    from ..data.suffixes import TABLE_SUFFIXES, corpus_suffix

    entries = config.data.entries
    rows = any(entry.startswith("hf:") or corpus_suffix(entry) in TABLE_SUFFIXES for entry in entries)
    if rows and importlib.util.find_spec("datasets") is None:
        yield Finding("data", "stop", f"{entries[0]} is read through datasets", _OPTIONAL["datasets"][1])
    elif any(entry.startswith("hf:") for entry in entries):
        yield Finding("data", "note", f"{entries[0]}: from the hub, or what datasets has of it on this machine")
    elif remote := [entry for entry in entries if is_remote(entry)]:
        how = f"copied into {config.data.cache_dir} when the run starts"
        if config.data.cache_gb is not None:
            how = f"read in blocks, {config.data.cache_gb:g} GB of them in {config.data.cache_dir}"
        yield Finding("data", "note", f"{remote[0]}: {how}")
    else:
        yield Finding("data", "ok", ", ".join(entries[:3]))


def _room(config: RunConfig) -> Iterator[Finding]:
    from ..callbacks.checkpoint import kept

    settings, every = config.trainer, config.trainer.checkpoint_every
    # The last is written at max_steps, which need be no multiple; it is kept in any case.
    steps = range(every, settings.max_steps + every, every)
    count = len(steps)
    if settings.keep_last is not None:
        # A new one is complete before an old one goes.
        count = min(count, len(kept(steps, settings.keep_last, settings.keep_every)) + 1)
    one = _CHECKPOINT_BYTES * _n_params(config)
    folder = Path(config.run_dir)
    yield _folder("run_dir", folder, count * one, f"{count} checkpoint{'s' * (count > 1)}")
    if RunDir.is_run(folder):
        mend = f"give another folder with --run_dir, or go on with birthmark pretrain --resume {folder}"
        yield Finding("run_dir", "note", f"{folder} holds a run already", mend)
    if config.data.path != "backcopy":
        blocks = int((config.data.cache_gb or 0) * 1e9)
        what = "blocks of data.cache_gb" if blocks else ""
        yield _folder("cache_dir", config.data.cache_folder, blocks, what, "--data.cache_dir")


def _folder(name: str, folder: Path, needed: int, what: str, option: str = "--run_dir") -> Finding:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, "stop", f"{folder}: {there} cannot be written to", f"give another folder with {option}")
    free = shutil.disk_usage(there).free
    text = f"{folder}: {free / 1e9:,.1f} GB free" + (f", about {needed / 1e9:,.1f} GB for {what}" if what else "")
    if needed > free:
        return Finding(name, "stop", text, "free some, give another folder, or keep fewer with --trainer.keep_last 2")
    return Finding(name, "ok", text)


def _loggers(config: RunConfig) -> Finding:
    from ..callbacks.loggers import check_installed
    from ..callbacks.wandb_run import wandb_mode

    try:
        check_installed(config.log)
    except UsageError as error:
        return Finding("W&B" if "wandb" in str(error).lower() else "loggers", "stop", str(error), "--log.loggers '[]'")
    mode = wandb_mode(config.log)
    if mode == "off" and "wandb" in config.log.loggers and importlib.util.find_spec("wandb") is None:
        return Finding("W&B", "note", "off: wandb is not installed", _OPTIONAL["wandb"][1])
    if mode == "offline":
        return Finding("W&B", "ok", "offline: files in the run's folder (online after wandb login)")
    return Finding("W&B", "ok", mode)
