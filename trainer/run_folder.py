"""Run folder before the first step: its lock, its config, its birth certificate."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..data.config import HOW_READ
from ..data.prepare import PreparedData
from ..errors import RunError, UsageError
from ..files import SEEN_S, TEXT_BYTES, appears, atomic_path, check_file, delete_folder, file_sha256, write_sealed_json
from ..measure.metrics_log import truncate_metrics, write_metrics_csv
from ..measure.ranks import from_rank_zero, rank, rank_on_host
from ..measure.records import RunDir, step_of
from ..models.birth import certificate
from ..models.decoder import Decoder
from .config import RunConfig
from .processes.joint_failure import raise_on_every_rank
from .provenance import code, versions
from .saved_config import config_differences, is_sealed, write_config

#: Fields, and groups of them, that a resumed run must leave as they are: with others it would be another run under the
#: same name.
_FIXED = (
    "init_seed",
    "init_from",
    "model",
    "adapter",
    "data",
    "optim.name",
    "optim.ema",
    "snapshot",
    "eval.n_docs",
    "eval.n_shot",
    "eval.text_bytes",
    "eval.stride",
    "trainer.global_batch_size",
    "trainer.batch_ramp",
)

#: Among these, fields that say how, and how much of, the data are read, not which data: the birth certificate has the
#: corpus's content.
_FREE = (*(f"data.{name}" for name in HOW_READ), "data.epochs")


def check_resumable(config: RunConfig, run: RunDir) -> None:
    """Raise UsageError, naming the fields, if ``config`` differs from the run's own in fields that must stay, or ends
    before the run's last checkpoint.
    """
    differing = [field for field in config_differences(config, run) if field not in _FREE]
    changed = [field for name in _FIXED for field in differing if f"{field}.".startswith(f"{name}.")]
    if changed:
        raise UsageError(f"{run.path}: a resumed run keeps its {', '.join(changed)}; start a new run to change them")
    if (last := max(run.checkpoints_by_step(), default=0)) > (most := config.trainer.max_steps):
        raise UsageError(
            f"trainer.max_steps is {most}: {run.path} has been trained to step {last}; give {last} or more"
        )


def check_unused(run: RunDir) -> None:
    """Raise UsageError if the folder holds anything except the files of a start that died before the run's birth."""
    if not run.path.exists():
        return
    before_birth = [run.config.name, run.tokenizer.name]
    halves = tuple(f".{file.name}." for file in run.files)
    left = {run.lock.name, *(before_birth if run.config.is_file() and is_sealed(run.config) else ())}
    if any(file.name not in left and not file.name.startswith(halves) for file in run.path.iterdir()):
        raise UsageError(f"--run_dir {run.path}: already in use; give another, or go on with --resume {run.path}")


def _write_birth(config: RunConfig, run: RunDir, model: Decoder, found: str, data: PreparedData) -> dict[str, Any]:
    """Write ``config.yaml`` and the birth certificate; return the certificate."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    birth = certificate(model, config.model, config.init_seed, found)
    record = {
        "digest": birth["digest"],
        "init_seed": config.init_seed,
        "init_from": config.init_from or None,
        "data_seed": config.data.data_seed,
        "probe_seed": config.snapshot.probe_seed,
        "n_params": birth["n_params"],
        "config_is_sealed": True,
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
    if data.vocab_size_asked != config.model.vocab_size:
        record["vocab_size_asked"] = data.vocab_size_asked
    write_config(config, run.config)
    if data.tokenizer_path is not None:
        with atomic_path(run.tokenizer) as new:
            shutil.copyfile(data.tokenizer_path, new)
    write_sealed_json(run.birth, record)
    return record


def _differences(now: Mapping[str, Any], begun: Mapping[str, Any]) -> list[str]:
    """Return the fields in which two records of a corpus differ; older ones do not count duplicates."""
    names = [name for name in {**begun, **now} if name in begun or name != "duplicates"]
    return [name for name in names if name not in now or name not in begun or now[name] != begun[name]]


def _read_birth(config: RunConfig, run: RunDir, model: Decoder, now: str, data: PreparedData) -> dict[str, Any]:
    """Read the certificate of a resumed run; the model at step 0 and the corpus must be those that it names."""
    record = run.read_birth()
    if differ := _differences(data.record, record.get("data") or {}):
        raise RunError(f"data.path: the corpus is not the one this run began with ({', '.join(differ)} differ)")
    if data.tokenizer_path is not None and run.tokenizer.exists():
        # A copy that training does not read; sampling, exports and snapshots do.
        check_file(run.tokenizer, TEXT_BYTES)
        if file_sha256(run.tokenizer) != file_sha256(data.tokenizer_path):
            raise RunError(f"{run.tokenizer}: not the tokenizer that this run reads data with; restore or delete it")
    if now != record["digest"]:
        raise RunError(
            f"{run.birth}: {config.init_from or f'init_seed {config.init_seed}'} now gives {now[:12]}…, the "
            f"certificate says {record['digest'][:12]}…; it, the config or the certificate was changed"
        )
    return record


def _drop_snapshots(run: RunDir, last_step: int) -> None:
    """Delete snapshots of steps after ``last_step``: the run measures them again, or never reaches them.

    Raises:
        RunError: one cannot be deleted.
    """
    for folder in run.snapshot_folders():
        if step_of(folder) > last_step:
            try:
                delete_folder(folder)
            except OSError as error:
                raise RunError(
                    f"{folder}: cannot be deleted ({error.strerror}), and the run goes on from step {last_step}; move "
                    "it away"
                ) from error


@dataclass(frozen=True)
class RunStart:
    """Point from which a run starts or resumes."""

    checkpoint: Path | None
    """Folder of the checkpoint that it goes on from; None for a start at birth."""
    step: int
    """Optimizer steps that are behind it."""
    birth: dict[str, Any]
    """The content of its birth certificate."""
    log_lacks_from: int | None = None
    """The last step that metrics.jsonl has, where lines between it and ``step`` are missing; else None."""


def check_all_see(run: RunDir, checkpoint: Path | None, *, shared: bool, patience_s: float = SEEN_S) -> None:
    """Raise RunError, on every rank, if a rank does not see the run's folder. Collective: call on every rank.

    Args:
        run: the run.
        checkpoint: the checkpoint that all read; None for a start at birth.
        shared: if all write parts of checkpoints, into one folder; else a copy of ``checkpoint`` on each node will do.
        patience_s: time that a network's file system has to show a folder.
    """
    made = from_rank_zero(lambda: Path(tempfile.mkdtemp(prefix=".seen.", dir=run.path))) if shared else None
    needed = made or checkpoint
    try:
        raise_on_every_rank(
            None
            if needed is None or appears(needed, patience_s)
            else RunError(
                f"{checkpoint if made is None else f'--run_dir {run.path}'}: {rank_on_host(rank())} "
                f"does not see the folder of rank 0; give a --run_dir on a disk of all nodes"
            )
        )
    finally:
        if made is not None and rank() == 0:
            made.rmdir()


@contextmanager
def begin_run(
    config: RunConfig, run: RunDir, model: Decoder, birth: str, data: PreparedData, *, resume: bool
) -> Iterator[RunStart]:
    """Hold the run's lock, write its config and birth certificate or check the latter, and drop half-written files of a
    process that died, and metrics and snapshots of steps to come.

    The config of a resumed run is the caller's to write, once the checkpoint is loaded: a start that is refused changes
    none.

    Args:
        config: the run.
        run: folder of the run.
        model: the model at step 0.
        birth: digest of the model.
        data: the prepared corpus.
        resume: go on from the last checkpoint, or from birth where there is none yet.

    Raises:
        UsageError: another process writes the run; the folder is in use; or a checkpoint cannot be loaded to a drive.
        RunError: with ``resume``, model or corpus differ from those that the run began with.
    """
    with run.claimed():
        if not resume:
            check_unused(run)
        run.remove_leftovers()
        checkpoints = run.checkpoints_by_step() if resume else {}
        step = max(checkpoints, default=0)
        checkpoint = checkpoints.get(step)
        if checkpoint is not None and config.trainer.offload == "nvme":
            raise UsageError(
                "trainer.offload is nvme, whose state cannot be loaded from a checkpoint: go on with cpu or none"
            )
        record = (_read_birth if resume else _write_birth)(config, run, model, birth, data)
        logged = truncate_metrics(run.metrics, step if checkpoint else -1)
        if run.metrics_csv.exists():  # of a start that had come to its end
            write_metrics_csv(run)
        _drop_snapshots(run, step)
        yield RunStart(checkpoint, step, record, _gap(logged, step, config.trainer.log_every))


def _gap(logged: list[int], step: int, log_every: int) -> int | None:
    """Find the step from which a resumed run's log lacks lines up to ``step``; None if it lacks none."""
    last = logged[-1] if logged else 0
    # The run may have logged at another rhythm before.
    every = max(log_every, last - logged[-2] if len(logged) > 1 else last)
    return last if step - last >= (2 if logged else 1) * every else None
