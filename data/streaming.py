"""Streamed text: tables read from their first row to their last, windows of their tokens, and its validation."""

from __future__ import annotations

import importlib.util
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from typing_extensions import override

from ..errors import RunError, UsageError
from ..messages import reason_of
from ..schema import Count
from ..urls import credentials_of, hide_credentials, with_credentials
from .bad_rows import check_first_row
from .batch_sizes import BatchSizes
from .batches import ShardedTokens, permuted
from .cache import Meta, build_once, facts_of_files, fingerprint
from .config import DataConfig, is_remote
from .corpora import files_by_suffix
from .documents import below, text_hash
from .encode import Document, encode_documents
from .fetching import pointed_tables
from .mixture import SourceOrder
from .row_corpora import check_text_column
from .suffixes import TABLE_SUFFIXES, TEXT_SUFFIXES, corpus_suffix, token_suffixes
from .tokenizer import TextTokenizer


class ShuffledOrder(SourceOrder):
    """Another order whose samples are shuffled within each global batch.

    A stream owns a part of every batch. If the pattern of the sources repeated with the batch, each part would have the
    same sources at every step, and the files of some streams would never be read.

    Args:
        order: order that gives the sources of a batch.
        sizes: sizes of the global batches.
        data_seed: seed of the shuffling, which otherwise depends only on the step.
    """

    def __init__(self, order: SourceOrder, sizes: BatchSizes, data_seed: int) -> None:
        self.names, self.stages = order.names, order.stages
        self._sizes, self._data_seed = sizes, data_seed

    @override
    def places(self, samples_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        moved_N, left = np.empty_like(samples_N), np.unique(samples_N)
        while left.size:
            step = self._step(int(left[0]))
            first, size = self._sizes.before(step), self._sizes.size(step)
            inside_N = (samples_N >= first) & (samples_N < first + size)
            moved_N[inside_N] = first + permuted(samples_N[inside_N] - first, size, "sources", self._data_seed, step)
            left = left[left >= first + size]
        return super().places(moved_N)

    def _step(self, sample: int) -> int:
        """Return the number of steps before the one that trains on a sample."""
        # Every step has a sample or more.
        return bisect_right(range(sample + 1), sample, key=self._sizes.before) - 1


# ---------------------------------------------------------------- streamed table
# Rows of tables that are read in order, through ``datasets``, and not stored.
#
# Only single files are asked of ``datasets``, and rows are counted here. The library's shuffling loses the rows in
# its buffer when a run resumes (datasets#7901), and its states have skipped rows (#7538) and failed to advance
# (#8308).

#: Few, as each may be long.
_ROWS_PER_BATCH = 16


class StreamedTable:
    """The text column of a ``hf:`` set or of tabular files.

    Raises:
        UsageError: the path holds no set of tables, or cannot be opened.
    """

    def __init__(self, config: DataConfig) -> None:
        self.path, self._column = config.path, config.text_field
        dataset = self._open(config)
        if dataset.features is not None:  # the first file says what it has
            check_text_column(dataset.features, config)
        self._dataset = dataset.with_format("arrow")
        self.n_files: int = dataset.num_shards

    def _open(self, config: DataConfig) -> Any:
        if importlib.util.find_spec("datasets") is None:
            raise UsageError("data.stream: needs the datasets library; pip install datasets")
        import datasets

        from .text_columns import column_of_files, column_of_set

        # Its log lines about an unreadable file repeat the raised error. Threads read until the end.
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        suffix = ""
        if str(config.path).startswith("hf:"):
            make = partial(column_of_set, str(config.path).split(":", 2)[1:])
        else:
            suffix, files = _tables(config)
            make = partial(column_of_files, files, suffix)
        try:
            builder = make(self._column)
            self.files = [str(file) for file in builder.config.data_files["train"]]
            if config.cache_gb is not None and suffix:  # no set of the hub
                builder = column_of_files(self._pointers(config), suffix, self._column)
            return builder.as_streaming_dataset(split="train")
        except (UsageError, RunError):
            raise
        except Exception as error:  # many libraries speak here, without a common base class
            raise UsageError(
                f"data.path: cannot open {self.path!r} ({hide_credentials(reason_of(error))}); check the name, the "
                "network and the file"
            ) from error

    def _pointers(self, config: DataConfig) -> list[str]:
        """Return the files with pointers in place of URLs."""
        urls = [file for file in self.files if is_remote(file)]
        pointers = dict(zip(urls, map(str, pointed_tables(urls, config)), strict=True))
        return [pointers.get(file, file) for file in self.files]

    @property
    def file_names(self) -> list[str]:
        """Names of the files without credentials, fit to be shown."""
        return [hide_credentials(file) for file in self.files]

    def identity(self) -> str:
        """Hash the column's name and the names of all files.

        Sizes of local files count too; files of a hub have its revision in their names.
        """
        facts = [[Path(f).name, Path(f).stat().st_size] if Path(f).is_file() else [f] for f in self.file_names]
        return fingerprint(column=self._column, files=facts)

    def name(self, file: int) -> str:
        """Return the name of a file, for messages."""
        return self.file_names[file] if len(self.files) == self.n_files else f"{self.path!r}, file {file + 1}"

    def texts(self, file: int, first_row: int = 0) -> Iterator[str | None]:
        """Yield the texts of a file from a row on, in its order.

        Raises:
            RunError: a file cannot be read.
        """
        row = 0
        try:
            for table in self._dataset.shard(num_shards=self.n_files, index=file).iter(batch_size=_ROWS_PER_BATCH):
                if row + len(table) > first_row:
                    column = table[self._column].slice(max(0, first_row - row))
                    # A row that is not UTF-8 ends the stream.
                    yield from column.cast("large_string").to_pylist()
                row += len(table)
        except UsageError:
            raise
        except Exception as error:
            about = hide_credentials(reason_of(error))
            raise RunError(
                f"{self.name(file)}: column {self._column!r} cannot be read after row {row} ({about}); mend the file, "
                "or check data.text_field and the network, and go on with --resume"
            ) from error


def _tables(config: DataConfig) -> tuple[str, list[str]]:
    """Find the tabular files that ``data.path`` names, and the suffix of their kind; URLs may have wildcards.

    Raises:
        UsageError: there are none, or several kinds; or a local file does not begin like its kind.
    """
    remote = [entry for entry in config.entries if is_remote(entry)]
    local = files_by_suffix([entry for entry in config.entries if not is_remote(entry)])
    found = {suffix: [str(file.path.resolve()) for file in files] for suffix, files in local.items()}
    for url in remote:
        found.setdefault(corpus_suffix(url), []).append(with_credentials(url, credentials_of(url)))
    tables = [suffix for suffix in found if suffix in TABLE_SUFFIXES]
    if len(tables) != 1 or found.keys() & {*TEXT_SUFFIXES, *token_suffixes()}:
        raise UsageError(
            f"data.stream: data.path {config.path!r} has {', '.join(sorted(found)) or 'no files'}; give tables of one "
            f"kind ({' '.join(TABLE_SUFFIXES)}) or hf:NAME, or leave data.stream out"
        )
    for file in local.get(tables[0], ()):
        check_first_row(file.path)
    return tables[0], found[tables[0]]


# ---------------------------------------------------------------- streams of a set
# Each reads its own files in its own order, and shuffles windows of their tokens.
#
# A set is always read in the same number of streams, for any number of processes. The place of a stream is six
# numbers: its samples so far, those before the windows that are being shuffled, and the pass, file, row and token at
# which these windows begin. A resumed run reads these windows again, so that no buffer need be kept.

_Made = TypeVar("_Made")
#: Characters that are tokenised together: every stream of a process holds as many, and their first wait for them.
_BATCH_CHARS = 1 << 17
#: Time, in seconds, that the end of a run waits for an unfinished read.
_END_S = 5.0


class StreamPlace(NamedTuple):
    """Place of a stream in its set. Plain numbers, for a checkpoint."""

    samples: int = 0
    """Number of samples given so far."""
    first: int = 0
    """Samples before those of the buffer."""
    epoch: int = 0
    """Pass over its files, from 0, in which the buffer's first window begins."""
    file: int = 0
    """Index of the file in the order of that pass."""
    row: int = 0
    token: int = 0
    """Token within the row's text."""


START = StreamPlace()


@dataclass(frozen=True)
class StreamSettings:
    """Settings that all streams of a run share."""

    n_streams: int
    buffer: int
    """Windows that are shuffled together."""
    seq_len: int
    data_seed: int
    val_fraction: float
    epochs: float | None
    """Passes that are allowed."""


class _Buffer(NamedTuple):
    place: StreamPlace
    """Place at its first window."""
    tokens: np.ndarray
    """uint32 ``[windows · seq_len + 1]``."""
    order: np.ndarray
    """Windows in the order in which they are given."""


class Ahead(Generic[_Made]):
    """Result that a thread prepares in advance."""

    def __init__(self, make: Callable[[], _Made]) -> None:
        self._made: _Made | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(make,), name="stream", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], _Made]) -> None:
        try:
            self._made = make()
        except BaseException as error:
            self._failure = error

    def result(self) -> _Made:
        """Wait for the result; raise its error if it failed."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._made is not None
        return self._made


def end_all(started: Iterable[Ahead[Any]]) -> None:
    """Wait for the threads, for a limited time in all: one that reads on would ask a store that is gone, and report it
    among the messages of other work.
    """
    until = time.monotonic() + _END_S
    for ahead in started:
        ahead._thread.join(max(0.0, until - time.monotonic()))


class StreamClosedError(Exception):
    """Error for a stream that was closed while its next windows were read."""


class Stream:
    """Samples of stream ``number``, from a place on.

    If there are fewer files than streams, several streams share a file and take turns at its rows. Documents whose hash
    is below ``val_fraction`` are left out: they are for validation.
    """

    def __init__(
        self,
        table: StreamedTable,
        tokenizer: TextTokenizer,
        settings: StreamSettings,
        number: int,
        place: StreamPlace = START,
    ) -> None:
        self._table, self._tokenizer, self._settings, self._number = table, tokenizer, settings, number
        n_files, n_streams = table.n_files, settings.n_streams
        self._files = np.arange(number % n_files, n_files, n_streams)
        self._turn, self._turns = number // n_files, len(range(number % n_files, n_streams, n_files))
        self._samples, self._over = place.samples, False
        self._place, self._buffers = place, self._fill(place)
        self._buffer: _Buffer | None = None
        self._next: Ahead[_Buffer] | None = None

    @property
    def place(self) -> StreamPlace:
        """Place from which the stream would continue."""
        return (self._buffer.place if self._buffer else self._place)._replace(samples=self._samples)

    def take(self, n: int) -> np.ndarray:
        """Return the next ``n`` samples: int64 ``[n, seq_len + 1]``."""
        length, out = self._settings.seq_len, []
        for _ in range(n):
            buffer = self._current()
            window = int(buffer.order[self._samples - buffer.place.first]) * length
            out.append(buffer.tokens[window : window + length + 1])
            self._samples += 1
        return np.array(out, dtype=np.int64).reshape(n, length + 1)

    def _current(self) -> _Buffer:
        while self._buffer is None or self._buffer.place.first + len(self._buffer.order) <= self._samples:
            ready = self._next or Ahead(self._buffers.__next__)
            self._buffer = ready.result()
            self._next = Ahead(self._buffers.__next__)
        return self._buffer

    def close(self) -> None:
        """End the stream's thread."""
        end_all(self.stop())

    def stop(self) -> list[Ahead[Any]]:
        """Tell the stream's thread to end; return its read, if it has one."""
        self._over = True
        return [] if self._next is None else [self._next]

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, place: StreamPlace) -> Iterator[_Buffer]:
        """Yield buffers from the one at ``place`` on; the last before the allowed passes end may be shorter.

        Raises:
            RunError: these passes are over.
        """
        settings, documents = self._settings, self._documents(place)
        held: deque[tuple[StreamPlace, np.ndarray]] = deque()
        n_held = 0
        while True:
            # A window has one token of the next.
            while n_held <= settings.buffer * settings.seq_len and (found := next(documents, None)) is not None:
                held.append(found)
                n_held += len(found[1])
            size = min(settings.buffer, (n_held - 1) // settings.seq_len)
            if size < 1:
                raise RunError(
                    f"data.epochs is {settings.epochs:g}, and stream {self._number} of {self._table.path!r} has been "
                    "read as often: give a higher data.epochs, fewer trainer.max_steps or more text"
                )
            needed = size * settings.seq_len
            tokens = np.concatenate([ids for _, ids in held])
            number = place.first // settings.buffer
            order = permuted(np.arange(size), size, "buffer", settings.data_seed, self._number, number)
            yield _Buffer(place, tokens[: needed + 1], order)
            passed = 0
            while passed + len(held[0][1]) <= needed:
                passed += len(held.popleft()[1])
            begins, ids = held[0]
            place = begins._replace(token=begins.token + needed - passed, first=place.first + size)
            held[0] = (place, ids[needed - passed :])
            n_held -= needed

    def _documents(self, place: StreamPlace) -> Iterator[tuple[StreamPlace, np.ndarray]]:
        """Yield place and ids of documents from the one at ``place`` on, the first from its token on, pass
        after pass, as many as are allowed.
        """
        epoch, settings = place.epoch, self._settings
        while settings.epochs is None or epoch < settings.epochs:
            order = permuted(
                np.arange(len(self._files)), len(self._files), "files", settings.data_seed, self._number, epoch
            )
            n_found = 0
            for i in range(place.file, len(order)):
                file = int(self._files[order[i]])
                for row, ids in self._rows(file, place.row):
                    if self._over:
                        raise StreamClosedError
                    n_found += 1
                    skipped = place.token if row == place.row else 0
                    yield StreamPlace(0, 0, epoch, i, row, skipped), ids[skipped:]
                    place = START
                place = START
            if not n_found:
                raise UsageError(
                    f"data.n_streams: stream {self._number} of {settings.n_streams} has no text in its part of "
                    f"{self._table.path!r} ({self._table.n_files} files); give fewer, or more text"
                )
            epoch += 1

    def _rows(self, file: int, first_row: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the rows of this stream in a file, with their tokens."""
        waiting: deque[int] = deque()

        def documents() -> Iterator[Document]:
            for row, text in enumerate(self._table.texts(file, first_row), first_row):
                mine = row % self._turns == self._turn
                if mine and text and not is_held_out(text, self._settings.val_fraction):
                    waiting.append(row)
                    yield Document("train", text)

        for encoded in encode_documents(documents(), self._tokenizer, _BATCH_CHARS):
            yield waiting.popleft(), encoded.ids


def is_held_out(text: str, val_fraction: float) -> bool:
    """Return True if a document is for validation; its content decides, as for rows of tables."""
    return bool(below(np.array(text_hash(text.encode("utf-8")), dtype=np.uint64), val_fraction))


# ---------------------------------------------------------------- validation text of a streamed set
# The first documents, by their hash, that training leaves out.

_FORMAT = 2
_TOKENS = "val-00000.bin"


class HeldOutMeta(Meta):
    """``meta.json`` of held-out documents."""

    n_documents: Count
    n_tokens: Count
    n_bytes: Count


def held_out(
    table: StreamedTable, tokenizer: TextTokenizer, n_documents: int, val_fraction: float, cache_dir: Path, verify: str
) -> tuple[ShardedTokens, dict[str, Any]]:
    """Return the tokens of the first ``n_documents`` whose hash is below ``val_fraction``, and `HeldOutMeta`.

    They are read once and kept in ``cache_dir``.

    Raises:
        UsageError: there is no such document.
    """
    key = fingerprint(
        format=_FORMAT,
        identity=table.identity(),
        tokenizer_hash=tokenizer.sha256,
        n_documents=n_documents,
        val_fraction=val_fraction,
    )

    def documents() -> Iterator[Document]:
        left = n_documents
        for file in range(table.n_files):
            for text in table.texts(file):
                if text and is_held_out(text, val_fraction):
                    yield Document("val", text)
                    left -= 1
                    if not left:
                        return

    def build(scratch: Path) -> dict[str, Any]:
        found = list(encode_documents(documents(), tokenizer))
        if not found:
            raise UsageError(
                f"data.val_fraction: {val_fraction} holds out none of the documents of {table.path!r}; give more"
            )
        ids = np.concatenate([one.ids for one in found])
        ids.astype("<u4").tofile(scratch / _TOKENS)
        return {
            "n_documents": len(found),
            "n_tokens": len(ids),
            "n_bytes": sum(one.n_bytes for one in found),
            "files": facts_of_files(scratch),
        }

    folder = cache_dir / f"heldout-{key[:16]}"
    meta = build_once(folder, build, verify, HeldOutMeta)
    return ShardedTokens([folder / _TOKENS], "<u4"), meta
