"""Compressed corpora: gzip (``.gz``) and Zstandard (``.zst``) around text, .json, .jsonl and .csv files.

A compressed file counts as its content: its key, its hash and so its split are those of the uncompressed file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...files import check_file, read_bytes, reason_of
from ..cache import build_once, facts_of_files, file_states, fingerprint
from ..config import COMPRESSIONS

_BLOCK = 1 << 20


def _open_gz(path: Path) -> Any:
    return gzip.open(path, "rb")


def _open_zst(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UsageError(f"{path}: .zst needs the pyarrow library; pip install birthmark[datasets]") from error
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
        raise UsageError(f"{path}: holds more than fits into memory") from None


def unpacked(path: Path, cache_dir: Path) -> Path:
    """Return a file without its compression: itself, or a copy in ``cache_dir``, reused while the file is unchanged.

    Raises:
        UsageError: the file cannot be read, or its compression is damaged.
        RunError: the disk is full.
    """
    if not is_compressed(path):
        return path
    folder = cache_dir / f"unpacked-{fingerprint(file=file_states([path]), format=1)[:16]}"
    name = path.stem

    def build(scratch: Path) -> dict[str, Any]:
        with (scratch / name).open("wb") as file:
            file.writelines(content_blocks(path))
        return {"files": facts_of_files(scratch)}

    build_once(folder, build)
    return folder / name


def content_blocks(path: Path, size: int = _BLOCK) -> Iterator[bytes]:
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
