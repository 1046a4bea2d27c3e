"""A corpus of text files: one document per file."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from ..errors import RunError, UsageError
from .compressed import content
from .config import corpus_suffix
from .encode import Document, Encoded, encode_documents
from .splits import key_digest, key_hash, split_single_document, validation_mask
from .tokenizer import TextTokenizer


class KeyedPath(NamedTuple):
    """A file and the name that is its document's key."""

    key: str
    path: Path


class _Surveyed(NamedTuple):
    key: str
    path: Path
    sha256: bytes
    n_bytes: int


class FileCorpus:
    """Files in the order of their keys; each is read whole. See `birthmark.data.corpora.Corpus`.

    Files that hold NUL, are not UTF-8 or are empty are left out and counted. Files of one key share a split.

    Raises:
        UsageError: no file is left, or one cannot be read.
        RunError: a file changed between the survey and the reading.
    """

    def __init__(self, kind: str, files: Sequence[KeyedPath], val_fraction: float) -> None:
        self.kind = kind
        self._files = sorted(files)
        self._val_fraction = val_fraction

    @cached_property
    def _survey(self) -> tuple[list[_Surveyed], dict[str, int]]:
        kept: list[_Surveyed] = []
        skipped: Counter[str] = Counter()
        for key, path in self._files:
            content = _read(path)
            if reason := _unusable(content):
                skipped[reason] += 1
            else:
                kept.append(_Surveyed(key, path, hashlib.sha256(content).digest(), len(content)))
        if not kept:
            reasons = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "no files"
            raise UsageError(f"data.path: no text in this corpus, found {reasons}; name a folder of UTF-8 text")
        return kept, dict(skipped)

    @property
    def skipped(self) -> dict[str, int]:
        """Files left out: reason → number."""
        return self._survey[1]

    @property
    def n_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(document.n_bytes for document in self._survey[0])

    def content_hash(self) -> str:
        """SHA-256 over (key, SHA-256 of the content) of every document in order; reads every file once."""
        total = hashlib.sha256()
        for document in self._survey[0]:
            total.update(key_digest(document.key))
            total.update(document.sha256)
        return total.hexdigest()

    def documents(self) -> Iterator[Document]:
        """All documents with their splits."""
        kept = self._survey[0]
        hashes = [key_hash(document.key.encode("utf-8", errors="surrogateescape")) for document in kept]
        is_val = validation_mask(np.array(hashes, dtype=np.uint64), self._val_fraction)
        for document, val in zip(kept, is_val.tolist(), strict=True):
            content = _read(document.path)
            if hashlib.sha256(content).digest() != document.sha256:
                raise RunError(f"{document.path}: changed while it was being read; start again")
            text = content.decode("utf-8")
            if len(kept) == 1:
                yield from split_single_document(text, self._val_fraction)
            else:
                yield Document("val" if val else "train", text)

    def encoded(self, tokenizer: TextTokenizer, scratch: Path) -> Iterator[Encoded]:
        """All documents as token ids."""
        return encode_documents(self.documents(), tokenizer)


def walk(root: Path, excluded: Sequence[str] = ()) -> dict[str, list[KeyedPath]]:
    """Files below ``root`` by lower-case suffix; their keys are their paths below it.

    Hidden files, hidden folders and folders named in ``excluded`` are left out; links to folders are not followed.

    Raises:
        UsageError: a folder cannot be listed.
    """
    found: dict[str, list[KeyedPath]] = {}
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in excluded)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                key = path.relative_to(root).as_posix()
                found.setdefault(corpus_suffix(name), []).append(keyed(key, path))
    return found


def keyed(key: str, path: Path) -> KeyedPath:
    """A file and its key: that of what it holds, where it is compressed."""
    return KeyedPath(
        str(PurePosixPath(key).with_suffix("")) if corpus_suffix(key) != path.suffix.lower() else key, path
    )


def _refuse(error: OSError) -> None:
    raise UsageError(f"data.path: cannot read {str(error.filename)!r} ({error.strerror}); make it readable") from error


def _read(path: Path) -> bytes:
    # A document is read whole: what fits into memory decides.
    return content(path, 1 << 40)


def _unusable(content: bytes) -> str | None:
    if not content:
        return "empty"
    if b"\0" in content:
        return "binary"
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "not UTF-8"
    return None
