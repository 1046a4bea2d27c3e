"""Documents to token ids, in batches that keep every core busy and memory bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from .tokenizer import TextTokenizer

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")

CHUNK_CHARS = 1 << 18
_BATCH_CHARS = 1 << 21
_LINE_START = re.compile(r"(?<=\S\n)(?=\S)")


#: Characters of the longest word that is one piece to a tokenizer: the time of BPE grows faster than a piece.
LONGEST_WORD = 4096
_OVERLONG = re.compile(rf"[^\W\d_]{{{LONGEST_WORD},}}|\d{{{LONGEST_WORD},}}|(?:[^\w\s]|_){{{LONGEST_WORD},}}")


class Document(NamedTuple):
    """One text and where it belongs."""

    split: Split
    text: str


class Encoded(NamedTuple):
    """Token ids of one document, its end-of-text token included; int32-range ids as uint32 ``[n]``."""

    split: Split
    ids: np.ndarray
    n_bytes: int


def text_chunks(text: str, limit: int = CHUNK_CHARS) -> list[str]:
    """Split a long text into chunks of at most ``limit`` characters, so that one long document uses all cores too.

    A chunk ends where an unindented line begins. A byte-level BPE with the GPT-2 pattern splits there anyway, so that
    the ids do not change; only a text without such a place in ``limit`` characters is split elsewhere, and a run of
    letters, of digits or of signs above `LONGEST_WORD`, which no language has.
    """
    out: list[str] = []
    if words := _overlong(text):
        at = 0
        for first, last in words:
            starts = range(first, last, LONGEST_WORD)
            out += [*text_chunks(text[at:first], limit), *(text[i : min(last, i + LONGEST_WORD)] for i in starts)]
            at = last
        return [*out, *text_chunks(text[at:], limit)]
    start = 0
    while len(text) - start > limit:
        end = start + limit
        # Line starts are everywhere in ordinary text: the last few thousand characters nearly always hold one.
        for reach in (4096, limit):
            near = [match.start() for match in _LINE_START.finditer(text, max(start + 1, end - reach), end)]
            if near:
                end = near[-1]
                break
        out.append(text[start:end])
        start = end
    return [*out, text[start:]]


def _overlong(text: str) -> list[tuple[int, int]]:
    """Where words above `LONGEST_WORD` are."""
    # Ordinary text has none: that is seen without looking at each character.
    if max(map(len, text.split()), default=0) < LONGEST_WORD:
        return []
    return [match.span() for match in _OVERLONG.finditer(text)]


def shortened(text: str) -> str:
    """``text`` with the beginnings alone of words above `LONGEST_WORD`: nothing is learned from the rest."""
    return _OVERLONG.sub(lambda word: word[0][:LONGEST_WORD], text) if _overlong(text) else text


def encode_documents(documents: Iterable[Document], tokenizer: TextTokenizer) -> Iterator[Encoded]:
    """Encode in order; the end-of-text token, where the tokenizer has one, closes every document."""
    waiting: list[Document] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document.text)
        if size >= _BATCH_CHARS:
            yield from _encode_batch(waiting, tokenizer)
            waiting, size = [], 0
    yield from _encode_batch(waiting, tokenizer)


def _encode_batch(documents: list[Document], tokenizer: TextTokenizer) -> Iterator[Encoded]:
    chunks = [text_chunks(document.text) for document in documents]
    ids = iter(tokenizer.encode([chunk for of_document in chunks for chunk in of_document]))
    end = [] if tokenizer.end_of_text is None else [np.array([tokenizer.end_of_text], dtype=np.uint32)]
    for document, of_document in zip(documents, chunks, strict=True):
        joined = np.concatenate([*(next(ids) for _ in of_document), *end])
        yield Encoded(document.split, joined, len(document.text.encode("utf-8")))
