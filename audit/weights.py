"""Weights of a checkpoint as named ranges of bytes: headers of files are checked before they are used.

For safetensors, headers are read, and then only the requested bytes. Pickled files are read by another process
(pickled_weights.py).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..errors import RunError
from ..files import LONGEST_HEADER, check_file, parse_json, path_below, read_json
from ..messages import one_line
from ..models.exchange.gguf_model import open_weights
from ..models.exchange.pretrained import WeightIndex
from ..models.exchange.weight_files import INDEX

#: Types of safetensors, with torch's.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
#: Axes of a tensor: torch and numpy stop at 64, and no model has more than a handful.
_MOST_AXES = 16
#: Types whose values are weights; the exponents of F8_E8M0 are scales of others.
WEIGHT_TYPES = {name for name, dtype in DTYPES.items() if dtype.is_floating_point} - {"F8_E8M0"}


@dataclass(frozen=True)
class Entry:
    """Description of a tensor."""

    dtype: str
    """Name of the type in safetensors."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.numel * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Weights(ABC):
    """Tensors by name, readable in parts."""

    entries: dict[str, Entry]

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements ``start`` … ``stop`` − 1 of a flattened tensor, in its own type."""


@dataclass(frozen=True)
class Part:
    """Elements of a flattened tensor that are contiguous in a file."""

    file: Path
    offset: int
    """Bytes from the file's start."""
    first: int
    n: int


@dataclass
class FileWeights(Weights):
    """Tensors of safetensors files."""

    entries: dict[str, Entry] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Weights`.

        Raises:
            RunError: the file has become shorter since its header was read.
        """
        dtype = DTYPES[self.entries[name].dtype]
        found, n_read = bytearray((stop - start) * dtype.itemsize), 0
        for part in self.parts[name]:
            low, high = max(start, part.first), min(stop, part.first + part.n)
            if low < high:
                there = memoryview(found)[(low - start) * dtype.itemsize : (high - start) * dtype.itemsize]
                with part.file.open("rb", buffering=0) as file:
                    file.seek(part.offset + (low - part.first) * dtype.itemsize)
                    while there and (n := file.readinto(there)):
                        there, n_read = there[n:], n_read + n
        if n_read != len(found):
            raise RunError(f"{part.file}: ends before {name} does")
        return torch.frombuffer(found, dtype=dtype) if found else torch.empty(0, dtype=dtype)


class HeldWeights(Weights):
    """Tensors in memory.

    Raises:
        RunError: a tensor is of a type that safetensors does not have.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype not in NAMES:
                raise RunError(f"{one_line(name, 60)} is of type {tensor.dtype}")
            if tensor.ndim > _MOST_AXES:
                raise RunError(f"{one_line(name, 60)} has {tensor.ndim} axes")
        self.tensors = {name: tensor.detach().contiguous().flatten() for name, tensor in tensors.items()}
        self.entries = {name: Entry(NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}

    @override
    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name][start:stop]


class GgufWeights(Weights):
    """Tensors of a GGUF model, dequantised; the values of the last one read are kept."""

    def __init__(self, sources: Path) -> None:
        self._sources = sources
        self._held: tuple[str, Tensor] | None = None
        with open_weights(self._sources) as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118, as of safetensors
        self.entries = {name: Entry(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `Weights`.

        Raises:
            RunError: the file has become shorter since its header was read.
        """
        if self._held is None or self._held[0] != name:
            with open_weights(self._sources) as tensors:
                self._held = name, tensors.get_tensor(name).flatten()
        return self._held[1][start:stop]


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, int]]:
    """Read the tensors of a safetensors file, and the offset of each in bytes from the file's start.

    Raises:
        RunError: the file is not a whole file of that format; for a truncated one the message says how much is missing.
    """
    check_file(path)
    size = path.stat().st_size
    if size == 0:
        raise RunError(f"{path}: is empty")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise RunError(f"{path}: truncated, or no safetensors file (its header would have {length:,} bytes)")
        text = file.read(length)
    try:
        header = parse_json(text.decode("utf-8"), unrepeated=True)
        found, begins, end = _entries(header, path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path}: damaged header ({one_line(error) or 'no tensors in it'})") from None
    if 8 + length + end != size:
        what = "truncated" if 8 + length + end > size else "too long"
        raise RunError(f"{path}: {what} (it has {size:,} bytes, and its header says {8 + length + end:,})")
    return found, {name: 8 + length + begin for name, begin in begins.items()}


def _entries(header: Any, path: Path) -> tuple[dict[str, Entry], dict[str, int], int]:
    found, begins, spans = {}, {}, []
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        shape, (begin, stop) = tuple(facts["shape"]), facts["data_offsets"]
        if facts["dtype"] not in DTYPES:
            kind = one_line(facts["dtype"], 20)
            raise RunError(f"{path}: {one_line(name, 60)} is of type {kind}, which this version does not read")
        if len(shape) > _MOST_AXES:
            raise ValueError(f"{one_line(name, 60)} has {len(shape)} axes")
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, stop)):
            raise ValueError(f"{name} has a size that is no whole number")
        found[name] = Entry(facts["dtype"], shape)
        if stop - begin != found[name].nbytes:
            raise ValueError(f"{name} is {found[name]}, and has {stop - begin:,} bytes")
        begins[name] = begin
        spans.append((begin, stop))
    at = 0
    for begin, stop in sorted(spans):
        if begin != at:
            raise ValueError("tensors overlap, or leave a gap")
        at = stop
    return found, begins, at


def open_safetensors(folder: Path) -> FileWeights:
    """Open the tensors of a folder of ``transformers``: one file, or those that the index names; or of one file.

    Raises:
        RunError: a file that the index names is missing or damaged, or lacks a tensor.
    """
    weights = FileWeights()
    wanted: dict[str, str] | None = None
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        wanted = read_json(folder / INDEX, WeightIndex)["weight_map"]
        names = sorted(set(wanted.values()))
        files = [path_below(folder, name, lambda why: RunError(f"{folder / INDEX}: names {why}")) for name in names]
    for file in files:
        entries, begins = read_header(file)
        for name, entry in entries.items():
            if name in weights.entries:
                raise RunError(f"{file}: {name} is also in {weights.parts[name][0].file.name}")
            weights.entries[name] = entry
            weights.parts[name] = [Part(file, begins[name], 0, entry.numel)]
    if wanted is not None:
        for name, file_name in wanted.items():
            if name not in weights.parts or weights.parts[name][0].file.name != file_name:
                raise RunError(f"{folder / INDEX}: {name} is not in {file_name}")
    return weights


def describe_json(content: Any) -> str:
    """Write a config's value for a sentence."""
    return one_line(json.dumps(content, ensure_ascii=False), 60)
