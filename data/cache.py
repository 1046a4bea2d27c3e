"""Folders that are built once, by one process, whole or not at all, and verified at every reuse."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired

from filelock import Timeout
from safetensors import SafetensorError
from typing_extensions import TypedDict

from ..errors import RunError, UsageError
from ..files import (
    check_file,
    check_no_holes,
    content_digest,
    file_sha256,
    path_below,
    read_json,
    strict,
    write_failure,
)
from ..locks import hold_lock
from ..schema import Count, Sha256

META = "meta.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)
_SCRATCH = ".tmp-"
_SCRATCH_NAME = re.compile(r"([a-z]+-[0-9a-f]{16})\.tmp-[0-9a-f]{8}")  # nothing else may be removed


def fingerprint(**parts: Any) -> str:
    """Compute the SHA-256, in hex, of named JSON-able values."""
    return content_digest(parts)


class FileFacts(TypedDict):
    """Facts about a file beside ``meta.json``."""

    bytes: Count
    sha256: Sha256
    tokens: NotRequired[Count]


def facts_of_files(folder: Path) -> dict[str, FileFacts]:
    """Compute the ``files`` entry of a finished folder's facts: size and SHA-256 of each file that is in it now."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in sorted(folder.iterdir())}


class Meta(TypedDict):
    """``meta.json`` of any folder that is built once; each kind of folder adds its own keys."""

    files: dict[str, FileFacts]
    checksum: Sha256


class _HashesMeta(Meta):
    sha256: list[Sha256]


def files_sha256(paths: Sequence[Path], cache_dir: Path) -> list[str]:
    """Compute the SHA-256 of each file's bytes, in hex, read once as long as the files are unchanged.

    The first process that asks reads them, the others wait; each node with its own cache directory reads them. Files
    count as unchanged while their paths, sizes, inodes and times are; one of the times is that of the last change of
    any kind, which no program can set. If ``cache_dir`` is not writable, every process reads.
    """
    folder = cache_dir / f"hashes-{fingerprint(files=file_states(paths), format=1)[:16]}"
    if not folder.is_dir() and not takes_files(cache_dir):
        return [file_sha256(path) for path in paths]
    found = build_once(folder, lambda _: {"sha256": [file_sha256(p) for p in paths], "files": {}}, schema=_HashesMeta)
    if len(found["sha256"]) != len(paths):
        raise RunError(f"{folder / META}: damaged ({len(found['sha256'])} hashes of {len(paths)} files); {REBUILD}")
    return list(found["sha256"])


def file_states(paths: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Return facts that change whenever a file does: path, size, inode, times of the last changes.

    Raises:
        UsageError: one cannot be read.
    """
    for path in paths:
        check_file(path, fail=UsageError)
        check_no_holes(path, UsageError)
    # All folders above a file are looked at once, not for every file in it.
    folders = {folder: folder.resolve() for folder in {path.parent for path in paths}}
    stats = [
        (str(path.resolve() if path.is_symlink() else folders[path.parent] / path.name), path.stat()) for path in paths
    ]
    return [(name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats]


def takes_files(folder: Path) -> bool:
    """Return True if a cache directory can be written to; one that is shared read-only cannot."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def build_once(
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
    verify: str = "checksum",
    schema: type = Meta,
    field: str = "data.cache_dir",
) -> dict[str, Any]:
    """Build a folder unless it exists, and return the facts that ``build`` returned.

    Args:
        folder: the finished folder, named ``word-`` and 16 hex digits that hash everything its content depends on.
        build: fills the empty folder that it gets and returns JSON-able facts about it, with a ``files`` entry:
            name → ``{"bytes": size, "sha256": hex, ...}``.
        verify: ``checksum`` reads every byte of a folder that is reused, ``size`` checks only file sizes.
        schema: schema of the facts, a `Meta`.
        field: field of the config that names the folder.

    Processes that want one folder wait for the first of them. The build happens in a temporary sibling, which is
    renamed at the end, so a folder of this name is complete; siblings that dead builds left behind are removed.

    Raises:
        UsageError: the cache cannot be written to.
        RunError: the disk is full, or a reused folder is damaged.
    """
    # An existing folder is complete, and a cache that is shared read-only has no room for a lock.
    built = folder.is_dir()
    if not built:
        with explained(folder, field):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with hold_lock(_lock_path(folder)):
                built = folder.is_dir()
                if not built:
                    _remove_dead_builds(folder)
                    _build(folder, build)
    return read_built(folder, verify if built else "size", schema)


@contextlib.contextmanager
def explained(folder: Path, field: str = "data.cache_dir") -> Iterator[None]:
    """Turn failures of the directory that ``field`` names into one line; other errors pass."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number or 0)
        if number in _NO_ROOM:
            raise RunError(
                f"{folder}: no room left to write ({reason}); free some, or set {field} elsewhere"
            ) from error
        if number in _NOT_WRITABLE:
            raise UsageError(
                f"{field}: cannot write to {str(folder.parent)!r} ({reason}); name another folder"
            ) from error
        # A broken device; and libraries that say why in words alone.
        if isinstance(found := write_failure(folder, error), RunError):
            raise RunError(f"{found}, or set {field} elsewhere") from error
        raise


def room_check(folder: Path) -> Callable[[object, int], None]:
    """Return a function to call before each part of a copy is written, with the name of the file and the part's bytes.

    It raises RunError for more than half of the disk that is free now: a file of a megabyte may hold a thousand, and
    nothing but its reading says so.
    """
    free, total = shutil.disk_usage(folder).free, 0

    def check(name: object, n_bytes: int) -> None:
        nonlocal total
        total += n_bytes
        if total > free // 2:
            raise RunError(
                f"{name}: takes more than half of the {free / 1e9:,.1f} GB free in {folder} when it is unpacked; free "
                "some, or set data.cache_dir elsewhere"
            )

    return check


def _build(folder: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    scratch = folder.with_name(f"{folder.name}{_SCRATCH}{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        meta = strict(build(scratch))
        meta["checksum"] = fingerprint(meta=meta)
        with (scratch / META).open("w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


REBUILD = "delete this folder and start again, it will be rebuilt"


def read_built(
    folder: Path,
    verify: str,
    schema: type,
    mend: str = REBUILD,
    size_of: Callable[[Path], int] = lambda path: path.stat().st_size,
) -> dict[str, Any]:
    """Verify a folder that `build_once` built, on this machine or another, and return its facts.

    Raises:
        RunError: the file is damaged; the message ends with ``mend``.
    """
    meta = read_json(folder / META, schema, mend)
    if meta.pop("checksum") != fingerprint(meta=meta):
        raise RunError(f"{folder / META}: damaged (its checksum differs); {mend}")
    for name, facts in meta["files"].items():
        path = path_below(folder, name, lambda why: RunError(f"{folder / META}: damaged (files has {why}); {mend}"))
        check_file(path)
        if (size := size_of(path)) != facts["bytes"]:
            raise RunError(f"{path}: damaged ({size} bytes, not {facts['bytes']}); {mend}")
        if verify == "checksum" and file_sha256(path) != facts["sha256"]:
            raise RunError(f"{path}: damaged (its SHA-256 differs from {META}); {mend}")
    return meta


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _remove_dead_builds(folder: Path) -> None:
    """Remove temporary siblings whose builder is gone: its lock is free, or held by this process."""
    for scratch in folder.parent.glob(f"*{_SCRATCH}*"):
        named = _SCRATCH_NAME.fullmatch(scratch.name)
        if named is None:
            continue
        owner = folder.with_name(named[1])
        if owner == folder:
            shutil.rmtree(scratch, ignore_errors=True)
            continue
        with contextlib.suppress(Timeout), hold_lock(_lock_path(owner), timeout=0):
            shutil.rmtree(scratch, ignore_errors=True)
