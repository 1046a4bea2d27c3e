"""Files of a run: its directory and its snapshots, written whole or not at all."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from annotated_types import Interval
from filelock import Timeout
from safetensors.numpy import save_file
from typing_extensions import TypedDict

from ..errors import RunError, UsageError
from ..files import (
    TEXT_BYTES,
    atomic_path,
    check_file,
    check_tensor_file,
    file_sha256,
    find_folder,
    list_folders,
    make_folder,
    read_json,
    read_sealed_json,
    remove_leftovers,
    save_tensors,
    tensor_file,
    write_json,
    write_sealed_json,
)
from ..locks import hold_lock
from ..messages import one_line
from ..metrics.quantities import quantities_of
from ..metrics.quantity import Quantity
from ..schema import Count, Sha256

ARRAYS = "arrays.safetensors"
#: Bytes of arrays that a snapshot has at most.
MOST_ARRAYS = 1 << 32
_MEND = "delete the folder to go on without this snapshot"
_DTYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I32": "<i4", "I64": "<i8", "U8": "u1", "BOOL": "?"}
#: Eight digits or more, and no zero before more than eight.
_STEP_NAME = re.compile(r"step-(-0000001|[0-9]{8}|[1-9][0-9]{8,17})", re.ASCII)

# ── what files hold; what a field is that no code reads is left open ─────────────────────────────────────────────────

Number = float | None
"""JSON has no NaN: null stands for it."""
Size = Annotated[int, Interval(ge=1, le=1 << 40)]


class Token(TypedDict):
    """An entry of ``top_tokens``."""

    rank: Count
    id: Count
    text: str
    p: float
    argmax_share: float
    rank_at_birth: NotRequired[Count]


class SecondarySink(TypedDict):
    """An entry of ``secondary_sinks``."""

    probe: str
    position: Count
    id: Annotated[int, Interval(ge=-1, le=1 << 62)]
    text: str
    blocks: Count
    heads: Count
    importance: float


class ProbeFacts(TypedDict):
    """The measured probe."""

    kind: NotRequired[str]
    n_sequences: NotRequired[Count]
    seq_len: NotRequired[Size]
    probe_seed: NotRequired[int]
    digest: NotRequired[str]
    dtype: NotRequired[str]
    n_tokens: NotRequired[Size]


class BosFacts(TypedDict):
    """The control with BOS before random tokens."""

    n_sequences: NotRequired[Count]
    seq_len: NotRequired[Size]
    token: Count
    text: str
    is_added: bool


class ModelFacts(TypedDict):
    """Config of the model; further keys depend on its kind."""

    d_model: NotRequired[Size | None]
    d_head: NotRequired[Size | None]
    head_dim: NotRequired[Size | None]
    n_heads: NotRequired[Size | None]
    attention: NotRequired[dict[str, Any]]
    init: NotRequired[dict[str, Any]]


class Summary(TypedDict):
    """``summary.json`` of a snapshot."""

    step: Annotated[int, Interval(ge=-1, le=1 << 62)]
    bias: dict[str, Number]
    bias_text: NotRequired[dict[str, Number]]
    bias_bos: NotRequired[dict[str, Number]]
    bias_text_without_bos: NotRequired[dict[str, Number]]
    probe_bos: NotRequired[BosFacts]
    tokens: NotRequired[Count | None]
    init_seed: NotRequired[int]
    init_from: NotRequired[str]
    stored_kinds: NotRequired[dict[str, Count]]
    source: NotRequired[str]
    probe: NotRequired[ProbeFacts]
    model: NotRequired[ModelFacts]
    n_layers: NotRequired[Size]
    n_heads: NotRequired[Size | None]
    vocab_size: NotRequired[Size]
    seconds: NotRequired[Number]
    top_tokens: NotRequired[list[Token]]
    secondary_sinks: NotRequired[list[SecondarySink]]
    quantities: NotRequired[list[dict[str, Any]]]
    not_measured: NotRequired[list[str]]
    arrays_sha256: NotRequired[Sha256]
    sha256: NotRequired[Sha256]


class DataFacts(TypedDict):
    """The corpus, as in a birth certificate; further keys depend on its kind."""

    kind: NotRequired[str]
    path: NotRequired[str | list[str]]
    content_hash: NotRequired[Sha256 | None]
    tokenizer_hash: NotRequired[Sha256]
    data_seed: NotRequired[int]
    val_fraction: NotRequired[float]
    documents: NotRequired[dict[str, Count]]
    tokens: NotRequired[dict[str, Count]]
    bytes: NotRequired[dict[str, Count]]
    skipped: NotRequired[dict[str, Count]]
    tokenizer: NotRequired[str]
    vocab_size: NotRequired[Size]
    bytes_per_token: NotRequired[Number]
    unigram_entropy: NotRequired[Number]
    sources: NotRequired[dict[str, dict[str, Any]]]


class Birth(TypedDict):
    """Content of ``birth.json``."""

    digest: Sha256
    init_seed: int
    n_params: Count
    init_from: NotRequired[str | None]
    data_seed: NotRequired[int]
    probe_seed: NotRequired[int]
    run_id: NotRequired[str]
    created: NotRequired[str]
    data: NotRequired[DataFacts]
    versions: NotRequired[dict[str, str | None]]
    code: NotRequired[dict[str, Any] | None]
    model: NotRequired[dict[str, Any]]
    parameters: NotRequired[dict[str, dict[str, Any]]]
    config_is_sealed: NotRequired[bool]
    vocab_size_asked: NotRequired[Size]
    sha256: NotRequired[Sha256]


@dataclass(frozen=True)
class Snapshot:
    """A measurement of one model: scalars and ranked tokens (``summary``), arrays by name (``arrays``).

    Names, shapes and units: docs/quantities.md.
    """

    summary: dict[str, Any]
    arrays: Mapping[str, np.ndarray]

    @property
    def step(self) -> int:
        """Optimizer steps taken before this snapshot; 0 is birth."""
        return int(self.summary["step"])

    @property
    def bias(self) -> dict[str, float]:
        """The scalars, by name without the ``bias/`` prefix."""
        return self.summary["bias"]

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Declarations of all quantities that it may hold, by name: built-in ones, and those of the user's metrics in
        it.
        """
        return quantities_of(self.summary)

    def scalars(self) -> dict[str, float]:
        """Return the scalars of every probe under the names that loggers use: ``bias/…``, ``bias_text/…``."""
        groups = {name: value for name, value in self.summary.items() if name == "bias" or name.startswith("bias_")}
        return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}

    def write(self, folder: Path) -> None:
        """Write ``summary.json`` and ``arrays.safetensors`` into ``folder``, which appears whole or not at all."""
        with atomic_path(folder) as new:
            new.mkdir()
            save_tensors(save_file, {k: np.ascontiguousarray(v) for k, v in self.arrays.items()}, new / ARRAYS)
            write_sealed_json(new / "summary.json", self.summary | {"arrays_sha256": file_sha256(new / ARRAYS)})

    @classmethod
    def read(cls, folder: Path, *, arrays_later: bool = False) -> Snapshot:
        """Read a snapshot folder; RunError names the file that is missing, damaged or of another kind, and the
        field.

        Args:
            folder: that it was written to.
            arrays_later: open the file of arrays when one is first asked for; otherwise it is checked whole at once.
                Their values are read as they are asked for, and not kept.
        """
        folder = find_folder(folder)
        file = folder / "summary.json"
        summary = read_sealed_json(file, Summary, _MEND)
        if is_step(folder) and summary["step"] != step_of(folder):
            raise RunError(f"{file}: step is {summary['step']}, and the folder is of another; {_MEND}")
        try:
            quantities = quantities_of(summary)
        except ValueError as error:
            raise RunError(f"{file}: damaged (quantities: {one_line(error)}); {_MEND}") from None
        arrays = _StoredArrays(folder / ARRAYS, summary.pop("arrays_sha256", None), quantities)
        if not arrays_later:
            arrays.check()
        return cls(summary, arrays)


class _StoredArrays(Mapping[str, np.ndarray]):
    """Arrays of a snapshot's file, read as they are asked for: those of all snapshots of a run take gigabytes."""

    def __init__(self, file: Path, sha256: str | None, quantities: Mapping[str, Quantity]) -> None:
        self._file, self._sha256, self._quantities = file, sha256, quantities

    @cached_property
    def _places(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Type, shape and offset by name; each declared array must hold numbers and have a dimension for each axis."""
        header, offset = check_tensor_file(self._file, MOST_ARRAYS, _MEND)
        places = {}
        # The library checks all else that the header says.
        with tensor_file(self._file, "np", _MEND) as opened:
            for name in opened.keys():  # noqa: SIM118, the library's object is no mapping
                if (dtype := header[name]["dtype"]) not in _DTYPES:
                    raise self._damaged(f"{name} is {dtype}, not one of {', '.join(_DTYPES)}")
                begin = offset + header[name]["data_offsets"][0]
                # All snapshots of a run have these names.
                places[sys.intern(name)] = _DTYPES[dtype], tuple(header[name]["shape"]), begin
        for name, (_, shape, _) in places.items():
            quantity = self._quantities.get(name.rpartition(".")[2])
            # An empty array has one dimension where there is nothing to stack: a run without strangers.
            if quantity is not None and math.prod(shape) and len(shape) != len(quantity.axes):
                raise self._damaged(f"{name} has {len(shape)} dimensions instead of {len(quantity.axes)}")
        return places

    @cached_property
    def _checked(self) -> tuple[int, ...]:
        """State of the file when all of it was checked."""
        check_file(self._file, mend=_MEND)
        state = _state(self._file.stat())
        _ = self._places
        if self._sha256 is not None and file_sha256(self._file) != self._sha256:
            raise self._damaged("its SHA-256 is not the one in summary.json")
        return state

    def check(self) -> None:
        """Check the whole file, unless that was done before; RunError says that it is damaged."""
        _ = self._checked

    def _damaged(self, fault: str) -> RunError:
        return RunError(f"{self._file}: damaged ({fault}); {_MEND}")

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape, offset = self._places[name]
        checked = self._checked
        try:
            with self._file.open("rb") as file:
                if _state(os.fstat(file.fileno())) != checked:
                    raise RunError(f"{self._file}: has changed since it was read; read this snapshot again")
                return np.fromfile(file, dtype, math.prod(shape), offset=offset).reshape(shape)
        except OSError as error:
            raise RunError(f"{self._file}: cannot be read ({error.strerror})") from None

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _state(found: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file or a folder from what it was before."""
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class RunDir:
    """The files of one run, by name (docs/run-directory.md)."""

    path: Path

    @property
    def config(self) -> Path:  # noqa: D102
        return self.path / "config.yaml"

    @property
    def birth(self) -> Path:  # noqa: D102
        return self.path / "birth.json"

    @property
    def metrics(self) -> Path:  # noqa: D102
        return self.path / "metrics.jsonl"

    @property
    def metrics_csv(self) -> Path:  # noqa: D102
        return self.path / "metrics.csv"

    @property
    def tokenizer(self) -> Path:
        """File of the tokenizer's JSON; absent if the data is not text."""
        return self.path / "tokenizer.json"

    @property
    def report(self) -> Path:  # noqa: D102
        return self.path / "report.html"

    @property
    def not_measured(self) -> Path:
        """File with the reasons why steps have no snapshot."""
        return self.path / "not_measured.json"

    @property
    def wandb(self) -> Path:
        """File that names the run's W&B run, if it has one."""
        return self.path / "wandb.json"

    @property
    def lock(self) -> Path:
        """File that the process which writes the run holds locked."""
        return self.path / ".lock"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the run's lock, so that no two processes write one run; UsageError if another process holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            try:
                held.enter_context(hold_lock(self.lock, timeout=0))
            except Timeout:
                raise UsageError(
                    f"{self.path}: another process is writing this run; wait for its end, or give another --run_dir"
                ) from None
            yield

    @property
    def certificate(self) -> Path:
        """File of the certificate, without the secret that opens it."""
        return self.path / "certificate.json"

    @property
    def files(self) -> tuple[Path, ...]:
        """Files beside the snapshots and checkpoints that anyone may read; a run need not have each."""
        begun, logged = (self.config, self.birth, self.tokenizer), (self.metrics, self.metrics_csv, self.not_measured)
        return (*begun, *logged, self.wandb, self.report, self.certificate)

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` optimizer steps."""
        return self.path / "checkpoints" / f"step-{step:08d}"

    def snapshot(self, step: int) -> Path:
        """Return the folder of the snapshot after ``step`` optimizer steps."""
        return self.path / "snapshots" / f"step-{step:08d}"

    def checkpoints(self) -> list[Path]:
        """List all checkpoint folders, oldest first."""
        return self._by_step("checkpoints")

    def checkpoints_by_step(self) -> dict[int, Path]:
        """Return all checkpoint folders by their step, oldest first."""
        return {step_of(folder): folder for folder in self.checkpoints()}

    def snapshot_folders(self) -> list[Path]:
        """List all snapshot folders, birth first."""
        return self._by_step("snapshots")

    def state_of_snapshots(self) -> object:
        """Return what differs once a snapshot is added, replaced or removed."""
        folder = self.path / "snapshots"
        if not folder.is_dir():
            return None
        state = _state(folder.stat())
        # Names too: a clock may not tell two changes apart.
        with os.scandir(folder) as entries:
            return state, [entry.name for entry in entries]

    def state_of_metrics(self) -> object:
        """Return what differs once the log is written to."""
        return _state(self.metrics.stat()) if self.metrics.exists() else None

    def _by_step(self, kind: str) -> list[Path]:
        # Another name, such as a copy that a user made, is none of the run's.
        return sorted(filter(is_step, list_folders(self.path / kind, "step-*")), key=step_of)

    def own_tokenizer(self) -> Path | None:
        """Return the file of the tokenizer's JSON if the data is text; RunError if it differs from the one that the run
        began with.
        """
        known = self.read_birth().get("data", {}).get("tokenizer_hash")
        if known is None:
            return self.tokenizer if self.tokenizer.is_file() else None
        check_file(self.tokenizer, TEXT_BYTES)
        if file_sha256(self.tokenizer) != known:
            raise RunError(f"{self.tokenizer}: changed since the run began (birth.json has its SHA-256); restore it")
        return self.tokenizer

    def read_birth(self) -> dict[str, Any]:
        """Read and check the birth certificate; RunError names its fault."""
        return read_sealed_json(self.birth, Birth, "restore it from a copy")

    def snapshots(self, *, arrays_later: bool = False) -> list[Snapshot]:
        """Read all snapshots, birth first; with ``arrays_later`` their summaries alone for now."""
        return [Snapshot.read(folder, arrays_later=arrays_later) for folder in self.snapshot_folders()]

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Write a snapshot into its folder, and remove the leftovers of writers that died.

        One process at a time writes, others wait: the hidden folders that this one finds have no living writer.
        """
        folder = self.snapshot(snapshot.step)
        make_folder(folder.parent)
        with hold_lock(self.path / ".snapshots.lock"):
            remove_leftovers(folder.parent, "step-*")
            snapshot.write(folder)

    def note_not_measured(self, step: int, reason: str) -> None:
        """Note why a step has no snapshot. Notes of later steps belong to an earlier training and are removed."""
        earlier = {str(at): why for at, why in self.read_not_measured().items() if at < step}
        make_folder(self.path)
        write_json(self.not_measured, earlier | {str(step): one_line(reason)})

    def read_not_measured(self) -> dict[int, str]:
        """Read the reasons why steps have no snapshot, by step; RunError if the file is damaged."""
        if not self.not_measured.is_file():
            return {}
        notes = read_json(self.not_measured, dict[str, str], "delete it to go on without these notes")
        if wrong := [step for step in notes if not step.isdecimal()]:
            raise RunError(
                f"{self.not_measured}: {wrong[0]!r} is no step; delete the file to go on without these notes"
            )
        steps = {step_of(folder) for folder in self.snapshot_folders()}
        return {int(step): why for step, why in notes.items() if int(step) not in steps}

    def remove_leftovers(self) -> None:
        """Remove half-written files of an earlier process; the caller holds the run's lock."""
        for folder in (self.path / "checkpoints", self.path / "snapshots"):
            remove_leftovers(folder, "step-*")
        # Commands write the others without the lock, while a run starts too.
        for file in {*self.files} - {self.report, self.certificate}:
            remove_leftovers(self.path, file.name)

    @classmethod
    def is_run(cls, path: Path) -> bool:
        """Return True if ``path`` holds a run that has been born."""
        run = cls(path)
        return run.config.is_file() and run.birth.is_file()

    @property
    def is_only_measured(self) -> bool:
        """True if no file says that this package trained it: at most its snapshots were written by it."""
        return not (self.birth.exists() or self.config.exists())

    @classmethod
    def open_measured(cls, path: Path) -> RunDir:
        """Open an existing run, or the snapshots of a training by another program, without birth or config; UsageError
        if ``path`` holds neither.
        """
        measured = cls(path)
        if measured.is_only_measured and not measured.snapshot_folders() and (notes := measured.read_not_measured()):
            raise UsageError(f"{path}: no step of this training could be measured: {next(iter(notes.values()))}")
        return measured if measured.is_only_measured and measured.snapshot_folders() else cls.open(path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Open an existing run; UsageError if ``path`` does not hold one."""
        if not cls.is_run(path):
            raise UsageError(
                f"{path}: not a run (no config.yaml and birth.json in it); give the folder that `pretrain` wrote"
            )
        return cls(path)


def is_step(folder: Path) -> bool:
    """Return True if a folder has the name of a checkpoint or a snapshot in a run."""
    return _STEP_NAME.fullmatch(folder.name) is not None


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's or a snapshot's folder is named after.

    Raises:
        RunError: the name is not that of such a folder.
    """
    step = _STEP_NAME.fullmatch(folder.name)
    if step is None:
        raise RunError(f"{one_line(folder)}: no step in this name; give it one such as step-00000250")
    return int(step[1])
