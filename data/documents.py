"""Documents of a corpus by number, with hash and size of each, and the split that the hash decides."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import pairwise, repeat
from typing import Protocol, Self

import numpy as np
import xxhash

from ..errors import UsageError
from .encode import Document, Text

# ---------------------------------------------------------------- choice of the documents for validation
# A document belongs to validation when the hash of its name falls below ``data.val_fraction``, or that of its text if
# it has no name; so adding or removing documents does not move the others. Two different hashes or more always give two
# non-empty splits: if they put all on one side, the nearest to the other side changes sides, with every document that
# has it. A single document, once or many times, is split: its end is for validation.

TRAIN, VAL, OUT, WITHIN = range(4)
"""Codes (uint8) of a document's use: all of it for training or for validation, none of it, or a part for each."""


def key_digest(key: str) -> bytes:
    """Hash a key with SHA-256, to a fixed length, so that keys and contents stay separate in a hash of both."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


#: Seed of the texts' hashes, different from those by which others sample or deduplicate.
_TEXT_SEED = int.from_bytes(b"birthmrk", "little")


def name_hash(name: bytes) -> int:
    """Return the 64 bits of a document's name that decide its split."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, person=b"birthmark-split").digest(), "little")


def text_hashes(texts: Iterable[bytes | memoryview]) -> np.ndarray:
    """Return the 64 bits of each text that decide its split if it has no name, and by which equal texts are found:
    uint64.

    The hash is XXH3, since tables have a text in every row: nothing else in Python is as fast. An author of a corpus
    can make two texts share a hash; that only puts both on one side.
    """
    digests = b"".join(map(xxhash.xxh3_64_digest, texts, repeat(_TEXT_SEED)))
    return np.frombuffer(digests, ">u8").astype(np.uint64)


#: Hashes one text as `text_hashes` does; it may come in parts.
text_hasher = partial(xxhash.xxh3_64, seed=_TEXT_SEED)


def text_hash(text: bytes) -> int:
    """Compute `text_hashes` of one text."""
    return text_hasher(text).intdigest()


def below(hashes: np.ndarray, val_fraction: float) -> np.ndarray:
    """Return True for 64-bit hashes below ``val_fraction`` of their range: bool, in the shape of ``hashes``."""
    return hashes * 2.0**-64 < val_fraction


def validation_mask(hashes: np.ndarray, val_fraction: float) -> np.ndarray:
    """Return True for the documents that are for validation, and for some but not all: bool ``[n]``.

    Args:
        hashes: `name_hash` or `text_hash` of each, uint64 ``[n]``, of two values or more.
        val_fraction: share for validation.
    """
    is_val = below(hashes, val_fraction)
    if not is_val.any():
        return hashes == hashes.min()
    return hashes != hashes.max() if is_val.all() else is_val


def codes_of(keys: np.ndarray, used: np.ndarray, val_fraction: float) -> np.ndarray:
    """Return the code of each document's use: uint8 ``[n]``.

    Args:
        keys: `name_hash` or `text_hash` of each, uint64 ``[n]``.
        used: bool ``[n]``; the others are left out.
        val_fraction: share for validation.
    """
    codes = np.full(len(keys), OUT, dtype=np.uint8)
    of_used = keys[used]
    codes[used] = WITHIN if (of_used == of_used[:1]).all() else validation_mask(of_used, val_fraction)
    return codes


def split_place(n_chars: int, val_fraction: float) -> int:
    """Return the number of characters of a corpus' only document that go to training.

    Raises:
        UsageError: a single character cannot be split.
    """
    if n_chars < 2:
        raise UsageError(f"data.path: the whole corpus is one document of {n_chars} character; give more text")
    return min(max(1, round(n_chars * (1 - val_fraction))), n_chars - 1)


def split_single_document(text: str, val_fraction: float) -> Iterator[Document]:
    """Split the only document of a corpus: its last ``val_fraction``, from a line's start on, is for validation.

    Raises:
        UsageError: a single character cannot be split.
    """
    boundary = split_place(len(text), val_fraction)
    # The line that the boundary falls into goes to validation, unless that line is most of the text.
    line_start = text.rfind("\n", 0, boundary) + 1
    if line_start > boundary // 2:
        boundary = line_start
    yield Document("train", text[:boundary])
    yield Document("val", text[boundary:])


# ---------------------------------------------------------------- documents
# Corpora whose documents are numbered, with hash and size of each: read whole, or piece by piece in any process.


class Piece(Protocol):
    """Consecutive documents, in a form that can be sent to another process."""

    def documents(self) -> Iterator[Text]:
        """Yield the documents with their splits."""


class SurveyedCorpus:
    """Base of such corpora; subclasses know hashes and sizes, and read documents."""

    kind: str
    """Name of the kind in a run's record."""
    split_rule = ""
    """Name of the rule for its own splits, if that is not the documents' names."""

    def __init__(self, val_fraction: float) -> None:
        self._val_fraction = val_fraction
        self._given: np.ndarray | None = None
        self.left_out: dict[str, int] = {}
        """Numbers of surveyed documents that are left out, by reason."""

    def content_hash(self) -> str:
        """Compute the SHA-256, in hex, over keys and contents in order; any changed byte changes it."""
        raise NotImplementedError

    @property
    def keys(self) -> np.ndarray:
        """Hash of each document's key, which decides its split: uint64 ``[n]``."""
        raise NotImplementedError

    @property
    def contents(self) -> np.ndarray:
        """`text_hash` of each document: uint64 ``[n]``; equal texts have equal ones, in all corpora."""
        raise NotImplementedError

    @property
    def sizes(self) -> np.ndarray:
        """UTF-8 bytes of each document: int64 ``[n]``; 0 for those left out."""
        raise NotImplementedError

    def piece(self, first: int, codes: np.ndarray) -> Piece:
        """Return the documents from number ``first`` on, one for each of ``codes`` (`birthmark.data.documents`)."""
        raise NotImplementedError

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the files or rows that yield no document, by reason."""
        raise NotImplementedError

    def check_any(self) -> None:
        """Raise UsageError if there is no document at all."""

    @cached_property
    def default_codes(self) -> np.ndarray:
        """Code of each document's use if nothing else decides: uint8 ``[n]``."""
        self.check_any()
        return codes_of(self.keys, self.sizes > 0, self._val_fraction)

    @property
    def codes(self) -> np.ndarray:
        """Code of each document's use: uint8 ``[n]``."""
        return self.default_codes if self._given is None else self._given

    def with_codes(self, codes: np.ndarray, left_out: Mapping[str, int]) -> Self:
        """Return the same corpus with other splits.

        Args:
            codes: uint8 ``[n]``.
            left_out: reason → number of documents that are left out beyond those of the survey.
        """
        other = copy.copy(self)
        other._given, other.left_out = codes, dict(left_out)
        return other

    @property
    def splits_key(self) -> str:
        """Key that separates these splits from others of the same content and fraction: the SHA-256, in hex, of given
        ones, else `split_rule`.
        """
        if self._given is None or np.array_equal(self._given, self.default_codes):
            return self.split_rule
        return hashlib.sha256(self._given.tobytes()).hexdigest()

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self.sizes.sum())

    @property
    def skipped(self) -> dict[str, int]:
        """Numbers of files or rows left out, by reason."""
        return self.skipped_in_survey() | self.left_out

    def documents(self) -> Iterator[Text]:
        """Yield all documents with their splits."""
        return self.piece(0, self.codes).documents()

    def pieces(self, n_bytes: int) -> Iterator[tuple[int, Piece]]:
        """Yield all documents in pieces of about ``n_bytes`` bytes of text, in order: bytes and piece."""
        sizes, codes = np.where(self.codes == OUT, 0, self.sizes), self.codes
        number = (np.cumsum(sizes) - sizes) // n_bytes
        borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
        for first, last in pairwise(borders):
            yield int(sizes[first:last].sum()), self.piece(first, codes[first:last])
