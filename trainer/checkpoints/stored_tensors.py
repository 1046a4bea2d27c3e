"""A checkpoint on disk: its files are checked, and of its tensors each process reads the shard that it holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import RunError
from ...files import find_folder, read_json
from ...measure.ranks import rank, world_size
from ...models.tensor_shards import TensorShard, shard_of
from ..processes.joint_failure import raise_on_every_rank
from .state_file import FORMAT, MEND, STATE, TENSORS, content_digest, from_json, sha256


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint that is read when it is asked for, the part that is asked for."""

    folder: CheckpointFolder
    name: str
    """Its path in the checkpoint: ``state_dict/model.embedding.weight``."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[str, int, int], ...] = field(repr=False)
    """(file, first element, elements)."""

    def __str__(self) -> str:
        return f"{self.folder.path}: {self.name}"

    def read(self, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, on the CPU, in memory of their own.

        Raises:
            RunError: a file is missing or damaged; it is named.
        """
        into = torch.empty(stop - start, dtype=self.dtype)
        read = 0
        for file, first, n in self.pieces:
            a, b = max(start, first), min(stop, first + n)
            if a < b:
                # A view of the mapped file: what is not copied is not read.
                into[a - start : b - start] = self.folder.flat(file, self.name)[a - first : b - first]
                read += b - a
        if read != len(into):
            raise RunError(f"{self.folder.path / STATE}: damaged ({self.name} is not whole); {MEND}")
        return into

    def whole(self) -> Tensor:
        """All of it."""
        return self.read(0, math.prod(self.shape)).view(self.shape)


@torch.no_grad()
def load_into(target: Tensor | TensorShard, stored: StoredTensor) -> None:
    """Copy what this rank holds of ``target`` from a checkpoint, in place; nothing else is read.

    Raises:
        RunError: they are not of one shape.
    """
    shard = target if isinstance(target, TensorShard) else shard_of(target)
    if shard.shape != stored.shape:
        raise RunError(
            f"{stored}: its shape is {list(stored.shape)}, the model's {list(shard.shape)}; the run's config.yaml is "
            "another model's"
        )
    if shard.start < shard.stop:
        shard.local.copy_(stored.read(shard.start, shard.stop))


class CheckpointFolder:
    """A checkpoint on disk, of this format or the one before; its state is read, its tensors are not yet.

    Raises:
        RunError: ``state.json`` is missing, damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = find_folder(path)
        try:
            content = read_json(path / STATE)
        except RunError as error:
            raise RunError(f"{error}; {MEND}") from None
        version = content.get("format") if isinstance(content, dict) else None
        if version not in (1, FORMAT):
            raise RunError(f"{path / STATE}: format {version!r}, this version reads 1 and {FORMAT}")
        if version == FORMAT and content.pop("sha256", None) != content_digest(content):
            raise RunError(f"{path / STATE}: damaged (its SHA-256 is not the one in it); {MEND}")
        self._content: dict[str, Any] = content
        self.files: dict[str, str] = content["files"] if version == FORMAT else {TENSORS: content["sha256"]}
        """SHA-256 of every file beside ``state.json``."""
        self._opened: dict[str, Any] = {}

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Check that all files are there, and that the content of every ``parts``-th is what was written.

        Raises:
            RunError: one is not; it is named.
        """
        for name in self.files:
            if not (self.path / name).is_file():
                raise RunError(f"{self.path / name}: missing; {MEND}")
        for name in sorted(self.files)[part::parts]:
            if sha256(self.path / name) != self.files[name]:
                raise RunError(f"{self.path / name}: damaged (its SHA-256 is not the one in {STATE}); {MEND}")

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self.path / file, "pt")
            except FileNotFoundError:
                raise RunError(f"{self.path / file}: missing; {MEND}") from None
            except SafetensorError as error:
                raise RunError(f"{self.path / file}: damaged ({error}); {MEND}") from None
        return self._opened[file]

    def flat(self, file: str, name: str) -> Tensor:
        """What ``file`` holds of a tensor, flattened; a view of the mapped file."""
        try:
            return self._open(file).get_tensor(name).flatten()
        except SafetensorError as error:
            raise RunError(f"{self.path / file}: damaged ({error}); {MEND}") from None

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by its path."""
        if self._content["format"] == FORMAT:
            return {
                name: StoredTensor(
                    self,
                    name,
                    tuple(facts["shape"]),
                    getattr(torch, facts["dtype"]),
                    tuple((piece["file"], piece["start"], piece["n"]) for piece in facts["pieces"]),
                )
                for name, facts in self._content["tensors"].items()
            }
        opened = self._open(TENSORS)
        whole = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: StoredTensor(self, name, tuple(tensor.shape), tensor.dtype, ((TENSORS, 0, tensor.numel()),))
            for name, tensor in whole.items()
        }

    def tree(self, value: Callable[[StoredTensor], Any]) -> dict[str, Any]:
        """What was saved, with ``value`` of every tensor in its place."""
        return from_json(self._content["state"], lambda name: value(self.tensors[name]))


def open_checkpoint(path: Path) -> CheckpointFolder:
    """A checkpoint whose files the ranks of the run have checked between them. In a group every rank must call.

    Raises:
        RunError: a file is missing or damaged; it is named, on all ranks.
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
