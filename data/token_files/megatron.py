"""Megatron-LM's indexed datasets: ``NAME.bin`` with the tokens, ``NAME.idx`` with sequences and documents.

Layout of the index (`megatron/core/datasets/indexed_dataset.py`, little-endian): the 9 bytes ``MMIDIDX\\0\\0``, uint64
version 1, uint8 code of the dtype, uint64 sequences S, uint64 entries D of the list of documents; then int32 ``[S]``
lengths, int64 ``[S]`` byte offsets into the ``.bin``, int64 ``[D]`` numbers of the sequences at which documents begin
(the last entry is S), and for multimodal sets int8 ``[S]`` modes.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import numpy as np

from ...errors import UsageError
from .layout import TokenFile, file_bytes, known_dtype

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
#: The codes of whole numbers; 6 and 7 are floats.
_CODES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_MEND = "; make the index again, or copy both files again"


def is_megatron(path: Path) -> bool:
    """Return True if an index exists beside a ``.bin``."""
    return path.with_suffix(".idx").is_file()


def read_megatron(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read the tokens of a ``.bin`` with their documents.

    Raises:
        UsageError: the index contradicts itself or the ``.bin``.
    """
    index = path.with_suffix(".idx")
    if not path.is_file():
        raise UsageError(f"{path}: missing beside {index.name}; copy it there")
    with index.open("rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size or not start.startswith(_MAGIC):
        raise UsageError(f"{index}: is no index of Megatron-LM (it does not begin with MMIDIDX){_MEND}")
    _, version, code, n_sequences, n_entries = _HEADER.unpack(start)
    if version != 1:
        raise UsageError(f"{index}: is of version {version} of Megatron's index, and version 1 is known")
    if code not in _CODES:
        raise UsageError(f"{index}: damaged (dtype code {code} is none of whole numbers){_MEND}")
    expected = _HEADER.size + 12 * n_sequences + 8 * n_entries
    if file_bytes(index) not in (expected, expected + n_sequences):
        raise UsageError(
            f"{index}: damaged ({n_sequences} sequences and {n_entries} document entries take {expected} bytes, it has "
            f"{file_bytes(index)}){_MEND}"
        )
    dtype = known_dtype(index, _CODES[code], token_dtype)
    n_tokens, left = divmod(file_bytes(path), np.dtype(dtype).itemsize)
    if left:
        raise UsageError(f"{path}: cut short: {left} bytes are left behind its last token{_MEND}")
    ends = partial(_document_ends, index, n_sequences, n_entries, np.dtype(dtype).itemsize, n_tokens)
    return [TokenFile(key, path, dtype, n_tokens, document_ends=ends, others=(index,))]


def _document_ends(index: Path, n_sequences: int, n_entries: int, itemsize: int, n_tokens: int) -> np.ndarray:
    """Read the ends of documents from an index that is checked whole."""
    at = _HEADER.size

    def part(dtype: str, n: int) -> np.ndarray:
        nonlocal at
        if not n:  # numpy refuses to map nothing
            return np.empty(0, dtype=dtype)
        found = np.memmap(index, dtype=dtype, mode="r", offset=at, shape=(n,))
        at += found.nbytes
        return np.asarray(found)

    lengths, pointers, entries = part("<i4", n_sequences), part("<i8", n_sequences), part("<i8", n_entries)
    if (lengths < 0).any():
        raise UsageError(f"{index}: damaged (sequence {int((lengths < 0).argmax())} has a negative length){_MEND}")
    ends = np.cumsum(lengths, dtype=np.int64)
    wrong = pointers != (ends - lengths) * itemsize
    if wrong.any():
        at_fault = int(wrong.argmax())
        raise UsageError(
            f"{index}: lies: sequence {at_fault} begins at byte {int(pointers[at_fault])} by its pointer and at "
            f"{int(ends[at_fault] - lengths[at_fault]) * itemsize} by the lengths before it{_MEND}"
        )
    total = int(ends[-1]) if n_sequences else 0
    if total != n_tokens:
        raise UsageError(
            f"{index}: lies: it has {total} tokens, {index.with_suffix('.bin').name} has {n_tokens}{_MEND}"
        )
    if n_entries and not (entries[0] == 0 and entries[-1] == n_sequences and (np.diff(entries) >= 0).all()):
        raise UsageError(
            f"{index}: damaged (documents do not begin at sequence 0, ascend and end at {n_sequences}){_MEND}"
        )
    return ends[entries[1:][entries[1:] > 0] - 1] if n_entries > 1 else ends
