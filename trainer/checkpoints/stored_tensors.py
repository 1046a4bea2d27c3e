"""Checkpoint on disk: its files are checked, and each process reads its shard of every tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import RunError
from ...files import check_tensor_file, content_digest, file_sha256, find_folder, path_below, read_json
from ...measure.ranks import rank, world_size
from ...measure.records import is_step, step_of
from ...messages import one_line
from ...models.tensor_shards import Runs, TensorShard, shard_of
from ...schema import SchemaError, check, checked, quoted
from ..processes.joint_failure import raise_on_every_rank
from .state_file import FORMAT, MEND, STATE, STATES, TENSORS, from_json, make_up, runs_of
from .stored_run import fetch_checkpoint


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, of which any part is read on request."""

    folder: CheckpointFolder
    name: str
    """Path in the checkpoint: ``state_dict/model.embedding.weight``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[str, Runs], ...] = field(repr=False)
    """Files, and the elements that each holds."""

    def __str__(self) -> str:
        return f"{self.folder.path}: {self.name}"

    def read(self, start: int, stop: int) -> Tensor:
        """Read elements ``start`` to ``stop`` of the flattened tensor, on the CPU, into new memory.

        Raises:
            RunError: a file is missing or damaged; the message names it.
        """
        found = [
            (part, piece.index_of(part.start), self.folder.flat(file, self.name, piece.n, self.dtype))
            for file, piece in self.pieces
            for part in piece.overlaps(start, stop)
        ]
        self.check_whole(start, stop)
        # Nothing is allocated before the files are found to hold it. The source is a view of a mapped file: only copied
        # parts are read.
        into = torch.empty(stop - start, dtype=self.dtype)
        for part, at, held in found:
            part.within(into, start).copy_(held[at : at + part.n].view(-1, part.run))
        return into

    def check_whole(self, start: int, stop: int) -> None:
        """Check that the pieces hold each of these elements once: one that none holds would be what the memory held.

        Raises:
            RunError: they do not.
        """
        if not make_up((part for _, piece in self.pieces for part in piece.overlaps(start, stop)), start, stop):
            raise RunError(f"{self.folder.path / STATE}: damaged ({self.name} is not whole); {MEND}")

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        return self.read(0, math.prod(self.shape)).view(self.shape)


@torch.no_grad()
def load_into(target: Tensor | TensorShard, stored: StoredTensor) -> None:
    """Copy this rank's shard of ``target`` from a checkpoint, in place; nothing else is read. Raises: RunError: the
    shapes differ.
    """
    shard = target if isinstance(target, TensorShard) else shard_of(target)
    if shard.shape != stored.shape:
        raise RunError(
            f"{stored}: its shape is {list(stored.shape)}, the model's {list(shard.shape)}; the run's config.yaml is "
            "another model's"
        )
    shard.fill(stored.read)


class CheckpointFolder:
    """A checkpoint on disk, of this format or the one before; its state is read, its tensors are not yet.

    Raises:
        RunError: ``state.json`` is missing, damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = find_folder(path)
        fetch_checkpoint(path)
        with self._while_there():
            content = read_json(path / STATE, dict[str, Any], MEND)
        version = content.get("format")
        if type(version) is not int or version not in STATES:
            raise RunError(f"{path / STATE}: format {quoted(version)}, this version reads 1 and {FORMAT}")
        if version == FORMAT and content.get("sha256") != content_digest(
            {name: value for name, value in content.items() if name != "sha256"}
        ):
            raise RunError(f"{path / STATE}: damaged (its SHA-256 is not the one in it); {MEND}")
        self._content: dict[str, Any] = content
        self.files: dict[str, str] = {}
        """SHA-256 of every file beside ``state.json``."""
        self._opened: dict[str, Any] = {}
        with self._damage():
            check(content, STATES[version])
            self.files = content["files"] if version == FORMAT else {TENSORS: content["sha256"]}
            self._check_facts()

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        """Name the folder, not a file in it, where it is deleted while it is read."""
        try:
            yield
        except (RunError, OSError):
            if self.path.exists():
                raise
            raise RunError(
                f"{self.path}: no such checkpoint, at least no longer; a run that trains deletes old ones "
                "(trainer.keep_last): start again, or name one that stays"
            ) from None

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except SchemaError as error:
            raise RunError(f"{self.path / STATE}: damaged ({error}); {MEND}") from None

    def _check_facts(self) -> None:
        """Check that ``state.json`` agrees with itself and with the folder's name."""
        step = self._content.get("step")
        if is_step(self.path) and step not in (None, step_of(self.path)):
            raise SchemaError(f"step is {step}, and the folder is of another")
        for name in self.files:
            path_below(self.path, name, lambda why: SchemaError(f"files has {why}"))
        for name, facts in self._content.get("tensors", {}).items():
            if unknown := [piece["file"] for piece in facts["pieces"] if piece["file"] not in self.files]:
                raise SchemaError(f"{quoted(name)} is in {quoted(unknown[0])}, which is not among files")
            for piece in facts["pieces"]:
                runs = runs_of(piece)
                if runs.run < 1 or runs.n % runs.run or runs.stride < runs.run:
                    raise SchemaError(f"a piece of {quoted(name)} has {runs.n} elements in runs of {runs.run}")
            if sum(piece["n"] for piece in facts["pieces"]) != math.prod(facts["shape"]):
                raise SchemaError(f"the pieces of {quoted(name)} do not make up {facts['shape']}")

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Check that all files are there, and that the content of every ``parts``-th is intact.

        Raises:
            RunError: one is not; it is named.
        """
        with self._while_there():
            for name in self.files:
                self._check_length(name)
            for name in sorted(self.files)[part::parts]:
                if file_sha256(self.path / name) != self.files[name]:
                    raise RunError(f"{self.path / name}: damaged (its SHA-256 is not the one in {STATE}); {MEND}")

    def _check_length(self, file: str) -> None:
        """Refuse a file that is longer than the tensors are that ``state.json`` says are in it."""
        facts = self._content["tensors"].values() if self._content["format"] == FORMAT else ()
        sizes = ((one, getattr(torch, one["dtype"]).itemsize) for one in facts)
        n_bytes = sum(size * piece["n"] for one, size in sizes for piece in one["pieces"] if piece["file"] == file)
        check_tensor_file(self.path / file, n_bytes if facts else None, MEND)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            with self._while_there():
                self._check_length(file)
                try:
                    self._opened[file] = safe_open(self.path / file, "pt")
                except SafetensorError as error:
                    raise RunError(f"{self.path / file}: damaged ({one_line(error)}); {MEND}") from None
        return self._opened[file]

    def flat(self, file: str, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """Return the ``n`` elements that ``file`` holds of a tensor, flattened; a view of the mapped file."""
        try:
            found: Tensor = self._open(file).get_tensor(name).flatten()
        except SafetensorError as error:
            raise RunError(f"{self.path / file}: damaged ({one_line(error)}); {MEND}") from None
        if (len(found), found.dtype) != (n, dtype):
            there, wanted = (
                f"{size} elements of {str(kind).removeprefix('torch.')}"
                for size, kind in ((len(found), found.dtype), (n, dtype))
            )
            raise RunError(f"{self.path / file}: damaged ({name} has {there}, {STATE} says {wanted}); {MEND}")
        return found

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Tensors by path."""
        if self._content["format"] == FORMAT:
            return {
                name: StoredTensor(
                    self,
                    name,
                    tuple(facts["shape"]),
                    getattr(torch, facts["dtype"]),
                    tuple((piece["file"], runs_of(piece)) for piece in facts["pieces"]),
                )
                for name, facts in self._content["tensors"].items()
            }
        opened = self._open(TENSORS)
        whole = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: StoredTensor(
                self, name, tuple(tensor.shape), tensor.dtype, ((TENSORS, Runs.of_range(0, tensor.numel())),)
            )
            for name, tensor in whole.items()
        }

    def tree(self, value: Callable[[StoredTensor], Any]) -> dict[str, Any]:
        """Return the saved state, with ``value`` of every tensor in its place."""

        def tensor(name: str) -> Any:
            if name not in self.tensors:
                raise SchemaError(f"state has the tensor {quoted(name)}, which is not among tensors")
            return value(self.tensors[name])

        with self._damage():
            return checked(from_json(self._content["state"], tensor), dict[str, Any], "state")


def open_checkpoint(path: Path) -> CheckpointFolder:
    """Open a checkpoint; the ranks share the check of its files. Collective: call on every rank.

    Raises:
        RunError: a file is missing or damaged; the message names it, on all ranks.
    """
    folder: CheckpointFolder | None = None
    error: Exception | None = None
    try:
        folder = CheckpointFolder(path)
        folder.verify(rank(), world_size())
    except (OSError, RunError) as its:
        error = its
    raise_on_every_rank(error)
    assert folder is not None
    return folder
