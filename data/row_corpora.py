"""Corpora whose documents are rows: local tabular files and datasets of the Hugging Face hub, through ``datasets``."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired

import numpy as np

from ..errors import RunError, UsageError
from ..files import reason_of, user_path
from ..schema import Sha256
from .bad_rows import bad_rows, check_columns, check_first_row, check_lines, without_bad_rows
from .cache import Meta, build_once, facts_of_files, files_sha256, fingerprint
from .config import DataConfig
from .documents import OUT, WITHIN, SurveyedCorpus, key_digest, split_single_document, text_hashes
from .encode import SPLITS, Document, Text
from .workers import in_processes, n_cores

if TYPE_CHECKING:
    import datasets


# ---------------------------------------------------------------- rows of a table's text column, in bulk
# Their hashes and sizes, and their texts.
#
# Arrow's buffers are read in place. The only Python call per row is the hash function, which has no bulk form.

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


# ---------------------------------------------------------------- corpora whose documents are rows
# Local tabular files and datasets of the Hugging Face hub, through ``datasets``.
#
# Only data is read: no loading script is run and nothing is unpickled. A row's key is its content, so that equal rows
# fall into one split, whatever their order. Rows that are null or empty are left out and counted.

#: Bytes of text that a process surveys before it reports.
_SPAN_BYTES = 1 << 26
#: Builders of ``datasets`` by kind of file, and their options. In a .csv an empty string is text, and "NA" a word.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),
}


class _RowMeta(Meta):
    content_hash: NotRequired[Sha256]


class _RowCorpus(SurveyedCorpus):
    """Base of local and hub tables; subclasses load the table and identify it."""

    own_splits = "text-xxh3"
    #: True if the survey hashes all rows together too.
    hashes_rows = False

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config.val_fraction)
        self._config = config
        self._cache_dir = user_path(config.cache_dir)

    def _load(self) -> datasets.Dataset:
        raise NotImplementedError

    def _identity(self) -> str:
        """Return a hash that changes whenever any row may have changed."""
        raise NotImplementedError

    @cached_property
    def _dataset(self) -> datasets.Dataset:
        """The table's text column alone."""
        table = self._load()
        check_text_column(table.features, self._config)
        return table.select_columns([self._config.text_field])

    @cached_property
    def _survey_folder(self) -> tuple[Path, str]:
        """Folder of hashes and sizes, and the hash of all rows; empty if it is not needed."""
        folder = self._cache_dir / f"rows-{fingerprint(identity=self._identity(), format=3)[:16]}"
        meta = build_once(folder, self._survey, schema=_RowMeta)
        return folder, meta.get("content_hash", "")

    @cached_property
    def keys(self) -> np.ndarray:
        """See the base: the texts' own hashes."""
        return np.load(self._survey_folder[0] / "hashes.npy")

    @property
    def contents(self) -> np.ndarray:
        """See the base."""
        return self.keys

    @cached_property
    def sizes(self) -> np.ndarray:
        """See the base."""
        return np.load(self._survey_folder[0] / "n_bytes.npy")

    def _survey(self, folder: Path) -> dict[str, Any]:
        """Hash every row, in a number of processes that suits the table's size."""
        n_rows = len(self._dataset)
        # Rows that are hashed by blocks are shared out by blocks.
        together = BLOCK_ROWS if self.hashes_rows else 1
        per_span = max(1, int(n_rows * _SPAN_BYTES / max(1, self._dataset.data.nbytes)) // together) * together
        spans = [self._span(first, min(n_rows, first + per_span)) for first in range(0, n_rows, per_span)]
        workers = self._config.n_workers or n_cores()
        survey = partial(Rows.facts, with_sha256=self.hashes_rows)
        found = dict(in_processes(survey, spans, workers))
        facts = [found[number] for number in range(len(spans))]
        np.save(folder / "hashes.npy", np.concatenate([np.empty(0, np.uint64), *(one.hashes for one in facts)]))
        np.save(folder / "n_bytes.npy", np.concatenate([np.empty(0, np.int64), *(one.n_bytes for one in facts)]))
        files = facts_of_files(folder)
        if not self.hashes_rows:
            return {"files": files}
        total = hashlib.sha256()
        for one in facts:
            total.update(one.sha256)
        return {"content_hash": total.hexdigest(), "files": files}

    def _span(self, first: int, end: int) -> Rows:
        return Rows(self._dataset, first, end, repr(self._config.path))

    def piece(self, first: int, codes: np.ndarray) -> RowPiece:
        """See the base."""
        return RowPiece(self._span(first, first + len(codes)), codes, self._val_fraction)

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the rows left out: reason → number."""
        empty = int((self.sizes == 0).sum())
        return {"empty": empty} if empty else {}

    def check_any(self) -> None:
        """See the base."""
        if not self.sizes.any():
            raise UsageError(
                f"data.path: column {self._config.text_field!r} of {self._config.path!r} holds no text in its "
                f"{len(self.sizes)} rows; give a corpus that does"
            )


class TableCorpus(_RowCorpus):
    """Rows of local .parquet, .arrow, .json, .jsonl or .csv files of one kind, file after file in the order given."""

    kind = "table"

    def __init__(self, config: DataConfig, files: Sequence[Path]) -> None:
        super().__init__(config)
        self._files = list(files)

    @cached_property
    def _content_hash(self) -> str:
        total = hashlib.sha256(key_digest(self._config.text_field))
        for path, sha256 in zip(self._files, files_sha256(self._files, self._cache_dir), strict=True):
            total.update(key_digest(path.name))
            total.update(bytes.fromhex(sha256))
        if self._n_bad:
            # The files and the column determine which rows these are.
            total.update(key_digest(f"without {self._n_bad} bad rows"))
        return total.hexdigest()

    def content_hash(self) -> str:
        """Compute the SHA-256 over the column's name and (name, SHA-256 of the bytes) of every file; see
        `files_sha256`.

        If bad rows are left out, their number is part of it.

        Raises:
            UsageError: more rows are bad than ``data.max_bad_rows``, so that no cached result is used.
        """
        return self._content_hash

    def _identity(self) -> str:
        return self._content_hash

    def _load(self) -> datasets.Dataset:
        files = self._usable
        with self._naming_bad_rows():
            return self._read(files)

    def _survey(self, folder: Path) -> dict[str, Any]:
        _ = self._usable  # what this refuses, it says itself
        with self._naming_bad_rows():
            return super()._survey(folder)

    @contextlib.contextmanager
    def _naming_bad_rows(self) -> Iterator[None]:
        """Name file and line of the first bad row if it makes a reader fail: readers name neither."""
        try:
            yield
        except UsageError:
            for path in self._usable:
                bad_rows(path, self._config.text_field, 0)
            raise

    @property
    def _suffix(self) -> str:
        return self._files[0].suffix.lower()

    def _without_bad_rows(self, verify: str) -> tuple[list[Path], int]:
        column, most = self._config.text_field, self._config.max_bad_rows
        return without_bad_rows(self._files, column, most, self._cache_dir, verify) if most else (self._files, 0)

    @cached_property
    def _n_bad(self) -> int:
        """Bad rows that are left out; without ``data.max_bad_rows`` none are, and the reader finds the first."""
        return self._without_bad_rows("size")[1]

    @cached_property
    def _usable(self) -> list[Path]:
        """Files without their bad rows, fit for the reader."""
        column = self._config.text_field
        if not self._config.max_bad_rows:
            for path in self._files:
                check_lines(path)
                check_first_row(path, column)
        if importlib.util.find_spec("datasets") is not None:  # else the reading says so
            check_columns(self._files, column)
        return self._without_bad_rows("checksum")[0]

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the rows left out: reason → number."""
        return super().skipped_in_survey() | ({"bad": self._n_bad} if self._n_bad else {})

    def _read(self, files: Sequence[Path]) -> datasets.Dataset:
        reader, options = READERS[self._suffix]
        return _load_dataset(
            self._config,
            reader,
            data_files=[str(path.resolve()) for path in files],
            # datasets distinguishes local files by their times; this hash does so by their bytes.
            cache_dir=str(self._cache_dir / f"datasets-{self._content_hash[:16]}"),
            **options,
        )


def check_text_column(features: Mapping[str, Any], config: DataConfig) -> None:
    """Raise UsageError if a table with these columns has no text column of the name ``data.text_field``."""
    column = config.text_field
    if column not in features:
        raise UsageError(
            f"data.text_field: no column {column!r} in {config.path!r}; its columns are "
            f"{', '.join(map(repr, features)) or 'none'}"
        )
    kind = str(getattr(features[column], "dtype", features[column]))
    if kind not in ("string", "large_string"):
        raise UsageError(f"data.text_field: column {column!r} holds {kind}, not text; name another column")


class HubCorpus(_RowCorpus):
    """The ``train`` split of ``hf:NAME[:CONFIG]``, from the hub or from the local cache of ``datasets``."""

    kind = "hub"
    hashes_rows = True

    def _load(self) -> datasets.Dataset:
        _, name, *rest = str(self._config.path).split(":", 2)
        return _load_dataset(self._config, name, *rest)

    def _identity(self) -> str:
        # datasets' fingerprint holds the dataset's revision; the rows are hashed once for each.
        return fingerprint(dataset=self._dataset._fingerprint, column=self._config.text_field)

    def content_hash(self) -> str:
        """Return the SHA-256 over those of all blocks of rows (`BlockHasher`), read once per revision and kept in the
        cache.
        """
        return self._survey_folder[1]


def _load_dataset(config: DataConfig, *args: str, **options: Any) -> datasets.Dataset:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"data.path: {config.path!r} needs the datasets library; pip install birthmark[datasets]"
        ) from error
    try:
        with _quiet_libraries():
            return datasets.load_dataset(*args, split="train", **options)
    except Exception as error:  # many libraries speak here, without a common base class
        causes = _causes(error)
        if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
            raise RunError(f"{config.path!r}: no room left to prepare it; free some disk space") from error
        # A damaged length asks for all the memory there is.
        said = reason_of(causes[-1])
        reason = "more memory than there is" if isinstance(causes[-1], MemoryError) else said
        raise UsageError(
            f"data.path: cannot load {config.path!r} ({reason}); check the name, the network and the file"
        ) from error


def _causes(error: BaseException) -> list[BaseException]:
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain


@contextlib.contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence progress bars outside a terminal, and errors that would appear twice."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    watched = sys.stderr.isatty()
    silenced = not watched and not datasets.are_progress_bars_disabled()
    if silenced:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if silenced:
            datasets.enable_progress_bars()
