"""Training documents that repeat evaluation texts: they share ``n`` words in a row with one.

After GPT-3 (arXiv 2005.14165, appendix C), where ``n`` is 13. A word is the text between white space, in lower case and
without all characters that are neither letter nor digit. So case, punctuation and line breaks make no difference, and a
text of less than ``n`` words is never found. GPT-3 cut the passage out; here the whole document is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..encode import Text
from .documents import Piece

_NOT_IN_WORDS = re.compile(r"(?:[^\w\s]|_)+")
_LAST_SPACE = re.compile(r"\s\S*\Z")
#: Characters that are looked at together; where they hold no white space, a word ends with them.
_LONGEST = 1 << 21
#: Odd, so that multiplying by it loses nothing.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NGrams:
    """All sequences of ``n`` words in some texts.

    They are kept as hashes of 64 bits, compared only where all ``n`` words occur in these texts, so that 10⁶
    n-grams against 10⁹ such places err once by chance with a probability of 5·10⁻⁵.
    """

    def __init__(self, words: list[str], hashes: np.ndarray, n: int) -> None:
        self._number = {word: i for i, word in enumerate(words)}
        self._hashes, self._n = hashes, n

    def __len__(self) -> int:
        return len(self._hashes)

    @classmethod
    def of(cls, texts: Iterable[Text], n: int) -> NGrams:
        """Collect the n-grams of some texts; none reaches from one text into the next."""
        number: dict[str, int] = {}
        found = [np.empty(0, np.uint64)]
        for text in texts:
            ids = np.array([number.setdefault(word, len(number)) for words in _words(text) for word in words], np.int64)
            found.append(_hashed(ids, np.arange(len(ids) - n + 1), n))
        return cls([*number], np.unique(np.concatenate(found)), n)

    def save(self, folder: Path) -> None:
        """Write them as files."""
        np.save(folder / "ngrams.npy", self._hashes)
        (folder / "words.json").write_text(json.dumps([*self._number]), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, n: int) -> NGrams:
        """Load the files that `save` wrote."""
        words = json.loads((folder / "words.json").read_text(encoding="utf-8"))
        return cls(words, np.load(folder / "ngrams.npy"), n)

    def are_in(self, text: Text) -> bool:
        """Return True if a text contains one of the n-grams."""
        before = np.empty(0, np.int64)
        for words in _words(text):
            ids = np.concatenate([before, np.fromiter(map(self._number.get, words, repeat(-1)), np.int64, len(words))])
            # Number of words, among the n from each place on, that occur in the texts.
            known = np.cumsum(np.concatenate([[0], ids >= 0]))
            if len(ids) >= self._n:
                places = np.flatnonzero(known[self._n :] - known[: -self._n] == self._n)
                if np.isin(_hashed(ids, places, self._n), self._hashes).any():
                    return True
            before = ids[max(0, len(ids) - self._n + 1) :]
        return False


class Searched(NamedTuple):
    """A piece of a corpus with the n-grams to search for."""

    piece: Piece
    ngrams: Path
    """Folder that `NGrams.save` wrote."""
    n: int


def holds_ngrams(job: Searched) -> list[bool]:
    """Return True for each document of a piece that holds an n-gram."""
    ngrams = _loaded(job.ngrams, job.n)
    return [ngrams.are_in(document) for document in job.piece.documents()]


@lru_cache(maxsize=1)
def _loaded(folder: Path, n: int) -> NGrams:
    return NGrams.load(folder, n)


def _words(text: Text) -> Iterator[list[str]]:
    """Yield the words of a text, block by block."""
    rest = ""
    for block in text.blocks():
        rest += block
        if len(rest) < _LONGEST:
            continue
        cut = _LAST_SPACE.search(rest)
        end = cut.start() if cut else len(rest)
        yield _normalised(rest[:end])
        rest = rest[end:]
    yield _normalised(rest)


def _normalised(text: str) -> list[str]:
    return _NOT_IN_WORDS.sub("", text.lower()).split()


def _hashed(ids: np.ndarray, places: np.ndarray, n: int) -> np.ndarray:
    """Hash of the ``n`` ids from each place on; uint64 ``[places]``."""
    total = np.zeros(len(places), np.uint64)
    for i in range(n):
        total = (total ^ (ids[places + i] + 1).astype(np.uint64)) * _MULTIPLIER
        total ^= total >> np.uint64(29)
    return total
