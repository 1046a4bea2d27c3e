"""Rows of a table's text column, in bulk: their hashes and sizes, and their texts.

Arrow's buffers are read where they lie. What is done for each row in Python is the call of the hash function, which has
no other form.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import UsageError
from ..encode import SPLITS, Document, Text
from ..splits import OUT, WITHIN, key_hasher, split_single_document

if TYPE_CHECKING:
    import datasets

_MOST_ROWS = 1 << 14
#: Bytes of text that are taken out of a table together; one row may be longer.
_MOST_BYTES = 1 << 23
_DIGEST = methodcaller("digest")


class RowFacts(NamedTuple):
    """What is known of rows without keeping their texts."""

    hashes: np.ndarray
    """uint64 ``[rows]``, `key_hash` of the contents."""
    n_bytes: np.ndarray
    """int64 ``[rows]``, UTF-8; null has none."""
    sha256: bytes
    """Of each row, one after the other; empty where it was not asked for."""


class Rows(NamedTuple):
    """Rows ``first`` to ``end`` of a table; another process can be sent them."""

    table: datasets.Dataset
    """Its text column alone."""
    first: int
    end: int
    name: str
    """Of the table, for messages."""

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Number of the first row, and the rows as an Arrow array of strings, nulls as empty ones."""
        view = self.table.with_format("arrow")
        for at in range(self.first, self.end, _MOST_ROWS):
            for column in view[at : min(self.end, at + _MOST_ROWS)].column(0).chunks:
                filled = column.fill_null("") if column.null_count else column
                if not len(filled):
                    continue
                ends = np.cumsum(_lengths(filled))
                group = (ends - 1) // _MOST_BYTES
                for first, last in pairwise([0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(ends)]):
                    yield at + first, filled.slice(first, last - first)
                at += len(ends)

    def facts(self, *, with_sha256: bool) -> RowFacts:
        """Hashes and sizes.

        Raises:
            UsageError: a row is no UTF-8; names it.
        """
        import pyarrow as pa

        n_bytes: list[np.ndarray] = []
        keys: list[bytes] = []
        sha256: list[bytes] = []
        for at, column in self.batches():
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                raise self._not_text(at, column) from None
            contents = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
            texts = contents.to_pylist()
            n_bytes.append(_lengths(column))
            keys += _key_digests(texts)
            if with_sha256:
                sha256 += map(_DIGEST, map(hashlib.sha256, texts))
        sizes = np.concatenate([np.empty(0, np.int64), *n_bytes])
        return RowFacts(np.frombuffer(b"".join(keys), dtype="<u8"), sizes, b"".join(sha256))

    def texts(self) -> Iterator[str]:
        """Text of each row."""
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
    """Consecutive rows and what becomes of each."""

    rows: Rows
    codes: np.ndarray
    val_fraction: float

    def documents(self) -> Iterator[Text]:
        """Those that are not left out, with their splits."""
        for text, code in zip(self.rows.texts(), self.codes.tolist(), strict=True):
            if code == WITHIN:
                yield from split_single_document(text, self.val_fraction)
            elif code != OUT:
                yield Document(SPLITS[code], text)


def _key_digests(contents: list[bytes]) -> Iterator[bytes]:
    # A copy costs half of what a new hasher with its parameters does.
    another = key_hasher().copy
    for content in contents:
        hasher = another()
        hasher.update(content)
        yield hasher.digest()


def _lengths(column: Any) -> np.ndarray:
    import pyarrow.compute as pc

    return pc.binary_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
