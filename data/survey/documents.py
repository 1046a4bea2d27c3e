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
    """Consecutive documents, as something that another process can be sent."""

    def documents(self) -> Iterator[Text]:
        """They, with their splits."""


class SurveyedCorpus:
    """What such corpora share; subclasses know hashes and sizes, and read documents."""

    kind: str
    """As a run's record calls it."""
    own_splits = ""
    """What decides its own splits, where that is not the documents' names."""

    def __init__(self, val_fraction: float) -> None:
        self._val_fraction = val_fraction
        self._given: np.ndarray | None = None
        self.left_out: dict[str, int] = {}
        """Why documents of the survey are left out: reason → number."""

    def content_hash(self) -> str:
        """SHA-256, in hex, over keys and contents in order; another byte anywhere gives another hash."""
        raise NotImplementedError

    @property
    def keys(self) -> np.ndarray:
        """Hash of what decides each document's split: uint64 ``[n]``."""
        raise NotImplementedError

    @property
    def contents(self) -> np.ndarray:
        """`text_hash` of each document: uint64 ``[n]``; equal texts have equal ones, in all corpora."""
        raise NotImplementedError

    @property
    def sizes(self) -> np.ndarray:
        """UTF-8 bytes of each document: int64 ``[n]``; 0: it is left out."""
        raise NotImplementedError

    def piece(self, first: int, codes: np.ndarray) -> Piece:
        """The documents from number ``first`` on, as many as there are ``codes`` (`birthmark.data.splits`)."""
        raise NotImplementedError

    def skipped_in_survey(self) -> dict[str, int]:
        """What no document is made of: reason → number of files or rows."""
        raise NotImplementedError

    def check_any(self) -> None:
        """UsageError if there is no document at all."""

    @cached_property
    def own_codes(self) -> np.ndarray:
        """What becomes of each document where nothing else decides: uint8 ``[n]``."""
        self.check_any()
        return codes_of(self.keys, self.sizes > 0, self._val_fraction)

    @property
    def codes(self) -> np.ndarray:
        """What becomes of each document: uint8 ``[n]``."""
        return self.own_codes if self._given is None else self._given

    def with_codes(self, codes: np.ndarray, left_out: Mapping[str, int]) -> Self:
        """The same corpus with other splits.

        Args:
            codes: uint8 ``[n]``.
            left_out: reason → number of documents that are left out beyond those of the survey.
        """
        other = copy.copy(self)
        other._given, other.left_out = codes, dict(left_out)
        return other

    @property
    def splits_key(self) -> str:
        """What tells the splits from others of the same content and fraction: the SHA-256, in hex, of those that were
        given, else `own_splits`."""
        if self._given is None or np.array_equal(self._given, self.own_codes):
            return self.own_splits
        return hashlib.sha256(self._given.tobytes()).hexdigest()

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self.sizes.sum())

    @property
    def skipped(self) -> dict[str, int]:
        """What was found and left out: reason → number of files or rows."""
        return self.skipped_in_survey() | self.left_out

    def documents(self) -> Iterator[Text]:
        """All documents with their splits."""
        return self.piece(0, self.codes).documents()

    def pieces(self, n_bytes: int) -> Iterator[tuple[int, Piece]]:
        """All documents in pieces of about ``n_bytes`` bytes of text: bytes and piece of each, in order."""
        sizes, codes = np.where(self.codes == OUT, 0, self.sizes), self.codes
        number = (np.cumsum(sizes) - sizes) // n_bytes
        borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
        for first, last in pairwise(borders):
            yield int(sizes[first:last].sum()), self.piece(first, codes[first:last])
