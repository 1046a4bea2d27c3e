"""litdata's optimized folders (Lightning, litgpt): ``index.json`` and chunks of one-dimensional tensors.

A chunk (`litdata/streaming/writer.py`, little-endian) is uint32 number of items N, uint32 ``[N + 1]`` byte offsets of
the items in the file, then the items. The index names each chunk's file, its items (``chunk_size``) and its tokens
(``dim``), and in ``config.data_format`` the dtype as a number: a key of `_TORCH_DTYPES_MAPPING` behind
``no_header_tensor:``, a key of `_NUMPY_DTYPES_MAPPING` behind ``no_header_numpy:``. An item is a document.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from ...errors import UsageError
from ...files import check_file, one_line, path_below, read_json
from ...schema import Count
from .layout import TokenFile, file_bytes, known_dtype

INDEX = "index.json"
_FORMATS = {
    f"no_header_tensor:{code}": dtype
    for code, dtype in {
        11: "uint8",
        13: "int16",
        14: "int16",
        15: "int32",
        16: "int32",
        17: "int64",
        18: "int64",
    }.items()
} | {
    f"no_header_numpy:{code}": dtype
    for code, dtype in {
        1: "int16",
        2: "int32",
        3: "int64",
        4: "uint8",
        5: "uint16",
        6: "uint32",
        7: "uint64",
    }.items()
}
_MEND = "; copy the folder again, or write it again with litdata.optimize"


class _Chunk(TypedDict):
    filename: str
    chunk_size: Count
    dim: Count | None


class _Config(TypedDict):
    data_format: list[str] | None
    compression: NotRequired[str | None]
    encryption: NotRequired[Any]


class _Index(TypedDict):
    chunks: list[_Chunk]
    config: _Config


def is_litdata(folder: Path) -> bool:
    """Return True if a folder has litdata's index with a chunk beside it."""
    return (folder / INDEX).is_file() and any(folder.glob("chunk-*.bin"))


def read_litdata(key: str, folder: Path, token_dtype: str) -> list[TokenFile]:
    """Read the tokens of all chunks, in the index's order.

    Raises:
        UsageError: the items are not tokens, are compressed or encrypted, or a chunk contradicts the index.
        RunError: the index is damaged.
    """
    index = folder / INDEX
    said: _Index = read_json(index, _Index, "copy the folder again")
    config = said["config"]
    for what in ("compression", "encryption"):
        if config.get(what):
            raise UsageError(f"{index}: its chunks have {what} {one_line(config.get(what), 40)!r}; write them without")
    formats = config["data_format"] or []
    if len(formats) != 1 or formats[0] not in _FORMATS:
        raise UsageError(
            f"{index}: its items are {one_line(', '.join(formats), 80) or 'nothing'}, not one flat tensor of whole "
            "numbers each; write tokens with litdata's TokensLoader"
        )
    dtype = known_dtype(index, _FORMATS[formats[0]], token_dtype)
    return [_chunk(key, folder, chunk, dtype) for chunk in said["chunks"]]


def _chunk(key: str, folder: Path, chunk: _Chunk, dtype: str) -> TokenFile:
    name, n_items, n_tokens = chunk["filename"], chunk["chunk_size"], chunk["dim"]
    path = path_below(folder, name, lambda why: UsageError(f"{folder / INDEX}: damaged (chunk {why}){_MEND}"))
    if n_tokens is None:
        raise UsageError(f"{folder / INDEX}: chunk {name} does not say how many tokens it has (dim){_MEND}")
    check_file(path, fail=UsageError)
    offset, itemsize = 4 * (n_items + 2), np.dtype(dtype).itemsize
    if file_bytes(path) != offset + n_tokens * itemsize:
        raise UsageError(
            f"{path}: cut short: {n_items} items of {n_tokens} tokens take {offset + n_tokens * itemsize} bytes, it "
            f"has {file_bytes(path)}{_MEND}"
        )
    ends = partial(_item_ends, path, n_items, itemsize, n_tokens)
    whole_key = f"{key}/{name}" if key else name
    return TokenFile(whole_key, path, dtype, n_tokens, offset, document_ends=ends, others=(folder / INDEX,))


def _item_ends(path: Path, n_items: int, itemsize: int, n_tokens: int) -> np.ndarray:
    """Read the ends of items from a chunk's table of offsets."""
    table = np.fromfile(path, dtype="<u4", count=n_items + 2).astype(np.int64)
    first = 4 * (n_items + 2)
    offsets = table[1:]
    if int(table[0]) != n_items or int(offsets[0]) != first or (np.diff(offsets) < 0).any():
        raise UsageError(f"{path}: damaged (its table of {n_items} items contradicts itself){_MEND}")
    ends, left = np.divmod(offsets[1:] - first, itemsize)
    if left.any() or (n_items and int(ends[-1]) != n_tokens):
        raise UsageError(f"{path}: damaged (its items do not end at its {n_tokens} tokens){_MEND}")
    return ends
