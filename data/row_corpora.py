"""Corpora whose documents are rows: local tabular files and datasets of the Hugging Face hub, through ``datasets``."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired

import numpy as np
from typing_extensions import override

from ..errors import RunError, UsageError
from ..messages import reason_of
from ..schema import Sha256
from .bad_rows import MEND, bad_rows, check_columns, check_first_row, check_lines, without_bad_rows
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


#: Size of a row that is bad.
_BAD = -1


class RowFacts(NamedTuple):
    """Facts about rows, without their texts."""

    hashes: np.ndarray
    """uint64 ``[rows]``, `text_hash` of each."""
    n_bytes: np.ndarray
    """int64 ``[rows]``; null has none, a row that is not UTF-8 -1."""
    sha256: bytes
    """Digests of every `BLOCK_ROWS` rows, in order; empty if not requested."""


class Rows(NamedTuple):
    """Rows ``first`` to ``end`` of a table, in a form that can be sent to another process."""

    table: datasets.Dataset
    """Table reduced to its text column."""
    first: int
    end: int

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of the first row, and the rows as an Arrow array of bytes, nulls as empty ones."""
        import pyarrow as pa

        view = self.table.with_format("arrow")
        for at in range(self.first, self.end, _MOST_ROWS):
            for column in view[at : min(self.end, at + _MOST_ROWS)].column(0).chunks:
                as_bytes = column.cast(pa.large_binary())
                filled = as_bytes.fill_null(b"") if column.null_count else as_bytes
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
        """
        sizes, hashes, blocks = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], BlockHasher()
        for _, column in self.batches():
            content, borders = _buffers(column)
            sizes.append(np.diff(borders).astype(np.int64))
            hashes.append(text_hashes(_contents(column, content, borders)))
            if with_sha256:
                blocks.update(content, borders)
            if _decoded(column) is None:
                sizes[-1][[_reason(row) != "" for row in column.to_pylist()]] = _BAD
        sha256 = blocks.digests() if with_sha256 else b""
        return RowFacts(np.concatenate(hashes), np.concatenate(sizes), sha256)

    def texts(self) -> Iterator[str]:
        """Yield the text of each row; that of a bad one is of no use."""
        for _, column in self.batches():
            texts = _decoded(column)
            if texts is None:
                yield from (row.decode(errors="replace") for row in column.to_pylist())
            else:
                yield from texts.to_pylist()

    def why_bad(self) -> str:
        """Say why the first row is bad, "" if it is not."""
        return next((_reason(column[0].as_py()) for _, column in self.batches()), "")


def _decoded(column: Any) -> Any:
    """Return an Arrow array of bytes as one of strings; None if one is not UTF-8."""
    import pyarrow as pa

    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        return None


def _reason(row: bytes) -> str:
    try:
        row.decode()
    except UnicodeDecodeError as error:
        return error.reason
    return ""


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
    if borders[-1] - borders[0] < _SHORT * len(column):
        starts = range(0, len(column), _MOST_COPIES)
        return chain.from_iterable(column.slice(start, _MOST_COPIES).to_pylist() for start in starts)
    return (content[first:end] for first, end in pairwise(borders.tolist()))


def _buffers(column: Any) -> tuple[memoryview, np.ndarray]:
    """Return the content of an Arrow array of large binaries without nulls, and the borders of its rows in it:
    ``[rows + 1]``.
    """
    _, borders, content = column.buffers()
    # Arrow keeps no bytes where all rows are empty.
    view = memoryview(b"" if content is None else content)
    return view, np.frombuffer(borders, np.int64, len(column) + 1, column.offset * 8)


# ---------------------------------------------------------------- corpora whose documents are rows
# Local tabular files and datasets of the Hugging Face hub, through ``datasets``.
#
# Only data is read: no loading script is run and nothing is unpickled. A row's key is its content, so that equal rows
# fall into one split, whatever their order. Rows that are null or empty are left out and counted.

#: Bytes of text that a process surveys before it reports.
_SPAN_BYTES = 1 << 26


class _RowMeta(Meta):
    content_hash: NotRequired[Sha256]


class _RowCorpus(SurveyedCorpus):
    """Base of local and hub tables; subclasses load the table and identify it."""

    split_rule = "text-xxh3, equal texts together"
    #: True if the survey hashes all rows together too.
    hashes_rows = False

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config.val_fraction)
        self._config = config
        self._cache_dir = config.cache_folder

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
        """Folder of hashes and sizes, and the hash of all rows; empty if it is not needed.

        Raises:
            UsageError: more rows are bad than ``data.max_bad_rows``; names the first one too many.
        """
        folder = self._cache_dir / f"rows-{fingerprint(identity=self._identity(), format=4)[:16]}"
        meta = build_once(folder, self._survey, schema=_RowMeta)
        bad = np.flatnonzero(np.load(folder / "n_bytes.npy") == _BAD).tolist()
        if len(bad) > (most := self._most_not_utf8()):
            self._refuse(bad[most])
        return folder, meta.get("content_hash", "")

    def _most_not_utf8(self) -> int:
        return self._config.max_bad_rows

    def _refuse(self, row: int) -> None:
        """Raise UsageError for a bad row."""
        why = self._span(row, row + 1).why_bad()
        raise UsageError(f"data.path: row {row + 1} of {self._config.path!r} is not UTF-8 ({why}); {MEND}")

    @cached_property
    def keys(self) -> np.ndarray:
        """See the base: the texts' own hashes."""
        return np.load(self._survey_folder[0] / "hashes.npy")

    @property
    @override
    def contents(self) -> np.ndarray:
        return self.keys

    @cached_property
    def _signed_sizes(self) -> np.ndarray:
        return np.load(self._survey_folder[0] / "n_bytes.npy")

    @property
    @override
    def sizes(self) -> np.ndarray:
        return self._signed_sizes.clip(0)

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
        return Rows(self._dataset, first, end)

    @override
    def piece(self, first: int, codes: np.ndarray) -> RowPiece:
        return RowPiece(self._span(first, first + len(codes)), codes, self._val_fraction)

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the rows left out: reason → number."""
        counts = {"empty": (self._signed_sizes == 0).sum(), "bad": (self._signed_sizes == _BAD).sum()}
        return {reason: int(count) for reason, count in counts.items() if count}

    @override
    def check_any(self) -> None:
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
            self._name_bad_row()
            raise

    def _name_bad_row(self) -> None:
        for path in self._usable:
            bad_rows(path, self._config.text_field, 0)

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
                check_first_row(path)
        if importlib.util.find_spec("datasets") is not None:  # else the reading says so
            check_columns(self._files, column)
        return self._without_bad_rows("checksum")[0]

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the rows left out: reason → number."""
        counts = super().skipped_in_survey()
        n_bad = self._n_bad + counts.get("bad", 0)
        return counts | ({"bad": n_bad} if n_bad else {})

    def _most_not_utf8(self) -> int:
        return self._config.max_bad_rows - self._n_bad

    def _refuse(self, row: int) -> None:
        self._name_bad_row()
        super()._refuse(row)

    def _read(self, files: Sequence[Path]) -> datasets.Dataset:
        def read() -> datasets.Dataset:
            from .text_columns import column_of_files

            builder = column_of_files(
                [str(path.resolve()) for path in files],
                self._suffix,
                self._config.text_field,
                # datasets distinguishes local files by their times; this hash does so by their bytes.
                cache_dir=str(self._cache_dir / f"datasets-{self._content_hash[:16]}"),
            )
            builder.download_and_prepare()
            return builder.as_dataset(split="train")

        return _loaded(self._config, read)


def check_text_column(features: Mapping[str, Any], config: DataConfig) -> None:
    """Raise UsageError if a table with these columns has no text column of the name ``data.text_field``."""
    column = config.text_field
    if column not in features:
        raise UsageError(
            f"data.text_field: no column {column!r} in {config.path!r}; its columns are "
            f"{', '.join(map(repr, features)) or 'none'}"
        )
    kind = str(getattr(features[column], "dtype", features[column]))
    if kind not in ("string", "large_string", "binary", "large_binary"):
        raise UsageError(f"data.text_field: column {column!r} holds {kind}, not text; name another column")


class HubCorpus(_RowCorpus):
    """The ``train`` split of ``hf:NAME[:CONFIG]``, from the hub or from the local cache of ``datasets``."""

    kind = "hub"
    hashes_rows = True

    def _load(self) -> datasets.Dataset:
        _, *name = str(self._config.path).split(":", 2)

        def read() -> datasets.Dataset:
            import datasets

            return datasets.load_dataset(*name, split="train")

        def read_column() -> datasets.Dataset:
            from .text_columns import column_of_set

            builder = column_of_set(name, self._config.text_field)
            builder.download_and_prepare()
            return builder.as_dataset(split="train")

        try:
            return _loaded(self._config, read)
        except UsageError as error:
            from datasets.exceptions import DatasetGenerationError

            # It cannot give every column the type that it has in the first file, or reads no .zst.
            if not isinstance(error.__cause__, DatasetGenerationError | ValueError):
                raise
        return _loaded(self._config, read_column)

    def _identity(self) -> str:
        # datasets' fingerprint holds the dataset's revision; the rows are hashed once for each.
        return fingerprint(dataset=self._dataset._fingerprint, column=self._config.text_field)

    def content_hash(self) -> str:
        """Return the SHA-256 over those of all blocks of rows (`BlockHasher`), read once per revision and kept in the
        cache.
        """
        return self._survey_folder[1]


def _loaded(config: DataConfig, read: Callable[[], datasets.Dataset]) -> datasets.Dataset:
    if importlib.util.find_spec("datasets") is None:
        raise UsageError(f"data.path: {config.path!r} needs the datasets library; pip install datasets")
    try:
        with _quiet_libraries():
            return read()
    except Exception as error:  # many libraries speak here, without a common base class
        causes = _causes(error)
        if isinstance(causes[-1], UsageError | RunError):
            raise causes[-1] from None
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
