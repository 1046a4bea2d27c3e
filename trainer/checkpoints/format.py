"""The folder of a checkpoint: which files are in it, what they say, and how any part of a tensor is read from them.

``state.json`` (format 2) holds everything that is no tensor, and for every tensor its shape, its type and which file
holds which range of its elements. A checkpoint says nothing of how the run that wrote it was spread over processes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import RunError
from ...files import read_json
from ...measure.ranks import rank, world_size
from ...models.tensor_shards import TensorShard, shard_of
from ..joint_failure import raise_together

FORMAT = 2
TENSORS, STATE = "tensors.safetensors", "state.json"
MEND = "delete the folder to go on from the checkpoint before it"

_PLAIN = (bool, int, float, str, type(None))


def part_name(rank: int, world_size: int) -> str:
    """File of the tensors that ``rank`` writes, without its ending; one process alone writes whole tensors."""
    return "tensors" if world_size == 1 else f"tensors-{rank:05d}"


def sha256(file: Path) -> str:
    """Hash of a file's content, in hexadecimal."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ── trees ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def pack(value: Any, path: str, found: dict[str, TensorShard]) -> Any:
    """JSON for ``value``; what this rank holds of its tensors goes into ``found`` under their path.

    Raises:
        TypeError: something is neither a tensor nor plain data; its path is named.
    """
    if isinstance(value, Tensor):
        value = shard_of(value if value.is_contiguous() else value.contiguous())
    if isinstance(value, TensorShard):
        found[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        if strange := next((k for k in value if not isinstance(k, _PLAIN)), None):
            raise TypeError(f"checkpoint entry {path!r} has the key {strange!r}, which is no plain data")
        # As pairs, because keys may be numbers; with a tag, because a dictionary may look like a tag.
        return {"dict": [[k, pack(v, f"{path}/{k}" if path else str(k), found)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [pack(v, f"{path}/{i}", found) for i, v in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, _PLAIN):
        return value
    raise TypeError(f"checkpoint entry {path!r} is a {type(value).__name__}, which is neither a tensor nor plain data")


def unpack(value: Any, tensor: Callable[[str], Any]) -> Any:
    """What :func:`pack` made JSON of; ``tensor`` says what stands for the tensor of a path."""
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    builders: dict[str, Callable[[Any], Any]] = {
        "tensor": tensor,
        "dict": lambda pairs: {k: unpack(v, tensor) for k, v in pairs},
        "list": lambda items: [unpack(v, tensor) for v in items],
        "tuple": lambda items: tuple(unpack(v, tensor) for v in items),
        "float": float,
    }
    return builders[tag](content)


# ── state.json ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sealed(step: int, files: Mapping[str, str], tensors: Mapping[str, Any], tree: Any) -> dict[str, Any]:
    """Content of ``state.json``: all that the others lack, and its own checksum."""
    content = {"format": FORMAT, "step": step, "files": dict(files), "tensors": dict(tensors), "state": tree}
    return {"format": FORMAT, "step": step, "sha256": _digest(content)} | content


def _check_whole(name: str, shape: list[int], pieces: list[dict[str, Any]]) -> None:
    at = 0
    for piece in sorted(pieces, key=lambda piece: (piece["start"], piece["n"])):
        if piece["start"] != at:
            break
        at += piece["n"]
    if at != math.prod(shape):
        raise RuntimeError(f"checkpoint entry {name!r}: its pieces do not make up {shape}: {pieces}")


def facts(piece: TensorShard) -> dict[str, Any]:
    """Shape and type of a tensor."""
    return {"shape": list(piece.shape), "dtype": str(piece.local.dtype).removeprefix("torch.")}


def described(known: Mapping[str, Mapping[str, Any]], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """For every tensor its shape, its type, and which file holds which elements.

    Args:
        known: :func:`facts` of every tensor.
        parts: what each rank says of the file that it wrote.

    Raises:
        RuntimeError: a tensor is not written once and whole.
    """
    pieces: dict[str, list[dict[str, Any]]] = {name: [] for name in known}
    for part in parts:
        for name, (start, n) in part["pieces"].items():
            pieces[name].append({"file": part["file"], "start": start, "n": n})
    for name, its in known.items():
        _check_whole(name, its["shape"], pieces[name])
    return {name: {**its, "pieces": pieces[name]} for name, its in known.items()}


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint that is read when it is asked for, the part that is asked for."""

    folder: Folder
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
def fill(target: Tensor | TensorShard, stored: Stored) -> None:
    """Copy what this rank holds of ``target`` from a checkpoint, in place; nothing else is read.

    Raises:
        RunError: they are not of one shape.
    """
    piece = target if isinstance(target, TensorShard) else shard_of(target)
    if piece.shape != stored.shape:
        raise RunError(
            f"{stored}: its shape is {list(stored.shape)}, the model's {list(piece.shape)}; the run's config.yaml is "
            "another model's"
        )
    if piece.start < piece.stop:
        piece.local.copy_(stored.read(piece.start, piece.stop))


class Folder:
    """A checkpoint on disk, of this format or the one before; its state is read, its tensors are not yet.

    Raises:
        RunError: ``state.json`` is missing, damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = read_json(path / STATE)
        except RunError as error:
            raise RunError(f"{error}; {MEND}") from None
        version = content.get("format") if isinstance(content, dict) else None
        if version not in (1, FORMAT):
            raise RunError(f"{path / STATE}: format {version!r}, this version reads 1 and {FORMAT}")
        if version == FORMAT and content.pop("sha256", None) != _digest(content):
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
    def tensors(self) -> dict[str, Stored]:
        """Every tensor by its path."""
        if self._content["format"] == FORMAT:
            return {
                name: Stored(
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
            name: Stored(self, name, tuple(tensor.shape), tensor.dtype, ((TENSORS, 0, tensor.numel()),))
            for name, tensor in whole.items()
        }

    def tree(self, value: Callable[[Stored], Any]) -> dict[str, Any]:
        """What was saved, with ``value`` of every tensor in its place."""
        return unpack(self._content["state"], lambda name: value(self.tensors[name]))


def verified(path: Path) -> Folder:
    """A checkpoint whose files the ranks of the run have checked between them. In a group every rank must call.

    Raises:
        RunError: a file is missing or damaged; it is named, on all ranks.
    """
    folder: Folder | None = None
    error: Exception | None = None
    try:
        folder = Folder(path)
        folder.verify(rank(), world_size())
    except (OSError, RunError) as its:
        error = its
    raise_together(error)
    assert folder is not None
    return folder
