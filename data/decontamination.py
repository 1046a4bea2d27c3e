"""Decontamination: training documents that share ``n`` words in a row with an evaluation text are left out.

After GPT-3 (arXiv 2005.14165, appendix C), where ``n`` is 13. A word is the text between white space, in lower case
and without all characters that are neither letter nor digit. So case, punctuation and line breaks make no difference,
and a text of less than ``n`` words is never found. GPT-3 cut the passage out; this module leaves out the whole
document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError
from .cache import Meta, build_once, facts_of_files, fingerprint
from .config import DataConfig
from .corpora import Corpus, open_corpus
from .documents import OUT, TRAIN, WITHIN, Piece
from .encode import Text
from .fetching import localised
from .workers import in_processes, n_cores

_NOT_IN_WORDS = re.compile(r"(?:[^\w\s]|_)+")
_LAST_SPACE = re.compile(r"\s\S*\Z")
#: Characters that are looked at together; where they hold no white space, a word ends with them.
_LONGEST = 1 << 21
#: Odd, so that multiplying by it loses nothing.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_PIECE_BYTES = 1 << 24
CONTAMINATED = "contaminated"
"""Reason for which the documents are left out, in names and records."""


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
        # The space of the last cut, which the rest begins with, divides nothing.
        end = cut.start() if cut and cut.start() else len(rest)
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


class _NGramsMeta(Meta):
    n_grams: int


def evaluation_texts(config: DataConfig) -> tuple[Corpus, str]:
    """Open the texts of ``data.decontaminate``, which must be set, all in one split, with the hash of their content.

    Raises:
        UsageError: the texts cannot be read;  the message names the field.
    """
    path = config.decontaminate
    assert path is not None
    asked = DataConfig(path=path, text_field=config.text_field, cache_dir=config.cache_dir, timeout_s=config.timeout_s)
    try:
        corpus = open_corpus(localised(asked))
        content_hash = corpus.content_hash()
        return corpus.with_codes(np.where(corpus.sizes > 0, TRAIN, OUT).astype(np.uint8), {}), content_hash
    except UsageError as error:
        raise UsageError(str(error).replace("data.path", "data.decontaminate")) from error


def find_ngrams(config: DataConfig) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the n-grams of the evaluation texts, and facts about them for the record."""
    n, path = config.decontaminate_ngram, config.decontaminate
    whole, content_hash = evaluation_texts(config)

    def build(scratch: Path) -> dict[str, Any]:
        found = NGrams.of(whole.documents(), n)
        if not len(found):
            raise UsageError(
                f"data.decontaminate: no text of {path!r} has {n} words; give longer ones, or a smaller "
                "data.decontaminate_ngram"
            )
        found.save(scratch)
        return {"n_grams": len(found), "files": facts_of_files(scratch)}

    folder = config.cache_folder / f"ngrams-{fingerprint(content_hash=content_hash, n=n, format=1)[:16]}"
    meta = build_once(folder, build, schema=_NGramsMeta)
    return folder, {"content_hash": content_hash, "ngram": n, "n_grams": meta["n_grams"]}


def without_ngrams(config: DataConfig, corpus: Corpus, ngrams: Path, name: str) -> Corpus:
    """Remove the training documents that hold an n-gram from a corpus."""
    searched = np.where((corpus.codes == TRAIN) | (corpus.codes == WITHIN), TRAIN, OUT).astype(np.uint8)
    key = fingerprint(
        content_hash=corpus.content_hash(),
        searched=corpus.splits_key,
        val_fraction=config.val_fraction,
        ngrams=ngrams.name,
        format=1,
    )

    def build(scratch: Path) -> dict[str, Any]:
        pieces = corpus.with_codes(searched, {}).pieces(_PIECE_BYTES)
        jobs = [Searched(piece, ngrams, config.decontaminate_ngram) for _, piece in pieces]
        found = dict(in_processes(holds_ngrams, jobs, config.n_workers or n_cores()))
        holds = [held for number in range(len(jobs)) for held in found[number]]
        np.save(scratch / "documents.npy", np.flatnonzero(searched == TRAIN)[np.array(holds, dtype=bool)])
        return {"files": facts_of_files(scratch)}

    folder = config.cache_folder / f"{CONTAMINATED}-{key[:16]}"
    build_once(folder, build)
    documents = np.load(folder / "documents.npy")
    if not len(documents):
        return corpus
    codes = corpus.codes.copy()
    codes[documents] = OUT
    if not ((codes == TRAIN) | (codes == WITHIN)).any():
        raise UsageError(
            f"data.decontaminate: every training document of {name or 'the corpus'} repeats an evaluation text; give "
            "other text, or a larger data.decontaminate_ngram"
        )
    return corpus.with_codes(codes, corpus.left_out | {CONTAMINATED: len(documents)})
