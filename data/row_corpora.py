"""Corpora whose documents are rows: local tabular files and datasets of the Hugging Face hub, through ``datasets``.

Only data is read: no loading script is run and nothing is unpickled. A row's key is its content, so that equal rows
fall into one split and the order of rows does not matter to it. Rows that are null or empty are left out and counted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import RunError, UsageError
from ..files import file_sha256, one_line, user_path
from ..schema import Sha256
from .cache import Meta, build_once, files_sha256, fingerprint
from .config import DataConfig
from .encode import Document, Encoded, encode_documents
from .splits import key_digest, key_hash, split_single_document, validation_mask
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    import datasets

_ROWS_PER_BATCH = 256
#: Bytes of the longest row of a file of lines: readers hold several times as much.
_MOST_LINE = 1 << 27
_READERS = {".parquet": "parquet", ".arrow": "arrow", ".json": "json", ".jsonl": "json", ".csv": "csv"}


class _Rows(NamedTuple):
    hashes: np.ndarray
    """uint64 ``[rows]``, of the contents."""
    n_bytes: np.ndarray
    """int64 ``[rows]``, UTF-8; 0: the row is left out."""
    content_hash: str


class _RowMeta(Meta):
    content_hash: Sha256


class _RowCorpus:
    """What local and hub tables share; subclasses load the table and say what identifies it."""

    kind: str

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._cache_dir = user_path(config.cache_dir)

    def _load(self) -> datasets.Dataset:
        raise NotImplementedError

    def _identity(self) -> str:
        """A hash that changes whenever any row may have changed."""
        raise NotImplementedError

    @cached_property
    def _dataset(self) -> datasets.Dataset:
        """The table's text column alone."""
        table = self._load()
        column = self._config.text_field
        if column not in table.column_names:
            raise UsageError(
                f"data.text_field: no column {column!r} in {self._config.path!r}; its columns are "
                f"{', '.join(map(repr, table.column_names)) or 'none'}"
            )
        kind = str(getattr(table.features[column], "dtype", table.features[column]))
        if kind not in ("string", "large_string"):
            raise UsageError(f"data.text_field: column {column!r} holds {kind}, not text; name another column")
        return table.select_columns([column])

    @cached_property
    def _rows(self) -> _Rows:
        folder = self._cache_dir / f"rows-{fingerprint(identity=self._identity(), format=1)[:16]}"
        meta = build_once(folder, self._survey, schema=_RowMeta)
        return _Rows(np.load(folder / "hashes.npy"), np.load(folder / "n_bytes.npy"), meta["content_hash"])

    def _survey(self, folder: Path) -> dict[str, Any]:
        total = hashlib.sha256()
        hashes, sizes = [], []
        for text in self._texts():
            content = (text or "").encode("utf-8")
            hashes.append(key_hash(content))
            sizes.append(len(content))
            total.update(hashlib.sha256(content).digest())
        np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64))
        np.save(folder / "n_bytes.npy", np.array(sizes, dtype=np.int64))
        files = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in folder.iterdir()}
        return {"content_hash": total.hexdigest(), "files": files}

    def _texts(self) -> Iterator[str | None]:
        first = 1
        for batch in self._dataset.with_format("arrow").iter(batch_size=_ROWS_PER_BATCH):
            column = batch[self._config.text_field]
            try:
                yield from column.to_pylist()
            except UnicodeDecodeError as error:
                row = first + next(i for i, value in enumerate(column) if not _is_utf8(value))
                raise UsageError(
                    f"data.path: row {row} of {self._config.path!r} is not UTF-8 ({error.reason}); mend the file, or "
                    "leave the row out"
                ) from None
            first += len(column)

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self._rows.n_bytes.sum())

    @property
    def skipped(self) -> dict[str, int]:
        """Rows left out: reason → number."""
        empty = int((self._rows.n_bytes == 0).sum())
        return {"empty": empty} if empty else {}

    @cached_property
    def _is_val(self) -> np.ndarray:
        """Bool ``[rows]``; rows that are left out say False."""
        used = self._rows.n_bytes > 0
        if not used.any():
            raise UsageError(
                f"data.path: column {self._config.text_field!r} of {self._config.path!r} holds no text in its "
                f"{len(used)} rows; give a corpus that does"
            )
        is_val = np.zeros(len(used), dtype=bool)
        is_val[used] = validation_mask(self._rows.hashes[used], self._config.val_fraction)
        return is_val

    def documents(self) -> Iterator[Document]:
        """All documents with their splits."""
        is_val = self._is_val
        single = int((self._rows.n_bytes > 0).sum()) == 1
        for text, val in zip(self._texts(), is_val.tolist(), strict=True):
            if text and single:
                yield from split_single_document(text, self._config.val_fraction)
            elif text:
                yield Document("val" if val else "train", text)

    def encoded(self, tokenizer: TextTokenizer, scratch: Path) -> Iterator[Encoded]:
        """All documents as token ids; large tables are encoded by ``data.n_workers`` processes."""
        workers = min(self._config.n_workers or os.cpu_count() or 1, len(self._is_val) // _ROWS_PER_BATCH)
        if workers < 2:
            # One process encodes with all its threads.
            yield from encode_documents(self.documents(), tokenizer)
            return
        import datasets

        column = self._config.text_field
        with _quiet_libraries():
            mapped = self._dataset.map(
                _encode_rows,
                batched=True,
                batch_size=_ROWS_PER_BATCH,
                num_proc=workers,
                remove_columns=[column],
                features=datasets.Features({"ids": datasets.Sequence(datasets.Value("uint32"))}),
                fn_kwargs={"column": column, "tokenizer": tokenizer},
                cache_file_name=str(scratch / "ids.arrow"),
                load_from_cache_file=False,
                new_fingerprint=tokenizer.sha256[:16],
            )
        row = 0
        for batch in mapped.with_format("arrow").iter(batch_size=_ROWS_PER_BATCH):
            for ids in batch["ids"]:
                if n_bytes := int(self._rows.n_bytes[row]):
                    yield Encoded("val" if self._is_val[row] else "train", ids.values.to_numpy(), n_bytes)
                row += 1


def _is_utf8(value: Any) -> bool:
    """Whether a string of an Arrow table is text; readers do not check it."""
    try:
        value.as_py()
    except UnicodeDecodeError:
        return False
    return True


def _encode_rows(batch: dict[str, list[str | None]], column: str, tokenizer: TextTokenizer) -> dict[str, Any]:
    documents = (Document("train", text or "") for text in batch[column])
    return {"ids": [encoded.ids for encoded in encode_documents(documents, tokenizer)]}


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
        return total.hexdigest()

    def content_hash(self) -> str:
        """SHA-256 over the column's name and (name, SHA-256 of the bytes) of every file; see `files_sha256`."""
        return self._content_hash

    def _identity(self) -> str:
        return self._content_hash

    def _load(self) -> datasets.Dataset:
        suffix = self._files[0].suffix.lower()
        if suffix in (".csv", ".jsonl"):
            for path in self._files:
                _check_lines(path)
        # An empty string is text, and "NA" is a word.
        options = {"keep_default_na": False} if suffix == ".csv" else {}
        return _load_dataset(
            self._config,
            _READERS[suffix],
            data_files=[str(path.resolve()) for path in self._files],
            # datasets distinguishes local files by their times; this hash does so by their bytes.
            cache_dir=str(self._cache_dir / f"datasets-{self._content_hash[:16]}"),
            **options,
        )


def _check_lines(path: Path) -> None:
    """UsageError if a line is so long that it can be no row."""
    longest = length = 0
    with path.open("rb") as file:
        while longest <= _MOST_LINE and (block := file.read(1 << 20)):
            # Lines within a block are shorter than it.
            *ended, rest = block.split(b"\n")
            longest = max(longest, length + len(ended[0] if ended else rest))
            length = len(rest) if ended else length + len(rest)
    if max(longest, length) > _MOST_LINE:
        raise UsageError(f"{path}: a line of more than {_MOST_LINE >> 20} MiB; give a file with one row a line")


class HubCorpus(_RowCorpus):
    """The ``train`` split of ``hf:NAME[:CONFIG]``, from the hub or from the local cache of ``datasets``."""

    kind = "hub"

    def _load(self) -> datasets.Dataset:
        _, name, *rest = str(self._config.path).split(":", 2)
        return _load_dataset(self._config, name, *rest)

    def _identity(self) -> str:
        # datasets' fingerprint holds the dataset's revision; the rows are hashed once for each.
        return fingerprint(dataset=self._dataset._fingerprint, column=self._config.text_field)

    def content_hash(self) -> str:
        """SHA-256 over the SHA-256 of every row in order; read once per revision and kept in the cache directory."""
        return self._rows.content_hash


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
        reason = "more memory than there is" if isinstance(causes[-1], MemoryError) else one_line(causes[-1])
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
    """No progress bars outside a terminal, no errors twice, and no threads of tokenizers in forked processes (they
    would hang)."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    watched = sys.stderr.isatty()
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    silenced = not watched and not datasets.are_progress_bars_disabled()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if silenced:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if silenced:
            datasets.enable_progress_bars()
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
