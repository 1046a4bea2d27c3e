"""Streams of a set: each reads its own files in its own order, and shuffles windows of their tokens.

A set is always read in the same number of streams, for any number of processes. The place of a stream is six numbers:
its samples so far, those before the windows that are being shuffled, and the pass, file, row and token at which these
windows begin. A resumed run reads these windows again, so that no buffer need be kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ...errors import RunError, UsageError
from ..encode import Document, encode_documents
from ..permutation import permuted
from ..splits import below, text_hash
from ..tokenizer import TextTokenizer
from .streamed_table import StreamedTable

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
    """uint32 ``[buffer · seq_len + 1]``."""
    order: np.ndarray
    """Windows in the order in which they are given."""


class _Ahead(Generic[_Made]):
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

    def end(self) -> None:
        """Wait for the thread, for a limited time."""
        self._thread.join(_END_S)


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
        self._next: _Ahead[_Buffer] | None = None

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
        while self._buffer is None or self._buffer.place.first + self._settings.buffer <= self._samples:
            ready = self._next or _Ahead(self._buffers.__next__)
            self._buffer = ready.result()
            self._next = _Ahead(self._buffers.__next__)
        return self._buffer

    def close(self) -> None:
        """End the stream's thread."""
        self._over = True
        if self._next is not None:
            self._next.end()

    # ── in the thread ────────────────────────────────────────────────────────────────────────────────────────────

    def _fill(self, place: StreamPlace) -> Iterator[_Buffer]:
        """Yield buffers from the one at ``place`` on."""
        size, documents = self._settings.buffer, self._documents(place)
        needed = size * self._settings.seq_len
        held: deque[tuple[StreamPlace, np.ndarray]] = deque()
        n_held = 0
        while True:
            # A window has one token of the next.
            while n_held <= needed:
                held.append(next(documents))
                n_held += len(held[-1][1])
            tokens = np.concatenate([ids for _, ids in held])
            number = place.first // size
            order = permuted(np.arange(size), size, "buffer", self._settings.data_seed, self._number, number)
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
        after pass.
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
        raise RunError(
            f"data.epochs is {settings.epochs:g}, and stream {self._number} of {self._table.path!r} has been read as "
            "often: give a higher data.epochs, fewer trainer.max_steps or more text"
        )

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
