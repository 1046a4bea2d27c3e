"""Documents to token ids, in batches that keep every core busy and memory bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple, Protocol

import numpy as np

from .tokenizer import TextTokenizer

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

CHUNK_CHARS = 1 << 18
BLOCK_CHARS = 1 << 20
"""Characters of a long text that are looked at together."""
_BATCH_CHARS = 1 << 21
_LINE_START = re.compile(r"(?<=\S\n)(?=\S)")

#: Characters of the longest word that is one piece to a tokenizer: the time of BPE grows faster than a piece.
LONGEST_WORD = 4096
_LETTERS, _DIGITS, _SIGNS = r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)"
_ANY_RUN = re.compile("|".join(f"({kind}+)" for kind in (_LETTERS, _DIGITS, _SIGNS)))
#: Runs of each kind, in the order of the groups of `_ANY_RUN`.
_RUNS = tuple(re.compile(f"{kind}*") for kind in (_LETTERS, _DIGITS, _SIGNS))


class Text(Protocol):
    """A document, or the part of one that belongs to a split."""

    @property
    def split(self) -> Split:
        """Split that it belongs to."""

    @property
    def text(self) -> str:
        """The whole text."""

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks that fit into memory."""


class Document(NamedTuple):
    """A text with its split."""

    split: Split
    text: str

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks of `BLOCK_CHARS` characters."""
        return (self.text[at : at + BLOCK_CHARS] for at in range(0, len(self.text), BLOCK_CHARS))


class Encoded(NamedTuple):
    """Token ids of one document, its end-of-text token included; int32-range ids as uint32 ``[n]``."""

    split: Split
    ids: np.ndarray
    n_bytes: int
    is_end: bool = True
    """False if the document, too long for memory, continues in the next item."""


def beginning(document: Text, n_chars: int) -> str:
    """Return the first characters of a document, without reading further."""
    found: list[str] = []
    left = n_chars
    for block in document.blocks():
        found.append(block[:left])
        left -= len(found[-1])
        if not left:
            break
    return "".join(found)


def text_chunks(text: str, limit: int = CHUNK_CHARS) -> list[str]:
    """Split a long text into chunks of at most ``limit`` characters, so that one long document uses all cores too.

    A chunk ends where an unindented line begins. A byte-level BPE with the GPT-2 pattern splits there anyway, so that
    the ids do not change; only a text without such a place in ``limit`` characters is split elsewhere, and a run of
    letters, of digits or of signs above `LONGEST_WORD`, which no language has.
    """
    if len(text) < min(limit, LONGEST_WORD):
        return [text]
    return list(stream_chunks(Document("train", text).blocks(), limit))


def stream_chunks(blocks: Iterable[str], limit: int = CHUNK_CHARS, *, shorten: bool = False) -> Iterator[str]:
    """Yield the chunks (`text_chunks`) of the text in ``blocks``, with little more than a block in memory.

    Args:
        blocks: the text, in parts of any length.
        limit: characters of a chunk.
        shorten: cut words above `LONGEST_WORD` to their beginnings: nothing is learned from the rest.
    """
    cutter = _Cutter(limit, shorten)
    for block in blocks:
        cutter.rest += block
        yield from cutter.chunks(is_end=False)
    yield from cutter.chunks(is_end=True)


class _Cutter:
    """Cutter of a text that arrives in blocks: at lines, and around words above `LONGEST_WORD`."""

    def __init__(self, limit: int, shorten: bool) -> None:
        self.rest = ""
        self._limit, self._shorten = limit, shorten
        #: The character before ``rest``, which a line's start may need; none where an overlong word ended.
        self._before = ""
        #: Kind of the overlong word that ``rest`` goes on with.
        self._word: int | None = None
        self._in_word = False

    def chunks(self, *, is_end: bool) -> Iterator[str]:
        """Yield the chunks that can be cut off; at the end, everything."""
        while self.rest:
            if self._word is not None:
                yield from self._word_pieces(self._word, is_end)
                if self._word is not None:
                    return
                continue
            # A word that begins before the cut is seen whole enough to know that it is overlong.
            window = self._limit + LONGEST_WORD
            if len(self.rest) < window and not is_end:
                return
            found = _first_overlong(self.rest[:window])
            if found is not None:
                start, self._word = found
                self._in_word = False
                if start:
                    yield self.rest[:start]
                self.rest, self._before = self.rest[start:], ""
                continue
            end = self._line_start() if len(self.rest) > self._limit else len(self.rest)
            self._before = self.rest[end - 1]
            chunk, self.rest = self.rest[:end], self.rest[end:]
            yield chunk

    def _word_pieces(self, kind: int, is_end: bool) -> Iterator[str]:
        run = _RUNS[kind].match(self.rest)
        length = run.end() if run else 0
        ended = is_end or length < len(self.rest)
        at = 0
        while length - at >= LONGEST_WORD or (ended and at < length):
            piece = self.rest[at : min(length, at + LONGEST_WORD)]
            at += len(piece)
            if not (self._shorten and self._in_word):
                yield piece
            self._in_word = True
        self.rest = self.rest[at:]
        if ended:
            self._word, self._before = None, ""

    def _line_start(self) -> int:
        """Return the best place to end the first ``limit`` characters."""
        shift = len(self._before)
        text = self._before + self.rest[: self._limit]
        # Line starts are everywhere in ordinary text: the last few thousand characters nearly always hold one.
        for reach in (4096, self._limit):
            near = [m.start() for m in _LINE_START.finditer(text, max(shift + 1, len(text) - reach))]
            if near:
                return near[-1] - shift
        return self._limit


def _first_overlong(text: str) -> tuple[int, int] | None:
    """Return the start of the first word above `LONGEST_WORD`, and its kind (`_RUNS`)."""
    # One that is so long covers a whole block of half its length. Ordinary text has none, which its blocks' first few
    # characters tell.
    half = LONGEST_WORD // 2
    blocks = range(0, len(text) - half + 1, half)
    if not any(run.fullmatch(text, at, at + half) for at in blocks for run in _RUNS):
        return None
    # Asked for such a length, a regular expression would look at each run once for each of its characters.
    for found in _ANY_RUN.finditer(text):
        if found.end() - found.start() >= LONGEST_WORD:
            return found.start(), (found.lastindex or 1) - 1
    return None


def encode_documents(
    documents: Iterable[Text], tokenizer: TextTokenizer, batch_chars: int = _BATCH_CHARS
) -> Iterator[Encoded]:
    """Encode in order; the end-of-text token, if the tokenizer has one, closes every document.

    A `Document` is given whole, any other text in parts (`Encoded.is_end`). ``batch_chars`` characters are encoded at a
    time.
    """
    batch = _Batch(tokenizer, batch_chars)
    for document in documents:
        if isinstance(document, Document):
            batch.add(document.split, text_chunks(document.text), len(document.text.encode("utf-8")))
        else:
            for chunk in stream_chunks(document.blocks()):
                batch.add(document.split, [chunk], len(chunk.encode("utf-8")), is_end=False)
                if batch.is_full:
                    yield from batch.encoded()
            batch.add(document.split, [], 0)
        if batch.is_full:
            yield from batch.encoded()
    yield from batch.encoded()


class _Batch:
    """Chunks that are encoded together."""

    def __init__(self, tokenizer: TextTokenizer, batch_chars: int) -> None:
        self._tokenizer, self._batch_chars = tokenizer, batch_chars
        end = tokenizer.end_of_text
        self._end = [] if end is None else [np.array([end], dtype=np.uint32)]
        self._waiting: list[tuple[Split, list[str], int, bool]] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        return self._size >= self._batch_chars

    def add(self, split: Split, chunks: list[str], n_bytes: int, *, is_end: bool = True) -> None:
        self._waiting.append((split, chunks, n_bytes, is_end))
        self._size += sum(map(len, chunks))

    def encoded(self) -> Iterator[Encoded]:
        """Encode and yield all added documents, and empty the batch."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        ids = self._ids(chunk for _, chunks, _, _ in waiting for chunk in chunks)
        for split, chunks, n_bytes, is_end in waiting:
            parts = [*(next(ids) for _ in chunks), *(self._end if is_end else [])]
            yield Encoded(split, np.concatenate(parts) if parts else np.empty(0, np.uint32), n_bytes, is_end)

    def _ids(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        """Yield the ids of each chunk; the library's results, 30 times as large, exist for one batch at a time."""
        batch, size = [], 0
        for chunk in chunks:
            batch.append(chunk)
            size += len(chunk)
            if size >= self._batch_chars:
                yield from self._tokenizer.encode(batch)
                batch, size = [], 0
        yield from self._tokenizer.encode(batch)
