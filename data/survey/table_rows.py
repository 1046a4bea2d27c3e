"""Rows of a table's text column, in bulk: their hashes and sizes, and their texts.

Arrow's buffers are read in place. The only Python call per row is the hash function, which has no bulk form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import UsageError
from ..encode import SPLITS, Document, Text
from ..splits import OUT, WITHIN, split_single_document, text_hashes

if TYPE_CHECKING:
    import datasets

_MOST_ROWS = 1 << 16
#: Bytes of text that are taken out of a table together; one row may be longer.
_MOST_BYTES = 1 << 23
#: Bytes of a row on average, below which a copy is made sooner than a view: Python has pools for objects of such sizes.
_SHORT = 480
#: So many copies at a time stay in cache.
_MOST_COPIES = 1 << 11
#: Rows that are hashed together where all rows are.
BLOCK_ROWS = 1 << 10


class RowFacts(NamedTuple):
    """Facts about rows, without their texts."""

    hashes: np.ndarray
    """uint64 ``[rows]``, `text_hash` of each."""
    n_bytes: np.ndarray
    """int64 ``[rows]``, UTF-8; null has none."""
    sha256: bytes
    """Digests of every `BLOCK_ROWS` rows, in order; empty if not requested."""


class Rows(NamedTuple):
    """Rows ``first`` to ``end`` of a table, in a form that can be sent to another process."""

    table: datasets.Dataset
    """Table reduced to its text column."""
    first: int
    end: int
    name: str
    """Name of the table, for messages."""

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of the first row, and the rows as an Arrow array of strings, nulls as empty ones."""
        view = self.table.with_format("arrow")
        for at in range(self.first, self.end, _MOST_ROWS):
            for column in view[at : min(self.end, at + _MOST_ROWS)].column(0).chunks:
                filled = column.fill_null("") if column.null_count else column
                if not len(filled):
                    continue
                borders = _buffers(filled)[1]
                ends = borders[1:] - borders[0]
                group = (ends - 1) // _MOST_BYTES
                for first, last in pairwise([0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(ends)]):
                    yield at + first, filled.slice(first, last - first)
                at += len(ends)

    def facts(self, *, with_sha256: bool) -> RowFacts:
        """Compute hashes and sizes.

        Args:
            with_sha256: hash blocks of rows too; the first row begins one.

        Raises:
            UsageError: a row is not UTF-8; names it.
        """
        import pyarrow as pa

        sizes, hashes, blocks = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], BlockHasher()
        for at, column in self.batches():
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                raise self._not_text(at, column) from None
            content, borders = _buffers(column)
            sizes.append(np.diff(borders).astype(np.int64))
            hashes.append(text_hashes(_contents(column, content, borders)))
            if with_sha256:
                blocks.update(content, borders)
        sha256 = blocks.digests() if with_sha256 else b""
        return RowFacts(np.concatenate(hashes), np.concatenate(sizes), sha256)

    def texts(self) -> Iterator[str]:
        """Yield the text of each row."""
        for _, column in self.batches():
            yield from column.to_pylist()

    def _not_text(self, at: int, column: Any) -> UsageError:
        for row, value in enumerate(column, start=at + 1):
            try:
                value.as_py()
            except UnicodeDecodeError as error:
                return UsageError(
                    f"data.path: row {row} of {self.name} is not UTF-8 ({error.reason}); mend the file, or leave the "
                    "row out"
                )
        return UsageError(f"data.path: rows {at + 1} to {at + len(column)} of {self.name} are damaged; mend the file")


class RowPiece(NamedTuple):
    """Consecutive rows with the code of each row's use."""

    rows: Rows
    codes: np.ndarray
    val_fraction: float

    def documents(self) -> Iterator[Text]:
        """Yield the documents that are not left out, with their splits."""
        for text, code in zip(self.rows.texts(), self.codes.tolist(), strict=True):
            if code == WITHIN:
                yield from split_single_document(text, self.val_fraction)
            elif code != OUT:
                yield Document(SPLITS[code], text)


class BlockHasher:
    """Hasher of every `BLOCK_ROWS` rows by SHA-256, for input in any portions.

    That of a block is over the SHA-256 of its bytes and that of its rows' sizes (int64, little-endian).
    """

    def __init__(self) -> None:
        self._done = b""
        self._begin()

    def _begin(self) -> None:
        self._n_rows, self._content, self._sizes = 0, hashlib.sha256(), hashlib.sha256()

    def _end(self) -> None:
        self._done += hashlib.sha256(self._content.digest() + self._sizes.digest()).digest()
        self._begin()

    def update(self, content: memoryview, borders: np.ndarray) -> None:
        """Add rows: see `_buffers`."""
        first, n_rows = 0, len(borders) - 1
        while first < n_rows:
            end = min(n_rows, first + BLOCK_ROWS - self._n_rows)
            self._content.update(content[borders[first] : borders[end]])
            self._sizes.update(np.diff(borders[first : end + 1]).astype("<i8").tobytes())
            self._n_rows += end - first
            first = end
            if self._n_rows == BLOCK_ROWS:
                self._end()

    def digests(self) -> bytes:
        """Return the digests of all rows so far; the last block may be shorter."""
        if self._n_rows:
            self._end()
        return self._done


def _contents(column: Any, content: memoryview, borders: np.ndarray) -> Iterable[bytes | memoryview]:
    """Yield the bytes of each row of an Arrow array with these buffers."""
    import pyarrow as pa

    if borders[-1] - borders[0] < _SHORT * len(column):
        wide = pa.types.is_large_string(column.type)
        whole = column.cast(pa.large_binary() if wide else pa.binary())
        starts = range(0, len(whole), _MOST_COPIES)
        return chain.from_iterable(whole.slice(start, _MOST_COPIES).to_pylist() for start in starts)
    return (content[first:end] for first, end in pairwise(borders.tolist()))


def _buffers(column: Any) -> tuple[memoryview, np.ndarray]:
    """Return the bytes of an Arrow array of strings without nulls, and the borders of its rows in them: ``[rows
    + 1]``.
    """
    import pyarrow as pa

    _, borders, content = column.buffers()
    dtype = np.dtype(np.int64 if pa.types.is_large_string(column.type) else np.int32)
    n_borders = len(column) + 1
    # Arrow keeps no bytes where all rows are empty.
    view = memoryview(b"" if content is None else content)
    return view, np.frombuffer(borders, dtype, n_borders, column.offset * dtype.itemsize)
