"""A bounded cache of blocks of bytes in one file, which the processes of a node share without a lock.

fsspec's caches on a disk (``filecache``, ``blockcache``) keep all that was read, and its bounded ones are of one open
file in one process's memory. The file is divided into sets of `_WAYS` places or more, as a processor's cache is: the
hash of a block's key names its set, and of a full set the place that was used least recently is taken. A place has a
checksum of its key and content, so that one that two processes write at once, or that a power cut left half written,
is read as if the block were missing. The file's size is the bound: it never grows.

Whoever has the file open holds a shared lock of it. A process that asks for another size meanwhile takes the file as it
is: another in its place would leave the first to those that hold it, with all the room that it takes and no name.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import BinaryIO

import xxhash

from ..locks import hold_lock
from .cache import explained

#: Places of a set, at least. Sets fill unevenly: a corpus of three quarters of all places, read in order again and
#: again, would lose 35 % of its blocks with 4 places to a set, and loses 1.6 % with 64. A search takes 12 µs.
_WAYS = 64
#: Of the file: what it is, bytes of a block, sets, places of a set.
_START = struct.Struct("<16sQQQ")
_SIZED_FROM = 24  # behind the kind and the bytes of a block
_MAGIC = b"birthmark blocks"
_START_BYTES = 4096
#: Of a place: key, time of the last use in ns, bytes, checksum.
_PLACE = struct.Struct("<16sQQQ")
_USED_AT, _USED = 16, struct.Struct("<Q")


class BlockCache:
    """Blocks of at most ``block_bytes`` each, by keys of 16 bytes, in a file of at most ``n_bytes``.

    Args:
        path: the file; it keeps its size as long as anybody has it open.
        n_bytes: bound of the file's size.
        block_bytes: bytes of the largest block.
        field: field of the config that names the folder, for messages.

    Raises:
        UsageError: the folder cannot be written to.
        RunError: the disk is full; also when a block is put.
    """

    def __init__(self, path: Path, n_bytes: int, block_bytes: int, field: str = "data.cache_dir") -> None:
        self.path, self.block_bytes, self.field = path, block_bytes, field
        n_places = (n_bytes - _START_BYTES) // (_PLACE.size + block_bytes)
        if n_places < 1:
            raise ValueError(f"{n_bytes} bytes hold no block of {block_bytes}")
        n_sets = max(1, n_places // _WAYS)
        start = _START.pack(_MAGIC, block_bytes, n_sets, n_places // n_sets)
        with explained(path, field):
            path.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(path.with_name(f"{path.name}.lock")):
                self._file, start = _opened(path, start)
        _, _, self.n_sets, self.n_ways = _START.unpack(start)
        self._set_bytes = self.n_ways * _PLACE.size

    def _places_at(self, key: bytes) -> int:
        """Return where the places of the key's set begin."""
        number = int.from_bytes(key[:8], "little") % self.n_sets
        return _START_BYTES + number * self._set_bytes

    def _block_at(self, places: int, way: int) -> int:
        number = (places - _START_BYTES) // _PLACE.size + way
        return _START_BYTES + self.n_sets * self._set_bytes + number * self.block_bytes

    def _set(self, places: int) -> list[tuple[bytes, int, int, int]]:
        # Behind the end of the file, which grows as sets are used, all places are empty.
        found = os.pread(self._file.fileno(), self._set_bytes, places).ljust(self._set_bytes, b"\0")
        return list(_PLACE.iter_unpack(found))

    def get(self, key: bytes) -> bytes | None:
        """Return a block; None if it is not in the cache, or was damaged."""
        places = self._places_at(key)
        for way, (held, _, size, checksum) in enumerate(self._set(places)):
            if held == key and 0 < size <= self.block_bytes:
                content = os.pread(self._file.fileno(), size, self._block_at(places, way))
                if len(content) == size and _checksum(key, content) == checksum:
                    now = _USED.pack(time.time_ns())
                    with explained(self.path, self.field):
                        os.pwrite(self._file.fileno(), now, places + way * _PLACE.size + _USED_AT)
                    return content
        return None

    def put(self, key: bytes, content: bytes) -> None:
        """Keep a block of 1 to ``block_bytes`` bytes, in the place of the same key or of the one used least recently
        in its set.
        """
        places = self._places_at(key)
        found, now = self._set(places), time.time_ns()

        def rank(way: int) -> tuple[bool, int, int]:
            held, used_at, *_ = found[way]
            # Where the clock was set back, blocks of before would stay until it is there again, and one place would
            # take all others. Threads that fill an empty set at once begin at places of their own.
            return held != key, used_at if used_at <= now else 0, (way - key[8]) % self.n_ways

        way = min(range(self.n_ways), key=rank)
        place = _PLACE.pack(key, now, len(content), _checksum(key, content))
        with explained(self.path, self.field):
            # The place first: whoever puts another block meanwhile takes another place.
            os.pwrite(self._file.fileno(), place, places + way * _PLACE.size)
            os.pwrite(self._file.fileno(), content, self._block_at(places, way))


def _checksum(key: bytes, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(content, seed=int.from_bytes(key[8:], "little"))


def _opened(path: Path, start: bytes) -> tuple[BinaryIO, bytes]:
    """Open the file that begins with ``start``, or as another process has it open; make a new one of any other.

    Returns:
        The file, with a shared lock that ends with it, and its beginning.
    """
    import fcntl  # Windows has none

    if not path.is_file() or not _is_usable(path, start):
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(start)
        new.replace(path)
    file = path.open("r+b", buffering=0)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file, file.read(len(start))


def _is_usable(path: Path, start: bytes) -> bool:
    """Return True for a file that begins with ``start``, and for one of other size that somebody has open."""
    import fcntl

    with path.open("r+b", buffering=0) as file:
        found = file.read(len(start))
        if found == start or len(found) < len(start) or found[:_SIZED_FROM] != start[:_SIZED_FROM]:
            return found == start
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
