"""The header of a GGUF file: its metadata and the place of each tensor, checked before any of its numbers is used.

The readers of ``gguf`` and ``transformers`` allocate by numbers in the file. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import RunError, UsageError
from ...files import check_file
from ...messages import one_line

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Types of metadata of a fixed width, as ``struct`` calls them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
#: Elements of the longest array that is kept; those of a tokenizer are longer.
_KEPT = 1024
#: Bytes of the longest name and of the longest string that is kept, and most dimensions of a tensor, as in ggml.
_LONGEST_NAME, _LONGEST_TEXT, _MOST_DIMENSIONS = 1 << 12, 1 << 24, 4
#: Bytes that an entry of metadata, or the description of a tensor, takes at least.
_LEAST_FIELD, _LEAST_TENSOR = 13, 32


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file describes it."""

    file: Path
    kind: str
    """Name in ``gguf.GGMLQuantizationType``."""
    shape: tuple[int, ...]
    """Rows first, as torch counts."""
    offset: int
    """Offset of its first byte in the file."""
    nbytes: int


@dataclass(frozen=True)
class LongArray:
    """An array of the metadata that is too long to keep."""

    length: int


@dataclass(frozen=True)
class GgufHeader:
    """The part of a file before its tensors."""

    file: Path
    metadata: Mapping[str, Any]
    """Numbers, strings, short lists, and a :class:`LongArray` in place of others."""
    spans: Mapping[str, tuple[int, int]]
    """First and last byte of each entry of the metadata in the file, key and type included."""
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """``general.architecture``.

        Raises:
            RunError: the file has none.
        """
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise RunError(f"{self.file}: damaged (general.architecture is missing); fetch the file again")
        return name

    @property
    def kinds(self) -> dict[str, int]:
        """Type of storage → number of tensors, the most frequent first."""
        return dict(Counter(tensor.kind for tensor in self.tensors.values()).most_common())


def names_gguf(name: str) -> bool:
    """Return True if a name can only mean a GGUF model: a file of that suffix, or a folder that holds such files."""
    return name.endswith(".gguf") or any(Path(name).glob("*.gguf"))


def kinds_in_words(kinds: Mapping[str, int]) -> str:
    """Write the kinds in words: ``Q4_1: 210 tensors, F32: 61``."""
    parts = [f"{kind}: {n}{' tensors' if i == 0 else ''}" for i, (kind, n) in enumerate(kinds.items())]
    return ", ".join(parts)


class _Cursor:
    """Reader of successive values; reading beyond the end of the file is an error that names the value."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file, self._content, self.at = file, content, 0

    def damaged(self, what: str) -> RunError:
        return RunError(f"{self.file}: damaged ({what}); fetch the file again")

    def skip(self, n_bytes: int, what: str) -> int:
        """Skip bytes; return their offset."""
        start = self.at
        if n_bytes > len(self._content) - start:
            raise self.damaged(f"{what} ends {n_bytes - len(self._content) + start:,} bytes after the end of the file")
        self.at += n_bytes
        return start

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        start = self.skip(struct.calcsize(f"<{form}"), what)
        return struct.unpack_from(f"<{form}", self._content, start)

    def text(self, what: str, most: int = _LONGEST_TEXT) -> str:
        (length,) = self.numbers("Q", what)
        if length > most:
            raise self.damaged(f"{what} has {length:,} bytes, and {most:,} are read at most")
        start = self.skip(length, what)
        try:
            return self._content[start : self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8 text") from None

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count that the rest of the file is too short for."""
        if count * least_bytes > len(self._content) - self.at:
            raise self.damaged(f"it says {count:,} {what}, for which the file is too short")

    def value(self, kind: int, what: str) -> Any:
        """Read one entry of the metadata."""
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], what)[0]
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise self.damaged(f"{what} is of type {kind}, which the format has not")
        inner, length = self.numbers("IQ", what)
        if inner in _SCALARS:
            self.check_count(length, struct.calcsize(_SCALARS[inner]), f"elements of {what}")
            if length <= _KEPT:
                return list(self.numbers(f"{length}{_SCALARS[inner]}", what))
            self.skip(length * struct.calcsize(_SCALARS[inner]), what)
        elif inner == _STRING:
            self.check_count(length, 8, f"elements of {what}")
            if length <= _KEPT:
                return [self.text(what) for _ in range(length)]
            self._skip_texts(length, what)
        else:
            raise self.damaged(f"{what} is an array of type {inner}, which is not read")
        return LongArray(length)

    def _skip_texts(self, n: int, what: str) -> None:
        """Skip many strings, reading only their lengths."""
        content, at, end = self._content, self.at, len(self._content)
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(n):
            if at + 8 > end:
                break
            at += 8 + length_at(content, at)[0]
        self.skip(at - self.at, what)


def read_header(file: Path) -> GgufHeader:
    """Read the header of a GGUF file; no tensor is read, and nothing is allocated by a number of the file.

    Raises:
        UsageError: no GGUF file, or one of a version, byte order or type of storage that is not read.
        RunError: damaged; names what is.
    """
    check_file(file, fail=UsageError)
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise UsageError(f"{file}: is no GGUF file (it does not begin with GGUF); give one")
        if size < 24:
            raise RunError(f"{file}: damaged (it has {size} bytes); fetch the file again")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(_Cursor(file, content), size)


def _read(cursor: _Cursor, size: int) -> GgufHeader:
    file = cursor.file
    cursor.skip(4, "the first word")
    version, n_tensors, n_fields = cursor.numbers("IQQ", "its head")
    if version & 0xFFFF == 0:
        raise UsageError(f"{file}: is big-endian; convert it with llama.cpp's gguf_convert_endian.py")
    if version not in _VERSIONS:
        raise UsageError(f"{file}: has version {version} of GGUF, and {_VERSIONS[0]} and {_VERSIONS[1]} are read")
    cursor.check_count(n_fields, _LEAST_FIELD, "entries of metadata")
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for number in range(n_fields):
        start = cursor.at
        key = cursor.text(f"key {number} of the metadata", _LONGEST_NAME)
        if key in metadata:
            raise cursor.damaged(f"{one_line(key, 60)} is in its metadata twice")
        (kind,) = cursor.numbers("I", one_line(key, 60))
        metadata[key] = cursor.value(kind, one_line(key, 60))
        spans[key] = start, cursor.at
    cursor.check_count(n_tensors, _LEAST_TENSOR, "tensors")
    described = list(_descriptions(cursor, n_tensors))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {one_line(alignment, 40)}, and must be a power of two")
    data = cursor.at + -cursor.at % alignment
    tensors: dict[str, StoredTensor] = {}
    expected = 0
    for name, kind, shape, offset, nbytes in described:
        if name in tensors:
            raise cursor.damaged(f"{name} is in it twice")
        if offset != expected:
            raise cursor.damaged(f"{name} begins at byte {offset:,} of the tensors, and not at {expected:,}")
        if data + offset + nbytes > size:
            raise cursor.damaged(
                f"{name} ends {data + offset + nbytes - size:,} bytes after the end of the file, which was cut short"
            )
        tensors[name] = StoredTensor(file, kind, shape, data + offset, nbytes)
        expected += nbytes + -nbytes % alignment
    return GgufHeader(file, metadata, spans, tensors)


def _descriptions(cursor: _Cursor, n: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
    """Read (name, type, shape, offset among the tensors, bytes) of each tensor."""
    import gguf

    for number in range(n):
        name = one_line(cursor.text(f"the name of tensor {number}", _LONGEST_NAME), 100)
        (n_dimensions,) = cursor.numbers("I", name)
        if n_dimensions > _MOST_DIMENSIONS:
            raise cursor.damaged(f"{name} has {n_dimensions:,} dimensions, and {_MOST_DIMENSIONS} at most are possible")
        shape = tuple(reversed(cursor.numbers(f"{n_dimensions}Q", name)))
        code, offset = cursor.numbers("IQ", name)
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError:
            raise UsageError(
                f"{cursor.file}: {name} is of type {code}, which gguf does not have: update gguf"
            ) from None
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if 0 in shape or (shape[-1] if shape else 1) % per_block:
            raise cursor.damaged(f"{name} of type {kind.name} has shape {list(shape)}, in rows of {per_block}")
        yield name, kind.name, shape, offset, math.prod(shape) // per_block * block_bytes
