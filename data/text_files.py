"""A corpus of text files: one document per file, compressed or not."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from ..errors import RunError, UsageError
from ..files import check_file, read_bytes
from ..messages import reason_of
from .bad_rows import of_short_lines
from .cache import build_once, facts_of_files, file_states, fingerprint, room_check, takes_files
from .config import DataConfig
from .documents import (
    OUT,
    WITHIN,
    SurveyedCorpus,
    key_digest,
    name_hash,
    split_place,
    split_single_document,
    text_hasher,
)
from .encode import SPLITS, Document, Split, Text
from .suffixes import COMPRESSIONS, corpus_suffix
from .workers import in_processes, n_cores

# ---------------------------------------------------------------- compressed corpora
# Gzip (``.gz``) and Zstandard (``.zst``) around text, .json, .jsonl and .csv files.
#
# A compressed file counts as its content: its key, its hash and so its split are those of the uncompressed file.

_READ_BLOCK = 1 << 20


def _open_gz(path: Path) -> Any:
    return gzip.open(path, "rb")


def _open_zst(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{path}: .zst needs the pyarrow library; pip install pyarrow") from error
    return pyarrow.input_stream(str(path), compression="zstd")


_OPEN: dict[str, Callable[[Path], Any]] = {".gz": _open_gz, ".zst": _open_zst}


def is_compressed(path: Path) -> bool:
    """Return True if a file's name marks it as compressed."""
    return path.suffix.lower() in COMPRESSIONS


def content(path: Path, most: int) -> bytes:
    """Return a file's content, without its compression; see `birthmark.files.read_bytes`.

    Raises:
        UsageError: the file cannot be read, or its compression is damaged.
    """
    if not is_compressed(path):
        return read_bytes(path, most, UsageError)
    try:
        return b"".join(content_blocks(path))
    except MemoryError:
        raise UsageError(f"{path}: holds more than fits into memory; divide the file") from None


def unpacked(path: Path, cache_dir: Path) -> Path:
    """Return a file without its compression: itself, or a copy in ``cache_dir``, reused while the file is unchanged.

    Raises:
        UsageError: the file cannot be read, its compression is damaged, or a line is too long to be a row.
        RunError: the copy would take more than half of the free disk.
    """
    if not is_compressed(path):
        return path
    folder = cache_dir / f"unpacked-{fingerprint(file=file_states([path]), format=1)[:16]}"
    name = path.stem

    def build(scratch: Path) -> dict[str, Any]:
        check_room = room_check(cache_dir)
        with (scratch / name).open("wb") as file:
            for block in of_short_lines(path, content_blocks(path)):
                check_room(path, len(block))
                file.write(block)
        return {"files": facts_of_files(scratch)}

    build_once(folder, build)
    return folder / name


def content_blocks(path: Path, size: int = _READ_BLOCK) -> Iterator[bytes]:
    """Yield a file's content, without its compression, in blocks of at most ``size`` bytes.

    Raises:
        UsageError: the file cannot be read, or its compression is damaged.
    """
    check_file(path, fail=UsageError)
    open_file = _OPEN[path.suffix.lower()] if is_compressed(path) else _open_plain
    try:
        if is_compressed(path) and not path.stat().st_size:
            raise EOFError("empty")
        with open_file(path) as file:
            while block := file.read(size):
                yield block
    # gzip raises the second and third, pyarrow the first.
    except (OSError, EOFError, zlib.error) as error:
        if not is_compressed(path):
            raise UsageError(f"{path}: cannot be read ({reason_of(error)})") from None
        kind = path.suffix.lower().removeprefix(".")
        raise UsageError(f"{path}: damaged {kind} ({reason_of(error)}); copy it again, or leave it out") from None


def _open_plain(path: Path) -> Any:
    return path.open("rb")


# ---------------------------------------------------------------- a corpus of text files: one document per file

_BLOCK = 1 << 20
#: Bytes of the largest file that is held in memory as one text.
_MOST_WHOLE = 1 << 25
#: Bytes and files of a corpus whose survey is kept: one with less of both is read in a second.
_WORTH_KEEPING, _MANY_FILES = 1 << 28, 2000
#: Bytes of files that a process surveys before it reports.
_SURVEYED_AT_ONCE = 1 << 26


class KeyedPath(NamedTuple):
    """A file and the name that is its document's key."""

    key: str
    path: Path


class _Surveyed(NamedTuple):
    key: str
    path: Path
    sha256: bytes
    n_bytes: int
    content: int
    """`text_hash` of the text."""


class _Facts(NamedTuple):
    """Facts about a file's content, or the reason why it is left out."""

    problem: str
    sha256: bytes = b""
    n_bytes: int = 0
    content: int = 0


class FileCorpus(SurveyedCorpus):
    """Files in the order of their keys. See `birthmark.data.corpora.Corpus`.

    Files that hold NUL, are not UTF-8 or are empty are left out and counted. Files of one key share a split. A file of
    more than 32 MiB is read in blocks.

    Raises:
        UsageError: no file is left, or one cannot be read.
        RunError: a file changed between the survey and the reading.
    """

    def __init__(self, kind: str, files: Sequence[KeyedPath], config: DataConfig) -> None:
        super().__init__(config.val_fraction)
        self.kind = kind
        self._files = sorted(files)
        self._cache_dir, self._n_workers = config.cache_folder, config.n_workers or n_cores()

    @cached_property
    def _survey(self) -> tuple[list[_Surveyed], dict[str, int]]:
        kept: list[_Surveyed] = []
        skipped: Counter[str] = Counter()
        for (key, path), found in zip(self._files, self._facts(), strict=True):
            if found.problem:
                skipped[found.problem] += 1
            else:
                kept.append(_Surveyed(key, path, found.sha256, found.n_bytes, found.content))
        if not kept:
            reasons = ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "no files"
            raise UsageError(f"data.path: no text in this corpus, found {reasons}; name a folder of UTF-8 text")
        return kept, dict(skipped)

    def _facts(self) -> list[_Facts]:
        """Return the facts of every file; for a corpus of many bytes or files they are cached while the files are
        unchanged (`file_states`).
        """
        states = file_states([file.path for file in self._files])
        n_bytes = np.array([size for _, size, *_ in states], dtype=np.int64)
        if n_bytes.sum() < _WORTH_KEEPING and len(n_bytes) < _MANY_FILES:
            return [_facts_of(file.path) for file in self._files]
        folder = self._cache_dir / f"files-{fingerprint(files=states, format=2)[:16]}"
        group = np.cumsum(n_bytes) // _SURVEYED_AT_ONCE
        borders = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(group)]
        jobs = [[file.path for file in self._files[first:end]] for first, end in pairwise(borders)]

        def survey() -> list[_Facts]:
            found = dict(in_processes(_facts_of_all, jobs, self._n_workers))
            return [facts for number in range(len(jobs)) for facts in found[number]]

        def build(scratch: Path) -> dict[str, Any]:
            lines = [json.dumps([f.problem, f.sha256.hex(), f.n_bytes, f.content]) for f in survey()]
            (scratch / "files.jsonl").write_text("\n".join(lines), encoding="utf-8")
            return {"files": facts_of_files(scratch)}

        if not folder.is_dir() and not takes_files(self._cache_dir):
            return survey()
        build_once(folder, build)
        rows = map(json.loads, (folder / "files.jsonl").read_text(encoding="utf-8").splitlines())
        return [_Facts(problem, bytes.fromhex(sha256), size, content) for problem, sha256, size, content in rows]

    @cached_property
    def keys(self) -> np.ndarray:
        """See the base: by path."""
        hashes = [name_hash(file.key.encode("utf-8", errors="surrogateescape")) for file in self._survey[0]]
        return np.array(hashes, dtype=np.uint64)

    @cached_property
    @override
    def contents(self) -> np.ndarray:
        return np.array([file.content for file in self._survey[0]], dtype=np.uint64)

    @cached_property
    @override
    def sizes(self) -> np.ndarray:
        return np.array([file.n_bytes for file in self._survey[0]], dtype=np.int64)

    def skipped_in_survey(self) -> dict[str, int]:
        """Count the files left out: reason → number."""
        return self._survey[1]

    def content_hash(self) -> str:
        """Compute the SHA-256 over (key, SHA-256 of the content) of every document in order; reads every file once."""
        total = hashlib.sha256()
        for document in self._survey[0]:
            total.update(key_digest(document.key))
            total.update(document.sha256)
        return total.hexdigest()

    @override
    def piece(self, first: int, codes: np.ndarray) -> FilePiece:
        return FilePiece(self._survey[0][first : first + len(codes)], codes, self._val_fraction)


class FilePiece(NamedTuple):
    """Consecutive files of a corpus."""

    files: list[_Surveyed]
    codes: np.ndarray
    val_fraction: float

    def documents(self) -> Iterator[Text]:
        """Yield the documents with their splits."""
        for file, code in zip(self.files, self.codes.tolist(), strict=True):
            if code == OUT:
                continue
            if file.n_bytes > _MOST_WHOLE:
                yield from _long_texts(file, code, self.val_fraction)
                continue
            content = b"".join(_blocks(file.path))
            if hashlib.sha256(content).digest() != file.sha256:
                raise _changed(file.path)
            text = content.decode("utf-8")
            yield from (
                split_single_document(text, self.val_fraction) if code == WITHIN else [Document(SPLITS[code], text)]
            )


class FileText(NamedTuple):
    """Bytes ``first`` to ``end`` of a file too long for memory, as a `birthmark.data.encode.Text`."""

    split: Split
    path: Path
    first: int
    end: int
    sha256: bytes | None = None
    """SHA-256 of the part that is read, if known."""

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.blocks())

    def blocks(self) -> Iterator[str]:
        """Yield the text in blocks.

        Raises:
            RunError: the file changed since its survey.
        """
        decoder, total = codecs.getincrementaldecoder("utf-8")(), hashlib.sha256()
        try:
            for block in _blocks(self.path, self.first, self.end):
                total.update(block)
                yield decoder.decode(block)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise _changed(self.path) from None
        if self.sha256 not in (None, total.digest()):
            raise _changed(self.path)


def _long_texts(file: _Surveyed, code: int, val_fraction: float) -> Iterator[FileText]:
    """Yield a long file as text of its split; if it is the only one, it is cut in two like in
    `split_single_document`.
    """
    if code != WITHIN:
        yield FileText(SPLITS[code], file.path, 0, file.n_bytes, file.sha256)
        return
    whole = FileText("train", file.path, 0, file.n_bytes, file.sha256)
    boundary = split_place(sum(map(len, whole.blocks())), val_fraction)
    chars = place = 0
    line_chars = line_place = 0
    for block in whole.blocks():
        head = block[: boundary - chars]
        if (newline := head.rfind("\n")) >= 0:
            line_chars, line_place = chars + newline + 1, place + len(head[: newline + 1].encode("utf-8"))
        chars, place = chars + len(head), place + len(head.encode("utf-8"))
        if chars == boundary:
            break
    if line_chars > boundary // 2:
        place = line_place
    yield FileText("train", file.path, 0, place)
    yield FileText("val", file.path, place, file.n_bytes)


def walk(root: Path, excluded: Sequence[str] = ()) -> dict[str, list[KeyedPath]]:
    """Find files below ``root`` by lower-case suffix; their keys are their paths below it.

    Hidden files, hidden folders and folders named in ``excluded`` are left out; links to folders are not followed.

    Raises:
        UsageError: a folder cannot be listed.
    """
    found: dict[str, list[KeyedPath]] = {}
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name not in excluded)
        # Once for all of its files: a corpus has many, and each path costs as much as a look at the disk.
        below = Path(folder).relative_to(root).as_posix()
        prefix = "" if below == "." else f"{below}/"
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.setdefault(corpus_suffix(name), []).append(keyed(prefix + name, path))
    return found


def keyed(key: str, path: Path) -> KeyedPath:
    """Return a file with its key: the key of its content, if it is compressed."""
    return KeyedPath(
        str(PurePosixPath(key).with_suffix("")) if corpus_suffix(key) != path.suffix.lower() else key, path
    )


def _refuse(error: OSError) -> None:
    raise UsageError(f"data.path: cannot read {str(error.filename)!r} ({error.strerror}); make it readable") from error


def _changed(path: Path) -> RunError:
    return RunError(f"{path}: changed while it was being read; start again")


def _blocks(path: Path, first: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield bytes ``first`` to ``end`` of a file's content, block by block; UsageError names a file that cannot be
    read.
    """
    at = 0
    for block in content_blocks(path, _BLOCK):
        part = block[max(0, first - at) : None if end is None else max(0, end - at)]
        at += len(block)
        if part:
            yield part
        if end is not None and at >= end:
            return


def _facts_of_all(paths: list[Path]) -> list[_Facts]:
    return [_facts_of(path) for path in paths]


def _facts_of(path: Path) -> _Facts:
    """Survey a file and return its facts."""
    sha256, content, n_bytes = hashlib.sha256(), text_hasher(), 0
    decoder, is_text = codecs.getincrementaldecoder("utf-8")(), True
    for block in _blocks(path):
        if b"\0" in block:
            return _Facts("binary")
        if is_text:
            try:
                decoder.decode(block)
            except UnicodeDecodeError:
                is_text = False  # a byte that follows may still say that it is binary
        sha256.update(block)
        content.update(block)
        n_bytes += len(block)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        is_text = False
    if not n_bytes:
        return _Facts("empty")
    if not is_text:
        return _Facts("not UTF-8")
    return _Facts("", sha256.digest(), n_bytes, content.intdigest())
