"""A corpus as token ids, piece by piece: pieces finished before a kill are not done again.

A piece is documents of about 4 MiB of text. Each has a file of ids for each split and, written last, its facts with
their checksums. The places of division change none of the ids.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypedDict

import numpy as np

from ...errors import RunError
from ...files import file_sha256, make_folder, read_json, write_json
from ...pace import Pace, duration
from ...schema import Count, Sha256
from ..cache import explained
from ..encode import SPLITS, Split, encode_documents
from ..survey.documents import Piece, SurveyedCorpus
from ..tokenizer import TextTokenizer
from .workers import in_processes, n_cores

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
