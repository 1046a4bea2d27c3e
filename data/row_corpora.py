"""Corpora whose documents are rows: local tabular files and datasets of the Hugging Face hub, through ``datasets``.

Only data is read: no loading script is run and nothing is unpickled. A row's key is its content, so that equal rows
fall into one split, whatever their order. Rows that are null or empty are left out and counted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

import numpy as np

from ..errors import RunError, UsageError
from ..files import reason_of, user_path
from ..schema import Sha256
from .building.workers import in_processes, n_cores
from .cache import Meta, build_once, facts_of_files, files_sha256, fingerprint
from .config import DataConfig
from .ingest.bad_rows import bad_rows, check_columns, check_first_row, check_lines, without_bad_rows
from .splits import key_digest
from .survey.documents import SurveyedCorpus
from .survey.table_rows import BLOCK_ROWS, RowPiece, Rows

if TYPE_CHECKING:
    import datasets

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
