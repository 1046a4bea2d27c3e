"""The formats of token files, and the one that a path is of: raw, llm.c, Megatron-LM, litdata, MDS, datatrove."""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from ..errors import UsageError
from ..files import check_file, path_below, read_json
from ..messages import one_line
from ..schema import Count
from .encode import Split
from .stored_files import StoredArray, file_bytes, map_tokens, open_file
from .suffixes import TABLE_SUFFIXES, TEXT_SUFFIXES, TOKEN_FILES, TokenFiles, described_by, token_suffixes
from .text_files import walk

#: Types of stored tokens, by their names in ``data.token_dtype``: little-endian numpy dtypes.
DTYPES = {
    "uint8": "<u1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
}


@dataclass(frozen=True)
class TokenFile:
    """Location and layout of a file's tokens."""

    key: str
    """Path below the named folder; decides the splits of its documents."""

    path: Path
    dtype: str
    """A value of `DTYPES`."""

    n_tokens: int
    offset: int = 0
    """Bytes before the first token."""

    document_ends: Callable[[], np.ndarray] | None = None
    """Ends of documents, if the format has them: int64 ``[documents]``, ascending, the last is ``n_tokens``."""

    split: Split | None = None
    """The split that the whole file belongs to; None: its documents have one each."""

    others: tuple[Path, ...] = ()
    """Files that describe this one."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files that the tokens depend on."""
        return (self.path, *self.others)

    def tokens(self) -> np.ndarray | StoredArray:
        """Map the tokens into memory, or say where in a store they are; ``[n_tokens]``."""
        return map_tokens(self.path, self.dtype, self.n_tokens, self.offset)

    def of(self, split: Split) -> TokenFile:
        """Return the same file, all of one split."""
        return replace(self, split=split)


def dtype_or_refusal(path: Path, dtype: str | None, given: str) -> str:
    """Return the numpy dtype of a file's tokens, from the file (None: it does not say) and ``data.token_dtype``.

    Raises:
        UsageError: neither gives it, or they contradict each other.
    """
    if dtype is None and not given:
        raise UsageError(
            f"data.token_dtype: {path} does not say how its tokens are stored; give uint16 (nanoGPT, most vocabularies "
            "below 65536) or what it was written with"
        )
    if dtype is not None and given and given != dtype:
        raise UsageError(f"data.token_dtype: {given} is given, but {path} says {dtype}; leave the field out")
    return DTYPES[dtype or given]


# ---------------------------------------------------------------- files of bare tokens
# NanoGPT's ``.bin`` and the ``.npy`` of OLMo and Dolma, which have no header.
#
# nanoGPT: `data/openwebtext/prepare.py` writes uint16, each document followed by its end-of-text token. OLMo-core:
# `olmo_core.data` maps its ``.npy`` files as plain arrays of the dtype that its config names (uint16, uint32);
# documents end with the tokenizer's EOS. A ``.npy`` that numpy itself wrote has a header, which is read.

_NUMPY_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 16


def is_numpy(path: Path) -> bool:
    """Return True if numpy wrote this file, with its header."""
    with open_file(path) as file:
        return file.read(len(_NUMPY_MAGIC)) == _NUMPY_MAGIC


def read_raw(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read a file without a header.

    Raises:
        UsageError: ``token_dtype`` is missing, or the file ends within a token.
    """
    dtype = dtype_or_refusal(path, None, token_dtype)
    size = np.dtype(dtype).itemsize
    if left := file_bytes(path) % size:
        raise UsageError(f"{path}: cut short, or no {token_dtype}: {left} bytes are left behind its last token")
    return [TokenFile(key, path, dtype, file_bytes(path) // size)]


def read_numpy(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read a file that ``numpy.save`` wrote; layout: numpy's NEP 1.

    Raises:
        UsageError: the file is not a flat array of whole numbers, or is cut short.
    """
    with open_file(path) as file:
        start = file.read(12)
        wide = len(start) > 6 and start[6] >= 2
        length = struct.unpack("<I" if wide else "<H", start[8 : 12 if wide else 10].ljust(4 if wide else 2, b"\0"))[0]
        offset = (12 if wide else 10) + length
        file.seek(offset - length)
        header = file.read(min(length, _MOST_HEADER))
    try:
        said = ast.literal_eval(header.decode("latin-1").strip())
        dtype, shape = np.dtype(said["descr"]), tuple(said["shape"])
    except (SyntaxError, ValueError, KeyError, TypeError, MemoryError, RecursionError):
        raise UsageError(f"{path}: damaged (its numpy header cannot be read); write it again") from None
    if len(shape) != 1 or dtype.name not in DTYPES or dtype.str not in (DTYPES[dtype.name], "|u1"):
        raise UsageError(
            f"{path}: holds {dtype.str} in {len(shape)} dimensions, not a flat array of whole numbers; write it again"
        )
    (n_tokens,) = shape
    if type(n_tokens) is not int or not 0 <= n_tokens < 1 << 62:
        raise UsageError(f"{path}: damaged (the length in its numpy header is no number of tokens); write it again")
    if file_bytes(path) != offset + n_tokens * dtype.itemsize:
        raise UsageError(f"{path}: cut short: its header promises {n_tokens} tokens; copy it again")
    return [TokenFile(key, path, dtype_or_refusal(path, dtype.name, token_dtype), n_tokens, offset)]


# ---------------------------------------------------------------- llm.c
# llm.c's ``.bin``: a header of 256 int32 (magic, version, number of tokens), then the tokens.
#
# `dev/data/data_common.py` of karpathy/llm.c writes two kinds: GPT-2 (uint16) and Llama 3 (uint32). The count is an
# int32, so a file holds fewer than 2³¹ tokens. The end-of-text token comes *before* each document there.

_HEADER_BYTES = 256 * 4
#: Magic number → version and dtype.
_KINDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}


def _header(path: Path) -> tuple[int, int, int]:
    with open_file(path) as file:
        return struct.unpack("<3i", file.read(12).ljust(12, b"\0"))


def is_llm_c(path: Path) -> bool:
    """Return True if a file begins with one of llm.c's magic numbers."""
    return _header(path)[0] in _KINDS


def read_llm_c(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read the tokens behind the header.

    Raises:
        UsageError: another version, or more or fewer tokens than the header says.
    """
    magic, version, n_tokens = _header(path)
    known, dtype = _KINDS[magic]
    if version != known:
        raise UsageError(f"{path}: is of version {version} of llm.c's format, and version {known} is known; rewrite it")
    stored = dtype_or_refusal(path, dtype, token_dtype)
    size = file_bytes(path) - _HEADER_BYTES
    if n_tokens < 0 or size != n_tokens * np.dtype(stored).itemsize:
        raise UsageError(
            f"{path}: cut short: {n_tokens} tokens are promised, {max(0, size)} bytes follow; copy it again"
        )
    return [TokenFile(key, path, stored, n_tokens, _HEADER_BYTES)]


# ---------------------------------------------------------------- Megatron-LM's indexed datasets
# ``NAME.bin`` with the tokens, ``NAME.idx`` with sequences and documents.
#
# Layout of the index (`megatron/core/datasets/indexed_dataset.py`, little-endian): the 9 bytes ``MMIDIDX\0\0``,
# uint64 version 1, uint8 code of the dtype, uint64 sequences S, uint64 entries D of the list of documents; then int32
# ``[S]`` lengths, int64 ``[S]`` byte offsets into the ``.bin``, int64 ``[D]`` numbers of the sequences at which
# documents begin (the last entry is S), and for multimodal sets int8 ``[S]`` modes.

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
    dtype = dtype_or_refusal(index, _CODES[code], token_dtype)
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


# ---------------------------------------------------------------- litdata
# litdata's optimized folders (Lightning, litgpt): ``index.json`` and chunks of one-dimensional tensors.
#
# A chunk (`litdata/streaming/writer.py`, little-endian) is uint32 number of items N, uint32 ``[N + 1]`` byte offsets
# of the items in the file, then the items. The index names each chunk's file, its items (``chunk_size``) and its
# tokens (``dim``), and in ``config.data_format`` the dtype as a number: a key of `_TORCH_DTYPES_MAPPING` behind
# ``no_header_tensor:``, a key of `_NUMPY_DTYPES_MAPPING` behind ``no_header_numpy:``. An item is a document.

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
_LITDATA_MEND = "; copy the folder again, or write it again with litdata.optimize"


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
    dtype = dtype_or_refusal(index, _FORMATS[formats[0]], token_dtype)
    return [_chunk(key, folder, chunk, dtype) for chunk in said["chunks"]]


def _chunk(key: str, folder: Path, chunk: _Chunk, dtype: str) -> TokenFile:
    name, n_items, n_tokens = chunk["filename"], chunk["chunk_size"], chunk["dim"]
    path = path_below(folder, name, lambda why: UsageError(f"{folder / INDEX}: damaged (chunk {why}){_LITDATA_MEND}"))
    if n_tokens is None:
        raise UsageError(f"{folder / INDEX}: chunk {name} does not say how many tokens it has (dim){_LITDATA_MEND}")
    check_file(path, fail=UsageError)
    offset, itemsize = 4 * (n_items + 2), np.dtype(dtype).itemsize
    if file_bytes(path) != offset + n_tokens * itemsize:
        raise UsageError(
            f"{path}: cut short: {n_items} items of {n_tokens} tokens take {offset + n_tokens * itemsize} bytes, it "
            f"has {file_bytes(path)}{_LITDATA_MEND}"
        )
    ends = partial(_item_ends, path, n_items, itemsize, n_tokens)
    whole_key = f"{key}/{name}" if key else name
    return TokenFile(whole_key, path, dtype, n_tokens, offset, document_ends=ends, others=(folder / INDEX,))


def _item_ends(path: Path, n_items: int, itemsize: int, n_tokens: int) -> np.ndarray:
    """Read the ends of items from a chunk's table of offsets."""
    with open_file(path) as file:
        table = np.frombuffer(file.read(4 * (n_items + 2)), dtype="<u4").astype(np.int64)
    first = 4 * (n_items + 2)
    offsets = table[1:]
    if int(table[0]) != n_items or int(offsets[0]) != first or (np.diff(offsets) < 0).any():
        raise UsageError(f"{path}: damaged (its table of {n_items} items contradicts itself){_LITDATA_MEND}")
    ends, left = np.divmod(offsets[1:] - first, itemsize)
    if left.any() or (n_items and int(ends[-1]) != n_tokens):
        raise UsageError(f"{path}: damaged (its items do not end at its {n_tokens} tokens){_LITDATA_MEND}")
    return ends


# ---------------------------------------------------------------- MDS
# MosaicML's sets (mosaicml-streaming): ``index.json`` and shards of samples.
#
# A shard (`streaming/base/format/mds/writer.py`, little-endian) is uint32 number of samples N, uint32 ``[N + 1]`` byte
# offsets of the samples in the file, the columns as JSON, then the samples. A sample of one column of a fixed size,
# ``ndarray:uint16:2048``, is its values alone, so that the samples of a shard are one array; any other has its length
# before it. A sample is a document.

_MDS_LENGTH = re.compile(r"[1-9][0-9]{0,17}")
_MDS_MEND = "; write its tokens again with columns={'tokens': 'ndarray:uint16:N'} (or uint32), N tokens a sample"


class _MdsFile(TypedDict):
    basename: str
    bytes: Count


class _MdsShard(TypedDict):
    format: str
    samples: Count
    column_names: list[str]
    column_encodings: list[str]
    raw_data: _MdsFile
    compression: NotRequired[str | None]


class _MdsIndex(TypedDict):
    shards: list[_MdsShard]


def is_mds(folder: Path) -> bool:
    """Return True if a folder has the index of a MosaicML set with shards of MDS."""
    index = folder / INDEX
    if not index.is_file():
        return False
    with index.open("rb") as file:
        start = file.read(1 << 16)
    return b'"shards"' in start and b'"mds"' in start


def read_mds(key: str, folder: Path, token_dtype: str) -> list[TokenFile]:
    """Read the tokens of all shards, in the index's order.

    Raises:
        UsageError: samples are not tokens of a fixed number, are compressed, or a shard contradicts the index.
        RunError: the index is damaged.
    """
    index = folder / INDEX
    said: _MdsIndex = read_json(index, _MdsIndex, "copy the folder again")
    files = []
    for shard in said["shards"]:
        columns = dict(zip(shard["column_names"], shard["column_encodings"], strict=False))
        listed = one_line(", ".join(f"{name} ({kind})" for name, kind in columns.items()), 80) or "none"
        if len(columns) != 1 or len(shard["column_names"]) != len(shard["column_encodings"]):
            raise UsageError(f"{index}: an MDS set with the columns {listed}, not one of tokens{_MDS_MEND}")
        kind = next(iter(columns.values())).split(":")
        if len(kind) != 3 or kind[0] != "ndarray" or kind[1] not in DTYPES or not _MDS_LENGTH.fullmatch(kind[2]):
            raise UsageError(
                f"{index}: an MDS set whose column {listed} has samples of no fixed number of tokens{_MDS_MEND}"
            )
        dtype, length = dtype_or_refusal(index, kind[1], token_dtype), int(kind[2])
        name, n = shard["raw_data"]["basename"], shard["samples"]
        path = path_below(folder, name, lambda why: UsageError(f"{index}: damaged (shard {why}); copy the set again"))
        if shard.get("compression") and not path.is_file():
            raise UsageError(f"{index}: its shards have compression {shard['compression']!r}; decompress them first")
        check_file(path, fail=UsageError)
        size = length * np.dtype(dtype).itemsize
        offset = shard["raw_data"]["bytes"] - n * size
        fits = file_bytes(path) == shard["raw_data"]["bytes"] and offset >= 4 * (n + 2)
        with open_file(path) as file:
            table = np.frombuffer(file.read(4 * (n + 2)), dtype="<u4") if fits else None
        if table is None or not np.array_equal(table, [n, *range(offset, offset + n * size + 1, size)]):
            raise UsageError(f"{path}: cut short or damaged: it is not {n} samples of {length} tokens; copy it again")
        ends = partial(_equal_ends, n, length)
        whole_key = f"{key}/{name}" if key else name
        files.append(TokenFile(whole_key, path, dtype, n * length, offset, document_ends=ends, others=(index,)))
    return files


def _equal_ends(n: int, length: int) -> np.ndarray:
    return np.arange(1, n + 1, dtype=np.int64) * length


# ---------------------------------------------------------------- datatrove
# datatrove's ``.ds``: bare tokens of 2 or 4 bytes; ``.ds.index`` with the ends of documents; ``.ds.metadata``.
#
# `datatrove/pipeline/tokens/tokenizer.py`, little-endian: the index is uint64 ``[documents]``, in tokens. The metadata,
# which only some writers leave, begin with the line TOKENIZER|BYTES OF A TOKEN.

_DS_MEND = "; copy it again, or write it again with datatrove's DocumentTokenizer"


def read_datatrove(key: str, path: Path, token_dtype: str) -> list[TokenFile]:
    """Read the tokens of a ``.ds`` with their documents.

    Raises:
        UsageError: nothing says the size of a token, or the index contradicts the file.
    """
    index, metadata = (path.with_name(f"{path.name}.{what}") for what in ("index", "metadata"))
    dtype = None
    if metadata.is_file():
        with metadata.open("rb") as file:
            said = file.readline(1 << 16).rstrip(b"\r\n").rpartition(b"|")[2]
        dtype = {b"2": "uint16", b"4": "uint32"}.get(said)
        if dtype is None:
            raise UsageError(f"{metadata}: damaged (its first line does not end with |2 or |4){_DS_MEND}")
    stored = dtype_or_refusal(path, dtype, token_dtype)
    n_tokens, left = divmod(file_bytes(path), np.dtype(stored).itemsize)
    if left:
        raise UsageError(f"{path}: cut short: {left} bytes are left behind its last token{_DS_MEND}")
    if not index.is_file():
        return [TokenFile(key, path, stored, n_tokens)]
    if file_bytes(index) % 8:
        raise UsageError(f"{index}: cut short: {file_bytes(index)} bytes are no ends of documents{_DS_MEND}")
    ends = partial(_ends_of_index, index, n_tokens)
    return [TokenFile(key, path, stored, n_tokens, document_ends=ends, others=(index,))]


def _ends_of_index(index: Path, n_tokens: int) -> np.ndarray:
    """Read the ends of documents from datatrove's index."""
    ends = np.fromfile(index, dtype="<u8").astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any() or (int(ends[-1]) if len(ends) else 0) != n_tokens:
        raise UsageError(f"{index}: lies: its documents do not ascend to the {n_tokens} tokens of the file{_DS_MEND}")
    return ends


# ---------------------------------------------------------------- the table of formats
# Table of the formats of token files, and the detection of a path's format.


@dataclass(frozen=True)
class TokenFormat:
    """Recognition and reading of one kind of token files."""

    name: str
    """Its name in `birthmark.data.suffixes.TOKEN_FILES`, which has its suffixes."""

    recognises: Callable[[Path], bool]
    read: Callable[[str, Path, str], list[TokenFile]]
    """Function that reads the files, from a key, the path and ``data.token_dtype``."""

    @property
    def files(self) -> TokenFiles:
        """Suffixes of its files."""
        return TOKEN_FILES[self.name]

    def may_read(self, path: Path) -> bool:
        """Return True if a path is of this format: a folder of its files, or such a file."""
        is_kind = path.is_dir() if self.files.is_folder else path.suffix.lower() in self.files.tokens
        return is_kind and self.recognises(path)


#: The first that recognises a path reads it: the last with a suffix takes every file that has it.
FORMATS = (
    TokenFormat("litdata", is_litdata, read_litdata),
    TokenFormat("MDS", is_mds, read_mds),
    TokenFormat("Megatron-LM", is_megatron, read_megatron),
    TokenFormat("llm.c", is_llm_c, read_llm_c),
    TokenFormat("numpy", is_numpy, read_numpy),
    TokenFormat("datatrove", lambda path: True, read_datatrove),
    TokenFormat("raw", lambda path: True, read_raw),
)


def _of_folder(folder: Path) -> TokenFormat | None:
    """Return the format that a folder as a whole is of."""
    return next((kind for kind in FORMATS if kind.files.is_folder and kind.may_read(folder)), None)


def holds_tokens(path: Path) -> bool:
    """Return True if a named path holds tokens: a token file, a folder of a format, or token files and no text.

    Raises:
        UsageError: its folders are sets of a format.
    """
    if not path.is_dir():
        return path.suffix.lower() in token_suffixes()
    if _of_folder(path) is not None:
        return True
    for part in sorted(part for part in path.iterdir() if part.is_dir()):
        if (kind := _of_folder(part)) is not None:
            sets = ", ".join(sorted(one.name for one in path.iterdir() if one.is_dir() and kind.recognises(one)))
            raise UsageError(
                f"{path}: holds the {kind.name} sets {sets}; name one as data.path, as {part}, and another as "
                "data.val_path"
            )
    found = walk(path).keys()
    return bool(found & {*token_suffixes()}) and not found & {*TEXT_SUFFIXES, *TABLE_SUFFIXES}


def find_token_files(path: Path, token_dtype: str, field: str = "data.path") -> tuple[str, list[TokenFile]]:
    """Find the format and the files of a named path: a file, or a folder of files in the order of their paths.

    Args:
        path: the file or the folder.
        token_dtype: ``data.token_dtype``.
        field: field of the config that names the path.

    Raises:
        UsageError: no file of tokens, files of several formats, or one that is damaged.
    """
    if (whole := _of_folder(path)) is not None:
        return whole.name, whole.read("", path, token_dtype)
    named = [(path.name, path)] if path.suffix.lower() in token_suffixes() else []
    if path.is_dir():
        found = walk(path)
        suffixes = {suffix for kind in FORMATS if not kind.files.is_folder for suffix in kind.files.tokens}
        named = sorted((file.key, file.path) for suffix in suffixes for file in found.get(suffix, ()))
    files: dict[str, list[TokenFile]] = {}
    for key, file in named:
        # An index stands for the file that it describes.
        file = next((file.with_suffix(suffix) for suffix in described_by(file.suffix.lower())), file)
        kind = next(one for one in FORMATS if not one.files.is_folder and one.may_read(file))
        files.setdefault(kind.name, []).extend(kind.read(key, file, token_dtype))
    if not files:
        raise UsageError(f"{field}: {str(path)!r} holds no {'/'.join(token_suffixes())} files; name some")
    if len(files) > 1:
        raise UsageError(f"{field}: {str(path)!r} holds token files of {' and '.join(files)}; name those of one kind")
    return next(iter(files.items()))
