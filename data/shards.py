"""Token shards: a corpus's ids on disk, written once, mapped into memory by every process."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypedDict

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..errors import RunError
from ..schema import Count, Sha256
from .batches import ShardedTokens
from .cache import META, Meta, build_once, fingerprint
from .corpora import Corpus
from .encode import SPLITS, Encoded, Split
from .tokenizer import TextTokenizer

FORMAT = 1
SHARD_TOKENS = 1 << 28
_BUFFER_TOKENS = 1 << 20


class SplitFacts(TypedDict):
    """What a split has."""

    documents: Count
    tokens: Count
    bytes: Count


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
    """A corpus's tokens and what is known about them.

    Attributes:
        folder: where the ``.bin`` files and ``meta.json`` lie.
        meta: ``format``, ``content_hash``, ``tokenizer_hash``, ``vocab_size``, ``dtype``, ``skipped``, ``files`` (per
            file: tokens, bytes, sha256), ``splits`` (per split: documents, tokens, bytes of UTF-8 text) and
            ``unigram_entropy`` (see `unigram_cross_entropy`).
    """

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder = folder
        self.meta = meta

    def tokens(self, split: Split) -> ShardedTokens:
        """All tokens of a split."""
        names = sorted(name for name in self.meta["files"] if name.startswith(f"{split}-"))
        return ShardedTokens([self.folder / name for name in names], self.meta["dtype"])

    def facts(self, kind: str) -> dict[str, Any]:
        """What a run's record keeps of a corpus of this kind."""
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
) -> Shards:
    """The corpus as token shards, written now or reused from ``cache_dir`` after they were verified.

    Raises:
        RunError: the disk is full, reused shards are damaged, or the tokenizer gave an id outside its vocabulary.
    """
    identity = {
        "format": FORMAT,
        "content_hash": corpus.content_hash(),
        "tokenizer_hash": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
    }
    key = fingerprint(**identity, val_fraction=val_fraction, shard_tokens=shard_tokens)
    folder = cache_dir / f"shards-{key[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        return identity | _write(corpus, tokenizer, scratch, shard_tokens)

    shards = Shards(folder, build_once(folder, build, verify, ShardsMeta))
    changed = [name for name, value in identity.items() if shards.meta[name] != value]
    if changed:
        raise RunError(f"{folder / META}: {changed[0]} is of other shards; delete this folder, it will be rebuilt")
    return shards


def unigram_cross_entropy(train_counts: np.ndarray, val_counts: np.ndarray) -> float:
    """Nats per validation token under the training tokens' add-one-smoothed unigram distribution.

    What a model that knows only token frequencies would lose. NaN without validation tokens.
    """
    log_p = np.log(train_counts + 1.0) - np.log(train_counts.sum() + float(len(train_counts)))
    return float(-(val_counts * log_p).sum() / val_counts.sum()) if val_counts.sum() else float("nan")


def _write(corpus: Corpus, tokenizer: TextTokenizer, scratch: Path, shard_tokens: int) -> dict[str, Any]:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    writers = {split: _SplitWriter(scratch, split, dtype, tokenizer.vocab_size, shard_tokens) for split in SPLITS}
    work = scratch / "work"
    work.mkdir()
    try:
        for document in _shown(corpus.encoded(tokenizer, work), corpus.n_bytes):
            writers[document.split].append(document)
    finally:
        for writer in writers.values():
            writer.close()
    for leftover in work.iterdir():
        leftover.unlink()
    work.rmdir()
    return {
        "dtype": dtype,
        "skipped": corpus.skipped,
        "files": writers["train"].files | writers["val"].files,
        "splits": {
            split: {"documents": writer.n_documents, "tokens": int(writer.counts.sum()), "bytes": writer.n_bytes}
            for split, writer in writers.items()
        },
        "unigram_entropy": unigram_cross_entropy(writers["train"].counts, writers["val"].counts),
    }


def _shown(documents: Iterator[Encoded], total_bytes: int) -> Iterator[Encoded]:
    """A progress bar on a terminal, nothing elsewhere."""
    columns = (TextColumn("tokenising"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total_bytes)
        for document in documents:
            yield document
            progress.advance(task, document.n_bytes)


class _SplitWriter:
    """One split's files, counts and checksums."""

    def __init__(self, folder: Path, split: Split, dtype: str, vocab_size: int, shard_tokens: int) -> None:
        self.files: dict[str, dict[str, Any]] = {}
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.n_documents = 0
        self.n_bytes = 0
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._buffer: list[np.ndarray] = []
        self._buffered = 0
        self._file: BinaryIO | None = None
        self._sha256 = hashlib.sha256()
        self._in_file = 0

    def append(self, document: Encoded) -> None:
        self.n_documents += 1
        self.n_bytes += document.n_bytes
        self._buffer.append(document.ids)
        self._buffered += len(document.ids)
        if self._buffered >= _BUFFER_TOKENS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._close_file()

    def _flush(self) -> None:
        ids = np.concatenate([np.empty(0, dtype=np.uint32), *self._buffer])
        self._buffer, self._buffered = [], 0
        if len(ids) and int(ids.max()) >= len(self.counts):
            raise RunError(
                f"data.tokenizer: gave id {int(ids.max())}, its vocabulary has {len(self.counts)} tokens; "
                "the tokenizer file contradicts itself, use another"
            )
        self.counts += np.bincount(ids, minlength=len(self.counts))
        while len(ids):
            if self._file is None:
                self._open_file()
            part = ids[: self._shard_tokens - self._in_file]
            self._put(part.astype(self._dtype).tobytes(), len(part))
            ids = ids[len(part) :]
            if self._in_file == self._shard_tokens:
                self._close_file()

    def _open_file(self) -> None:
        self._file = (self._folder / f"{self._split}-{len(self.files):05d}.bin").open("wb")
        self._sha256 = hashlib.sha256()
        self._in_file = 0

    def _put(self, content: bytes, n_tokens: int) -> None:
        assert self._file is not None
        self._file.write(content)
        self._sha256.update(content)
        self._in_file += n_tokens

    def _close_file(self) -> None:
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
