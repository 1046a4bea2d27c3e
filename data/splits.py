"""Which documents are for validation.

A document belongs to validation when the hash of its key falls below ``data.val_fraction``, so adding or removing
documents does not move the others. Two documents or more always give two non-empty splits: if the hashes put all on
one side, the one nearest to the other side changes. A single document is split: its end is for validation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from ..errors import UsageError
from .encode import Document


def key_digest(key: str) -> bytes:
    """SHA-256 of a key: of fixed length, so that keys and contents cannot run into each other in a hash of both."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def key_hash(key: bytes) -> int:
    """The 64 bits of a key that decide its split."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"birthmark-split").digest(), "little")


def validation_mask(hashes: np.ndarray, val_fraction: float) -> np.ndarray:
    """Which of these documents (`key_hash`, uint64 ``[n]``) are for validation: bool ``[n]``."""
    is_val = hashes * 2.0**-64 < val_fraction
    if len(hashes) > 1 and not is_val.any():
        is_val[hashes.argmin()] = True
    elif len(hashes) > 1 and is_val.all():
        is_val[len(hashes) - 1 - hashes[::-1].argmax()] = False
    return is_val


def split_single_document(text: str, val_fraction: float) -> Iterator[Document]:
    """The only document of a corpus: its last ``val_fraction``, from a line's start on, is for validation.

    Raises:
        UsageError: a single character cannot be split.
    """
    if len(text) < 2:
        raise UsageError(f"data.path: the whole corpus is one document of {len(text)} character; give more text")
    boundary = min(max(1, round(len(text) * (1 - val_fraction))), len(text) - 1)
    # The line that the boundary falls into goes to validation, unless that line is most of the text.
    line_start = text.rfind("\n", 0, boundary) + 1
    if line_start > boundary // 2:
        boundary = line_start
    yield Document("train", text[:boundary])
    yield Document("val", text[boundary:])
