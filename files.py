"""Files that are written whole or not at all, and JSON that says what is wrong with it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .errors import RunError


def _disk_full(path: Path, error: Exception) -> Exception:
    """``error`` as a RunError that names ``path`` if the disk is full, else as it is."""
    # safetensors hands on what the system said as text.
    if getattr(error, "errno", None) == errno.ENOSPC or f"os error {errno.ENOSPC}" in str(error):
        return RunError(f"{path}: no space left on the device; free some, then go on")
    return error


# ── what outlasts a crash ────────────────────────────────────────────────────────────────────────────────────────────


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` outlast a power cut; what the named files hold is :func:`sync_tree`'s business."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, which outlast a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_tree(path: Path) -> None:
    """Make a file, or a folder with all that is in it, outlast a power cut."""
    if not path.is_dir():
        with path.open("rb") as f:
            os.fsync(f.fileno())
        return
    for inner in path.iterdir():
        sync_tree(inner)
    sync_folder(path)


def _aside(path: Path) -> Path:
    """Where a folder stands while another takes its place."""
    return path.with_name(f".{path.name}.replaced")


def _of_aside(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced"))


def find_folder(path: Path) -> Path:
    """Where the folder ``path`` is now: there, or aside if a process died while it replaced it; else ``path``."""
    # Asked twice: a live process may finish between two looks.
    return next((there for there in (path, _aside(path), path) if there.exists()), path)


def list_folders(parent: Path, pattern: str) -> list[Path]:
    """Folders of ``parent`` whose names match ``pattern``, sorted, with those that :func:`find_folder` finds aside."""
    there = {*parent.glob(pattern)} | {_of_aside(folder) for folder in parent.glob(f".{pattern}.replaced")}
    # A live process may have put a new one in place between the two looks.
    return sorted(there | {*parent.glob(pattern)})


def put_in_place(new: Path, path: Path) -> None:
    """Rename ``new``, which is synced, to its sibling or nephew ``path``, and make that outlast a power cut.

    A folder that stands at ``path`` is replaced: it is put aside, where :func:`find_folder` finds it, and deleted when
    the new one is in place. So one of the two is there whole at any moment. Only one process at a time may replace a
    folder.
    """
    aside = _aside(path)
    if path.is_dir():
        delete_folder(aside)
        path.rename(aside)
        try:
            new.replace(path)
        except OSError:
            aside.rename(path)
            raise
    else:
        new.replace(path)
    sync_folder(path.parent)
    if path.is_dir():
        delete_folder(aside)


def delete_folder(folder: Path) -> None:
    """Delete a folder, if it is there, such that a crash on the way leaves nothing that looks like one."""
    if not folder.exists():
        return
    prefix = f".{folder.name.removeprefix('.')}."
    hidden = Path(tempfile.mkdtemp(prefix=prefix, suffix=".deleted", dir=folder.parent))
    folder.rename(hidden / folder.name)
    # What another process has open may stay for now, on some file systems: it is a leftover.
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(parent: Path, pattern: str) -> None:
    """Remove what writers of ``parent / pattern`` that died have left, and bring back what they had put aside.

    The caller knows that no other process is writing there.
    """
    for aside in parent.glob(f".{pattern}.replaced"):
        if not _of_aside(aside).exists():
            aside.rename(_of_aside(aside))
    for left in parent.glob(f".{pattern}.*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling (file or folder) of ``path``; on success it takes ``path``'s place and is on the disk.

    A folder that already stands at ``path`` is replaced (:func:`put_in_place`). On any error the temporary is removed,
    ``path`` as before.
    """
    make_folder(path.parent)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new = scratch / "new"
        yield new
        sync_tree(new)
        put_in_place(new, path)
    except (OSError, SafetensorError) as error:
        raise _disk_full(path, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ── text and JSON ────────────────────────────────────────────────────────────────────────────────────────────────────


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")


def strict(value: Any) -> Any:
    """``value`` as JSON can say it: numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    write_text(path, json.dumps(strict(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON; RunError names the file if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: missing") from None
    except ValueError as error:
        raise RunError(f"{path}: damaged JSON ({error})") from None
