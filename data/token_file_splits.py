"""Choice of a file's tokens for validation.

If a format or an end token marks the ends of documents, each document is in validation when the hash of its file's key
and its number falls below ``data.val_fraction``; otherwise the end of each file is. A file that was named for a split
belongs to it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .batches import stream_key
from .documents import below
from .token_file_formats import TokenFile

#: Tokens that a pass over a file holds at once.
BLOCK = 1 << 24
_DOCUMENTS = 1 << 16


@dataclass(frozen=True)
class FileSplit:
    """The parts of one file: int64 ``[runs, 2]`` each, first token and tokens, ascending."""

    train: np.ndarray
    val: np.ndarray
    documents: tuple[int, int] | None
    """Numbers of documents in training and in validation; None if they are unknown."""

    last_document: int = 0
    """First token of its last document."""

    largest: int | None = None
    """Largest token, where all were read."""


def blocks(file: TokenFile) -> Iterator[np.ndarray]:
    """Yield all tokens in order, `BLOCK` at a time."""
    tokens = file.tokens()
    for start in range(0, file.n_tokens, BLOCK):
        yield tokens[start : start + BLOCK]


def largest_token(block: np.ndarray) -> int:
    """Return the largest token of a block; a negative one counts as larger than any."""
    if not len(block):
        return -1
    if block.dtype.kind == "i" and int(block.min()) < 0:
        return int(block.view(block.dtype.str.replace("i", "u")).max())
    return int(block.max())


def split_files(files: Sequence[TokenFile], val_fraction: float, end_token: int | None) -> list[FileSplit]:
    """Split each file. If files have documents, even a single one, both splits are non-empty."""
    found = [_split_file(file, val_fraction, end_token) for file in files]
    if any(file.split is not None for file in files) or not all(one.documents for one in found):
        return found
    n_train, n_val = (sum(counts) for counts in zip(*(one.documents or (0, 0) for one in found), strict=True))
    # The last document of the last file that has any.
    number = next((i for i in reversed(range(len(files))) if files[i].n_tokens), None)
    if number is None or (n_train and n_val):
        return found
    last = found[number]
    if n_train + n_val == 1:
        found[number] = replace(_at_the_end(files[number], val_fraction), documents=(1, 1), largest=last.largest)
        return found
    n, start = files[number].n_tokens, last.last_document
    rest, end = _filled(np.array([[0, start]])), np.array([[start, n - start]])
    (last_train, last_val) = last.documents or (0, 0)
    found[number] = (
        replace(last, train=rest, val=end, documents=(last_train - 1, 1))
        if n_train
        else replace(last, train=end, val=rest, documents=(1, last_val - 1))
    )
    return found


def _split_file(file: TokenFile, val_fraction: float, end_token: int | None) -> FileSplit:
    if file.split is not None:
        whole, none = np.array([[0, file.n_tokens]]), np.empty((0, 2), dtype=np.int64)
        return FileSplit(whole, none, None) if file.split == "train" else FileSplit(none, whole, None)
    if file.document_ends is not None:
        return _by_document(file, val_fraction, [file.document_ends()])
    if end_token is None:
        return _at_the_end(file, val_fraction)
    largest = -1

    def found_ends() -> Iterator[np.ndarray]:
        nonlocal largest
        for number, block in enumerate(blocks(file)):
            largest = max(largest, largest_token(block))
            yield np.flatnonzero(block == end_token) + (number * BLOCK + 1)

    found = _by_document(file, val_fraction, found_ends())
    return replace(found, largest=largest)


def _at_the_end(file: TokenFile, val_fraction: float) -> FileSplit:
    n = file.n_tokens
    boundary = min(max(1, round(n * (1 - val_fraction))), max(1, n - 1), n)
    return FileSplit(_filled(np.array([[0, boundary]])), _filled(np.array([[boundary, n - boundary]])), None)


def _by_document(file: TokenFile, val_fraction: float, ends: Sequence[np.ndarray] | Iterator[np.ndarray]) -> FileSplit:
    """Find the runs of documents of one split, block by block: only the borders of runs are kept."""
    key = int.from_bytes(stream_key("token-split", file.key)[:8], "little")
    borders: list[np.ndarray] = []  # where another split begins
    n_documents = n_val = start = last = 0
    current = False

    def take(ends_D: np.ndarray) -> None:
        nonlocal n_documents, n_val, start, last, current
        numbers_D = np.arange(n_documents, n_documents + len(ends_D), dtype=np.uint64)
        is_val_D = below(_mixed(numbers_D ^ np.uint64(key)), val_fraction)
        changes_D = np.diff(is_val_D, prepend=current)
        starts_D = np.concatenate([[start], ends_D[:-1]])
        borders.append(starts_D[changes_D])
        n_documents, n_val = n_documents + len(ends_D), n_val + int(is_val_D.sum())
        start, last, current = int(ends_D[-1]), int(starts_D[-1]), bool(is_val_D[-1])

    for found in ends:
        for first in range(0, len(found), _DOCUMENTS):
            some_D = found[first : first + _DOCUMENTS]
            # A document without a token is none.
            if len(ends_D := some_D[np.diff(some_D, prepend=start) > 0]):
                take(ends_D)
    if start < file.n_tokens:
        take(np.array([file.n_tokens]))
    # Training goes first; from border to border the splits take turns.
    starts = np.concatenate([[0], *borders]).astype(np.int64)
    runs = np.stack([starts, np.diff(starts, append=file.n_tokens)], axis=1)
    return FileSplit(_filled(runs[::2]), _filled(runs[1::2]), (n_documents - n_val, n_val), last)


def _filled(runs: np.ndarray) -> np.ndarray:
    return runs[runs[:, 1] > 0]


def _mixed(values: np.ndarray) -> np.ndarray:
    """Mix bits with the finaliser of SplitMix64 (Steele et al. 2014), uint64: neighbours get unrelated numbers."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
