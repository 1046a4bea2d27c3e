"""Token shards: a corpus's ids on disk, written once, piece by piece, and mapped into memory by every process."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from typing_extensions import TypedDict

from ..errors import RunError
from ..files import delete_folder, file_sha256, make_folder, read_json, write_json
from ..schema import Count, Sha256
from ..time_left import Pace, duration
from .batches import ShardedTokens
from .cache import META, Meta, build_once, explained, fingerprint
from .corpora import Corpus
from .documents import Piece, SurveyedCorpus
from .encode import SPLITS, Split, encode_documents
from .tokenizer import TextTokenizer
from .workers import in_processes, n_cores

_BLOCK = 1 << 22


def staged(folder: Path, meta: dict[str, Any], stage_to: Path, verify: str, schema: type) -> Path:
    """Return the copy, below ``stage_to``, of a folder that `build_once` built; copy it now, or find and verify it.

    The first process of a node copies, and compares every byte with the SHA-256 in ``meta``; the others wait for it.

    Args:
        folder: the shards.
        meta: facts about them.
        stage_to: a folder of this node only.
        verify: check of an existing copy.
        schema: schema of the facts.

    Raises:
        UsageError: ``stage_to`` cannot be written to.
        RunError: the copy's drive is full, or a file of the folder, or of the copy, is damaged.
    """

    def copy(scratch: Path) -> dict[str, Any]:
        for name, facts in meta["files"].items():
            if _copied(folder / name, scratch / name) != facts["sha256"]:
                raise RunError(
                    f"{folder / name}: damaged (its SHA-256 differs); delete this folder and start again, it will be "
                    "rebuilt"
                )
        return meta

    build_once(stage_to / folder.name, copy, verify, schema, field="data.stage_to")
    return stage_to / folder.name


def _copied(source: Path, target: Path) -> str:
    """Copy a file; return the SHA-256 of its bytes, in hex."""
    total = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as written:
        while block := read.read(_BLOCK):
            total.update(block)
            written.write(block)
        written.flush()
        os.fsync(written.fileno())
    return total.hexdigest()


# ---------------------------------------------------------------- a corpus as token ids, piece by piece
# Pieces finished before a kill are not done again.
#
# A piece is documents of about 4 MiB of text. Each has a file of ids for each split and, written last, its facts with
# their checksums. The places of division change none of the ids.

#: Processes wait for the last piece of all: by half a piece each, while a piece more costs milliseconds.
_PIECE_BYTES = 1 << 22
#: Pieces of one corpus; a very large one has larger pieces.
_MOST_PIECES = 1 << 12
#: In tokens: for short documents, checks and digests of each one would take longer than the ids.
_WRITTEN_AT_ONCE = 1 << 16


class SplitFacts(TypedDict):
    """Facts about one split of a corpus, or of a piece of one."""

    documents: Count
    tokens: Count
    bytes: Count
    """UTF-8, of the text."""


class SplitOfPiece(SplitFacts):
    """Facts about one split of a piece."""

    sha256: Sha256
    """SHA-256 of the file of ids."""


class PieceFacts(TypedDict):
    """Facts about a finished piece."""

    splits: dict[str, SplitOfPiece]


class _Job(NamedTuple):
    piece: Piece
    number: int
    folder: Path
    tokenizer: Path
    dtype: str
    vocab_size: int


def ids_file(folder: Path, number: int, split: str) -> Path:
    """Return the file of a piece's ids."""
    return folder / f"{number:06d}-{split}.bin"


def piece_bytes(n_bytes: int) -> int:
    """Return the bytes of text in a piece, for a corpus of ``n_bytes``."""
    return max(_PIECE_BYTES, n_bytes // _MOST_PIECES)


def tokenise_pieces(
    corpus: SurveyedCorpus, tokenizer: TextTokenizer, folder: Path, dtype: str, n_workers: int
) -> list[PieceFacts]:
    """Tokenise all documents into files below ``folder``; existing pieces are checked and kept.

    Args:
        corpus: the documents.
        tokenizer: tokenizer of the run.
        folder: used only for this corpus, its splits, this tokenizer and this `piece_bytes`.
        dtype: type of the ids in the files.
        n_workers: processes; 0 takes one per core. One process, or one piece, uses all cores by itself.

    Raises:
        RunError: the tokenizer gave an id outside its vocabulary, or the disk is full.
    """
    make_folder(folder)
    # Of builds that failed or were killed: on a full disk each start would take room and leave it to the next.
    for begun in folder.glob(".*.bin.*"):
        begun.unlink(missing_ok=True)
    path = folder / "tokenizer.json"
    path.write_bytes(tokenizer.content)
    pieces = list(corpus.pieces(piece_bytes(corpus.n_bytes)))
    found = {number: facts for number in range(len(pieces)) if (facts := _finished(folder, number)) is not None}
    jobs = [
        _Job(piece, number, folder, path, dtype, tokenizer.vocab_size)
        for number, (_, piece) in enumerate(pieces)
        if number not in found
    ]
    with _progress(sum(pieces[job.number][0] for job in jobs)) as advance:
        for index, facts in in_processes(tokenise_piece, jobs, n_workers or n_cores()):
            found[jobs[index].number] = facts
            advance(pieces[jobs[index].number][0])
    return [found[number] for number in range(len(pieces))]


def tokenise_piece(job: _Job) -> PieceFacts:
    """Write one piece: ids of both splits, then its facts."""
    with explained(job.folder):
        writers = {split: _IdsWriter(job, split) for split in SPLITS}
        try:
            for encoded in encode_documents(job.piece.documents(), _tokenizer(job.tokenizer)):
                writers[encoded.split].append(encoded.ids, encoded.n_bytes, is_end=encoded.is_end)
            for writer in writers.values():
                writer.flush()
        finally:
            for writer in writers.values():
                writer.close()
        facts: PieceFacts = {"splits": {split: writer.finished() for split, writer in writers.items()}}
        write_json(_facts_file(job.folder, job.number), facts)
    return facts


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> TextTokenizer:
    return TextTokenizer.load(path)


def _facts_file(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _finished(folder: Path, number: int) -> PieceFacts | None:
    """Read the facts of a finished piece; None if it is missing, or damaged and must be done again."""
    if not _facts_file(folder, number).is_file():
        return None
    try:
        facts: PieceFacts = read_json(_facts_file(folder, number), PieceFacts)
        whole = all(
            file_sha256(ids_file(folder, number, split)) == facts["splits"][split]["sha256"] for split in SPLITS
        )
    except (RunError, OSError, KeyError):
        return None
    return facts if whole else None


class _IdsWriter:
    """Writer of one split of a piece."""

    def __init__(self, job: _Job, split: Split) -> None:
        self._path = ids_file(job.folder, job.number, split)
        # Another process may still be busy with it for a moment, whose starter was killed.
        self._partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._file: BinaryIO = self._partial.open("wb")
        self._sha256 = hashlib.sha256()
        self._dtype, self._vocab_size = job.dtype, job.vocab_size
        self._documents = self._tokens = self._bytes = 0
        self._waiting: list[np.ndarray] = []
        self._n_waiting = 0

    def append(self, ids: np.ndarray, n_bytes: int, *, is_end: bool) -> None:
        self._waiting.append(ids)
        self._n_waiting += len(ids)
        self._documents += is_end
        self._tokens += len(ids)
        self._bytes += n_bytes
        if self._n_waiting >= _WRITTEN_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the waiting ids."""
        if not self._waiting:
            return
        ids = np.concatenate(self._waiting)
        self._waiting, self._n_waiting = [], 0
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise RunError(
                f"data.tokenizer: gave id {int(ids.max())}, its vocabulary has {self._vocab_size} tokens; "
                "the tokenizer file contradicts itself, use another"
            )
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._sha256.update(content)

    def close(self) -> None:
        self._file.close()

    def finished(self) -> SplitOfPiece:
        self._partial.replace(self._path)
        return {
            "documents": self._documents,
            "tokens": self._tokens,
            "bytes": self._bytes,
            "sha256": self._sha256.hexdigest(),
        }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar with MB/s on a terminal, or a line now and then; yields the function that advances it by bytes."""
    # The processes that tokenise show nothing: they would load this for a quarter of their start.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    pace, done = Pace(total), 0
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=total)

        def advance(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            progress.advance(task, n_bytes)
            if progress.disable and done < total and pace.is_due():
                left = duration(pace.seconds_left(done) or 0)
                print(f"tokenising: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, about {left} left", file=sys.stderr)

        yield advance


# ---------------------------------------------------------------- token shards
# A corpus's ids on disk, written once, mapped into memory by every process.

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
            # None: a tokenizer may give no token for a text, as for white space.
            "bytes_per_token": splits["val"]["bytes"] / n_val if (n_val := splits["val"]["tokens"]) else None,
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
    (`birthmark.data.shards`).

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
