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


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling (file or folder) of ``path``; on success it takes ``path``'s place in one rename.

    A folder that already stands at ``path`` is replaced. On any error the temporary is removed, ``path`` as before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new = scratch / "new"
        yield new
        if new.is_file():
            with new.open("rb") as f:
                os.fsync(f.fileno())
        if path.is_dir():
            path.rename(scratch / "old")
        new.replace(path)
    except (OSError, SafetensorError) as error:
        raise _disk_full(path, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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
