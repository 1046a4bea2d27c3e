"""Token shards: a corpus's ids on disk, written once, mapped into memory by every process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from ..errors import RunError
from ..files import delete_folder
from ..schema import Count, Sha256
from .batches import ShardedTokens
from .building.pieces import PieceFacts, SplitFacts, SplitOfPiece, ids_file, piece_bytes, tokenise_pieces
from .building.staging import staged
from .cache import META, Meta, build_once, fingerprint
from .corpora import Corpus
from .encode import SPLITS, Split
from .tokenizer import TextTokenizer

FORMAT = 1
SHARD_TOKENS = 1 << 28
_BUFFER_TOKENS = 1 << 20


class ShardsMeta(Meta):
    """``meta.json`` of token shards."""

    format: int
    content_hash: Sha256
    tokenizer_hash: Sha256
    vocab_size: Count
    dtype: Literal["<u2", "<u4"]
    skipped: dict[str, Count]
    splits: dict[str, SplitFacts]
    unigram_entropy: float | None


class Shards:
    """A corpus's tokens with facts about them.

    Attributes:
        folder: folder of the ``.bin`` files and ``meta.json``.
        meta: ``format``, ``content_hash``, ``tokenizer_hash``, ``vocab_size``, ``dtype``, ``skipped``, ``files`` (per
            file: tokens, bytes, sha256), ``splits`` (per split: documents, tokens, bytes of UTF-8 text) and
            ``unigram_entropy`` (see `unigram_cross_entropy`).
        is_new: if they were built in this process just now.
    """

    def __init__(self, folder: Path, meta: dict[str, Any], *, is_new: bool = False) -> None:
        self.folder = folder
        self.meta = meta
        self.is_new = is_new

    def tokens(self, split: Split) -> ShardedTokens:
        """Return all tokens of a split."""
        names = sorted(name for name in self.meta["files"] if name.startswith(f"{split}-"))
        return ShardedTokens([self.folder / name for name in names], self.meta["dtype"])

    def facts(self, kind: str) -> dict[str, Any]:
        """Return the facts about a corpus of this kind for a run's record."""
        splits = self.meta["splits"]
        counted = {
            what: {split: facts[what] for split, facts in splits.items()} for what in ("documents", "tokens", "bytes")
        }
        return {
            "kind": kind,
            "content_hash": self.meta["content_hash"],
            **counted,
            "skipped": self.meta["skipped"],
            "bytes_per_token": splits["val"]["bytes"] / splits["val"]["tokens"],
            "unigram_entropy": self.meta["unigram_entropy"],
        }


def build_shards(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    cache_dir: Path,
    *,
    val_fraction: float,
    verify: str = "checksum",
    shard_tokens: int = SHARD_TOKENS,
    n_workers: int = 1,
    stage_to: Path | None = None,
) -> Shards:
    """Write the corpus as token shards, or verify and reuse those in ``cache_dir``.

    With ``stage_to``, they are read from the node's own copy below it. A killed build resumes from its finished pieces
    (`birthmark.data.building.pieces`).

    Raises:
        RunError: the disk is full, reused shards are damaged, or the tokenizer gave an id outside its vocabulary.
    """
    identity = {
        "format": FORMAT,
        "content_hash": corpus.content_hash(),
        "tokenizer_hash": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
    }
    # Splits by the documents' names follow from the content.
    given = {"splits": corpus.splits_key} if corpus.splits_key else {}
    key = fingerprint(**identity, **given, val_fraction=val_fraction, shard_tokens=shard_tokens)
    folder = cache_dir / f"shards-{key[:16]}"
    pieces = cache_dir / f"pieces-{fingerprint(shards=key, piece_bytes=piece_bytes(corpus.n_bytes))[:16]}"
    is_new = False

    def build(scratch: Path) -> dict[str, Any]:
        nonlocal is_new
        is_new = True
        dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        facts = tokenise_pieces(corpus, tokenizer, pieces, dtype, n_workers)
        joined = _joined(pieces, facts, scratch, dtype, tokenizer.vocab_size, shard_tokens)
        return identity | {"skipped": corpus.skipped} | joined

    # A copy is compared with its checksums as it is made.
    meta = build_once(folder, build, verify if stage_to is None else "size", ShardsMeta)
    shards = Shards(folder, meta, is_new=is_new)
    if is_new:
        delete_folder(pieces)
    changed = [name for name, value in identity.items() if shards.meta[name] != value]
    if changed:
        raise RunError(f"{folder / META}: {changed[0]} is of other shards; delete this folder, it will be rebuilt")
    if stage_to is not None:
        shards.folder = staged(folder, meta, stage_to, verify, ShardsMeta)
    return shards


def unigram_cross_entropy(train_counts: np.ndarray, val_counts: np.ndarray) -> float:
    """Compute nats per validation token under the training tokens' add-one-smoothed unigram distribution.

    This is the loss of a model that knows only token frequencies. NaN without validation tokens.
    """
    log_p = np.log(train_counts + 1.0) - np.log(train_counts.sum() + float(len(train_counts)))
    return float(-(val_counts * log_p).sum() / val_counts.sum()) if val_counts.sum() else float("nan")


def _joined(
    pieces: Path, facts: Sequence[PieceFacts], scratch: Path, dtype: str, vocab_size: int, shard_tokens: int
) -> dict[str, Any]:
    """Write all pieces one after the other into shards; return the entries for ``meta.json``."""
    writers = {split: _SplitWriter(scratch, split, dtype, vocab_size, shard_tokens) for split in SPLITS}
    for split, writer in writers.items():
        for number in range(len(facts)):
            with ids_file(pieces, number, split).open("rb") as file:
                while len(ids := np.fromfile(file, dtype, _BUFFER_TOKENS)):
                    writer.append(ids)
        writer.close()
    counts = {split: writer.counts for split, writer in writers.items()}
    return {
        "dtype": dtype,
        "files": writers["train"].files | writers["val"].files,
        "splits": {split: _total([of_piece["splits"][split] for of_piece in facts]) for split in SPLITS},
        "unigram_entropy": unigram_cross_entropy(counts["train"], counts["val"]),
    }


def _total(parts: Sequence[SplitOfPiece]) -> SplitFacts:
    return {
        "documents": sum(part["documents"] for part in parts),
        "tokens": sum(part["tokens"] for part in parts),
        "bytes": sum(part["bytes"] for part in parts),
    }


class _SplitWriter:
    """Writer of one split's files, counts and checksums."""

    def __init__(self, folder: Path, split: Split, dtype: str, vocab_size: int, shard_tokens: int) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()
        self._in_file = 0

    def append(self, ids: np.ndarray) -> None:
        self.counts += np.bincount(ids, minlength=len(self.counts))
        while len(ids):
            if self._file is None:
                self._open_file()
            part = ids[: self._shard_tokens - self._in_file]
            self._put(part.tobytes(), len(part))
            ids = ids[len(part) :]
            if self._in_file == self._shard_tokens:
                self.close()

    def _open_file(self) -> None:
        self._file = (self._folder / f"{self._split}-{len(self.files):05d}.bin").open("wb")
        self._sha256 = hashlib.sha256()
        self._in_file = 0

    def _put(self, content: bytes, n_tokens: int) -> None:
        assert self._file is not None
        self._file.write(content)
        self._sha256.update(content)
        self._in_file += n_tokens

    def close(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = Path(self._file.name)
        self.files[path.name] = {
            "tokens": self._in_file,
            "bytes": path.stat().st_size,
            "sha256": self._sha256.hexdigest(),
        }
        self._file = None
