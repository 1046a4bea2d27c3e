"""Files in a store, read in ranges through a bounded cache of blocks: ``data.cache_gb``.

A pointer stands for such a file on this machine, where a copy would be. It holds the facts about the file and its
first bytes, with the header that most formats have. Samples of token files come from all over a corpus, so that a whole
shard would be read for each: a block is a few samples long, and the blocks that a batch needs are asked for together.
Tables are read from their first row to their last, many blocks at a time.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from typing_extensions import TypedDict

from ..errors import RunError, UsageError
from ..schema import Count, SchemaError, Sha256, checked
from .block_cache import BlockCache
from .cache import REBUILD
from .remote import Found, Store

BLOCK_BYTES = 1 << 16
"""Bytes of a block: in a store a request takes as long as many kilobytes do."""

#: Bytes of neighbouring blocks that are one request at most.
_MOST_BYTES = 1 << 23
#: A read of more bytes passes by the cache: of whole files, to find their documents. Of tables, so many are read at a
#: time.
_WORTH_KEEPING = 1 << 22
#: Folders with pointers; elsewhere a file is read as it is, whatever it says. The cache stands beside the folder.
_FOLDER = re.compile(r"stored-[0-9a-f]{16}")
_BLOCKS = "stored-blocks"
_MAGIC = b"birthmark: stored elsewhere "
_MOST_FACTS = 1 << 14


class _Facts(TypedDict):
    url: str
    """URL that the config names, without credentials."""
    path: str
    """Path in the store."""
    bytes: Count
    identity: Sha256
    """Changes whenever the file in the store does."""
    sampled: Sha256
    """`digest_of_parts`."""
    timeout_s: float
    cache_bytes: Count


@dataclass(frozen=True, eq=False)
class StoredFile:
    """A file in a store."""

    url: str
    path: str
    n_bytes: int
    identity: str
    sampled: str
    head: bytes
    """Its first bytes, `BLOCK_BYTES` of them if it has as many."""
    timeout_s: float
    cache: Path
    """File of the bounded cache."""
    cache_bytes: int

    @classmethod
    def at(cls, pointer: Path) -> StoredFile | None:
        """Read a pointer; None for any other file.

        Raises:
            RunError: the pointer is damaged.
        """
        folder = next((parent for parent in pointer.parents if _FOLDER.fullmatch(parent.name)), None)
        if folder is None or not pointer.is_file():
            return None
        with pointer.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return None
            line, head = file.readline(_MOST_FACTS), file.read(BLOCK_BYTES)
        try:
            facts: _Facts = checked(json.loads(line), _Facts)
        except (ValueError, SchemaError) as error:
            raise RunError(f"{pointer}: damaged ({error}); {REBUILD}") from None
        of_file = (facts["url"], facts["path"], facts["bytes"], facts["identity"], facts["sampled"], head)
        return cls(*of_file, facts["timeout_s"], folder.parent / _BLOCKS, facts["cache_bytes"])

    def write(self, pointer: Path) -> None:
        """Write the pointer to this file."""
        facts: _Facts = {
            "url": self.url,
            "path": self.path,
            "bytes": self.n_bytes,
            "identity": self.identity,
            "sampled": self.sampled,
            "timeout_s": self.timeout_s,
            "cache_bytes": self.cache_bytes,
        }
        pointer.write_bytes(_MAGIC + json.dumps(facts).encode() + b"\n" + self.head)

    def key(self, block: int) -> bytes:
        """Return the key of a block in the cache."""
        return hashlib.blake2b(f"{self.identity} {BLOCK_BYTES} {block}".encode(), digest_size=16).digest()


def point_to(store: Store, found: Found, identity: str, cache_bytes: int, pointer: Path) -> None:
    """Write the pointer to a file of a store, whose first bytes and `parts_of` are read.

    Raises:
        UsageError: the store does not say the file's size, or reads no ranges.
        RunError: the store does not answer, or fails.
    """
    n_bytes = found.facts.get("size")
    if n_bytes is None:
        raise UsageError(
            f"{store.field}: {found.path}: its server does not say how long it is; leave out data.cache_gb"
        )
    parts = [(0, min(n_bytes, BLOCK_BYTES)), *parts_of(n_bytes)] if n_bytes else []
    head, *sampled = store.ranges([(found.path, *part, n_bytes) for part in parts]) or [b""]
    digest = digest_of_parts(n_bytes, sampled)
    StoredFile(
        url=store.url,
        path=found.path,
        cache=pointer.parent,
        n_bytes=n_bytes,
        identity=identity,
        sampled=digest,
        head=head,
        timeout_s=store.timeout_s,
        cache_bytes=cache_bytes,
    ).write(pointer)


# ---------------------------------------------------------------- the content of a file, on this machine or in a store

#: A file's content is identified by this many parts of it, evenly over the whole, of so many bytes.
_PARTS, _PART_BYTES = 16, 1 << 16


def parts_of(n_bytes: int) -> list[tuple[int, int]]:
    """Return the first byte, and one past the last, of the parts that identify a file of so many bytes."""
    starts = [max(0, n_bytes - _PART_BYTES) * part // (_PARTS - 1) for part in range(_PARTS)]
    return [(start, min(n_bytes, start + _PART_BYTES)) for start in starts]


def digest_of_parts(n_bytes: int, parts: Sequence[bytes]) -> str:
    """Compute the SHA-256, in hex, of a file's size and its `parts_of`."""
    total = hashlib.sha256(str(n_bytes).encode())
    for part in parts:
        total.update(part)
    return total.hexdigest()


def sampled_digest(path: Path) -> str:
    """Compute `digest_of_parts` of a file, or read it from a pointer."""
    if (stored := StoredFile.at(path)) is not None:
        return stored.sampled
    size, parts = path.stat().st_size, []
    with path.open("rb") as file:
        for start, end in parts_of(size):
            file.seek(start)
            parts.append(file.read(end - start))
    return digest_of_parts(size, parts)


def file_bytes(path: Path) -> int:
    """Return the size of a file, or of that which a pointer stands for."""
    stored = StoredFile.at(path)
    return path.stat().st_size if stored is None else stored.n_bytes


def open_file(path: Path) -> BinaryIO:
    """Open a file, or that which a pointer stands for, to read."""
    stored = StoredFile.at(path)
    return path.open("rb") if stored is None else io.BufferedReader(_Reader(stored), BLOCK_BYTES)


def open_table(stored: StoredFile) -> BinaryIO:
    """Open a stored file to read all of it, in large parts that stay in the cache."""
    return io.BufferedReader(_Reader(stored, _WORTH_KEEPING), _WORTH_KEEPING)


class _Reader(io.RawIOBase):
    """Stored file that gives at most ``at_once`` bytes at a time, if that is given."""

    def __init__(self, stored: StoredFile, at_once: int | None = None) -> None:
        self._stored, self._at, self._at_once = stored, 0, at_once

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stored.n_bytes}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stored, start = self._stored, self._at
        end = min(start + min(len(buffer), self._at_once or len(buffer)), stored.n_bytes)
        if start >= end:
            return 0
        content = stored.head[start:end] if end <= len(stored.head) else read_together([(stored, start, end)])[0]
        buffer[: len(content)] = content
        self._at = end
        return len(content)


# ---------------------------------------------------------------- tokens in stores


class StoredArray:
    """The tokens of a stored file, of which any run can be read."""

    def __init__(self, stored: StoredFile, dtype: str, offset: int, n_tokens: int) -> None:
        self.stored, self.dtype, self.offset, self.n_tokens = stored, np.dtype(dtype), offset, n_tokens

    def __len__(self) -> int:
        return self.n_tokens

    def place(self, start: int, n: int) -> tuple[StoredFile, int, int]:
        """Return the file, the first byte of ``n`` tokens from ``start`` on, and one past their last."""
        first = self.offset + start * self.dtype.itemsize
        return self.stored, first, first + n * self.dtype.itemsize

    def __getitem__(self, tokens: slice) -> np.ndarray:
        start, end, _ = tokens.indices(self.n_tokens)
        (content,) = read_together([self.place(start, max(0, end - start))])
        return np.frombuffer(content, self.dtype)


def map_tokens(path: Path, dtype: str, n_tokens: int, offset: int = 0) -> np.ndarray | StoredArray:
    """Map a file's tokens into memory, or say where in a store they are; ``[n_tokens]``."""
    if not n_tokens:  # numpy refuses to map nothing
        return np.empty(0, dtype=dtype)
    if (stored := StoredFile.at(path)) is not None:
        return StoredArray(stored, dtype, offset, n_tokens)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(n_tokens,)))


def read_together(places: Sequence[tuple[StoredFile, int, int]]) -> list[bytes]:
    """Read ranges of stored files: the file, the first byte, one past the last.

    What the cache does not have is asked of the stores together.

    Raises:
        UsageError, RunError: see `Store.ranges`; or the disk of the cache is full.
    """
    blocks: dict[tuple[StoredFile, int], bytes] = {}
    missing: list[tuple[StoredFile, int, int]] = []
    for stored, start, end in places:
        if end - start > _WORTH_KEEPING:
            continue
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if (stored, block) in blocks:
                continue
            found = _cache(stored.cache, stored.cache_bytes).get(stored.key(block))
            blocks[stored, block] = found or b""
            if found:
                continue
            if missing and missing[-1][0] is stored and missing[-1][2] == block and _fits(missing[-1]):
                missing[-1] = (stored, missing[-1][1], block + 1)
            else:
                missing.append((stored, block, block + 1))
    asked = [(one, at * BLOCK_BYTES, min(end * BLOCK_BYTES, one.n_bytes)) for one, at, end in missing]
    for (stored, first, end), content in zip(missing, _asked(asked), strict=True):
        for block in range(first, end):
            at = (block - first) * BLOCK_BYTES
            blocks[stored, block] = content[at : at + BLOCK_BYTES]
            _cache(stored.cache, stored.cache_bytes).put(stored.key(block), blocks[stored, block])
    return [
        _whole(stored, start, end) if end - start > _WORTH_KEEPING else _cut(blocks, stored, start, end)
        for stored, start, end in places
    ]


def _fits(run: tuple[StoredFile, int, int]) -> bool:
    return (run[2] - run[1] + 1) * BLOCK_BYTES <= _MOST_BYTES


def _cut(blocks: dict[tuple[StoredFile, int], bytes], stored: StoredFile, start: int, end: int) -> bytes:
    first = start // BLOCK_BYTES
    content = b"".join(blocks[stored, block] for block in range(first, -(-end // BLOCK_BYTES)))
    return content[start - first * BLOCK_BYTES : end - first * BLOCK_BYTES]


def _whole(stored: StoredFile, start: int, end: int) -> bytes:
    parts = [(stored, at, min(end, at + _MOST_BYTES)) for at in range(start, end, _MOST_BYTES)]
    return b"".join(_asked(parts))


def _asked(places: Sequence[tuple[StoredFile, int, int]]) -> list[bytes]:
    """Ask the stores for ranges, each store once."""
    found: dict[int, bytes] = {}
    for url, timeout_s in dict.fromkeys((stored.url, stored.timeout_s) for stored, _, _ in places):
        mine = [number for number, (stored, _, _) in enumerate(places) if stored.url == url]
        parts = [(places[number][0].path, *places[number][1:], places[number][0].n_bytes) for number in mine]
        found |= dict(zip(mine, _store(url, timeout_s).ranges(parts), strict=True))
    return [found[number] for number in range(len(places))]


@lru_cache(maxsize=64)
def _store(url: str, timeout_s: float) -> Store:
    return Store(url, timeout_s, insists=True)


@lru_cache(maxsize=4)
def _cache(path: Path, n_bytes: int) -> BlockCache:
    return BlockCache(path, n_bytes, BLOCK_BYTES)
