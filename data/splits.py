"""Choice of the documents for validation.

A document belongs to validation when the hash of its name falls below ``data.val_fraction``, or that of its text if it
has no name; so adding or removing documents does not move the others. Two documents or more always give two non-empty
splits: if the hashes put all on one side, the document nearest to the other side changes sides. A single document is
split: its end is for validation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import repeat

import numpy as np
import xxhash

from ..errors import UsageError
from .encode import Document

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
    """Return True for the documents (`name_hash` or `text_hash`, uint64 ``[n]``) that are for validation: bool
    ``[n]``.
    """
    is_val = below(hashes, val_fraction)
    if len(hashes) > 1 and not is_val.any():
        is_val[hashes.argmin()] = True
    elif len(hashes) > 1 and is_val.all():
        is_val[len(hashes) - 1 - hashes[::-1].argmax()] = False
    return is_val


def codes_of(keys: np.ndarray, used: np.ndarray, val_fraction: float) -> np.ndarray:
    """Return the code of each document's use: uint8 ``[n]``.

    Args:
        keys: `name_hash` or `text_hash` of each, uint64 ``[n]``.
        used: bool ``[n]``; the others are left out.
        val_fraction: share for validation.
    """
    codes = np.full(len(keys), OUT, dtype=np.uint8)
    codes[used] = WITHIN if used.sum() == 1 else validation_mask(keys[used], val_fraction)
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
