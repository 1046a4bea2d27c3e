"""Training text of a tokenizer: an even sample of a whole corpus that fits into memory.

The memory that training takes grows with the number and length of different words in the text. Rare words cannot be
left out: text without spaces, as in Chinese or base64, has no others. So the sample gets smaller, and stays even.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..tokenizer import TextTokenizer, train_bpe
from .workers import in_processes

TRAINING_BYTES = 1 << 26
"""Bytes of text for training a tokenizer."""

TRAINING_WORD_BYTES = 3 << 20
"""Bytes of different words in that text, with the space before each: the library takes 145 bytes of memory for each
word (measured on words of 4 to 64 letters, tokenizers 0.23.3).
"""

TRAINING_CHARS = 1 << 14
"""Characters of a text that is sampled as a unit."""

#: Bytes of text from which on training has a process of its own, whose memory ends with it.
_WORTH_A_PROCESS = 1 << 24
#: Words as the pre-tokenizer of `birthmark.data.tokenizer.train_bpe` makes them.
_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
_LENGTH = struct.Struct("<Q")


class _Job(NamedTuple):
    sample: Path
    vocab_size: int


def train_on_sample(
    texts: Iterable[str], total_bytes: int, vocab_size: int, scratch: Path, most: int = TRAINING_WORD_BYTES
) -> TextTokenizer:
    """Train a byte-level BPE on a sample of ``texts``: `evenly`, then every one, second, fourth, … of these.

    The first of these samples is used whose different words have at most ``most`` bytes.

    Args:
        texts: texts of the training documents, none much longer than `TRAINING_CHARS`.
        total_bytes: size of all of them.
        vocab_size: see `train_bpe`.
        scratch: a folder for the temporary sample.
        most: bytes of different words.

    Raises:
        UsageError: ``vocab_size`` is too small.
        OSError: the sample cannot be written.
    """
    sample = scratch / "sample"
    try:
        _write_sample(evenly(texts, total_bytes), sample, most)
        apart = sample.stat().st_size > _WORTH_A_PROCESS
        ((_, content),) = in_processes(_train, [_Job(sample, vocab_size)], 1, apart=apart)
    finally:
        sample.unlink(missing_ok=True)
    return TextTokenizer(content)


def evenly(texts: Iterable[str], total_bytes: int, limit: int = TRAINING_BYTES) -> Iterator[str]:
    """Yield about ``limit`` bytes of texts, evenly over all ``total_bytes`` of them; all of them if they fit."""
    share = min(1.0, limit / max(1, total_bytes))
    seen = taken = 0
    for text in texts:
        size = len(text.encode("utf-8"))
        if share == 1.0 or taken <= seen * share:
            taken += size
            yield text
        seen += size


def _train(job: _Job) -> bytes:
    with job.sample.open("rb") as file:
        return train_bpe(_read(file), job.vocab_size).content


def _write_sample(texts: Iterable[str], path: Path, most: int) -> None:
    """Write all texts to a file, or as few as `train_on_sample` says."""
    sample, stride = _Sample(path), 1
    try:
        for number, text in enumerate(texts):
            if number % stride:
                continue
            sample.add(text)
            while sample.word_bytes > most and number >= stride:
                sample = sample.thinned()
                stride *= 2
    finally:
        sample.file.close()


class _Sample:
    """Texts in a file, with the total bytes of their different words."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.file: BinaryIO = path.open("w+b")
        self.word_bytes = 0
        self._words: set[str] = set()

    def add(self, text: str) -> None:
        new = set(_WORD.findall(text)) - self._words
        self._words |= new
        self.word_bytes += len("".join(new).encode("utf-8"))
        content = text.encode("utf-8")
        self.file.write(_LENGTH.pack(len(content)) + content)

    def thinned(self) -> _Sample:
        """Replace all texts by every other one, the first included."""
        self._words.clear()
        other = _Sample(self._path.with_suffix(".thinner"))
        with self.file:
            self.file.seek(0)
            for text in islice(_read(self.file), 0, None, 2):
                other.add(text)
        other._path = other._path.replace(self._path)
        return other


def _read(file: BinaryIO) -> Iterator[str]:
    while length := file.read(_LENGTH.size):
        yield file.read(*_LENGTH.unpack(length)).decode("utf-8")
