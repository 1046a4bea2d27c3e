"""Corpora whose documents are numbered, with hash and size of each: read whole, or piece by piece in any process."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Protocol, Self

import numpy as np

from ..encode import Text
from ..splits import OUT, codes_of


class Piece(Protocol):
    """Consecutive documents, in a form that can be sent to another process."""

    def documents(self) -> Iterator[Text]:
        """Yield the documents with their splits."""


class SurveyedCorpus:
    """Base of such corpora; subclasses know hashes and sizes, and read documents."""

    kind: str
    """Name of the kind in a run's record."""
    own_splits = ""
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
        """Return the documents from number ``first`` on, one for each of ``codes`` (`birthmark.data.splits`)."""
        raise NotImplementedError

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the files or rows that yield no document, by reason."""
        raise NotImplementedError

    def check_any(self) -> None:
        """Raise UsageError if there is no document at all."""

    @cached_property
    def own_codes(self) -> np.ndarray:
        """Code of each document's use if nothing else decides: uint8 ``[n]``."""
        self.check_any()
        return codes_of(self.keys, self.sizes > 0, self._val_fraction)

    @property
    def codes(self) -> np.ndarray:
        """Code of each document's use: uint8 ``[n]``."""
        return self.own_codes if self._given is None else self._given

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
        ones, else `own_splits`.
        """
        if self._given is None or np.array_equal(self._given, self.own_codes):
            return self.own_splits
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
