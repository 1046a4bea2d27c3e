"""Files that are written whole or not at all, and read only if they are files, of a size, and JSON of a schema."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import RunError, UsageError
from .messages import one_line
from .schema import SchemaError, checked

#: Reasons why a device takes no more bytes, with the mend.
_NO_ROOM = {
    errno.ENOSPC: "no space left on the device; free some, then go on",
    errno.EDQUOT: "the disk quota is used up; free some space or have it raised, then go on",
    errno.EFBIG: "larger than a file may be (ulimit -f, or the file system's limit); have it raised, then go on",
    errno.EIO: "the device failed to write (input/output error); mend it or write elsewhere, then go on",
}


def write_failure(path: Path, error: Exception) -> Exception:
    """Turn the error of a full, limited or broken device into a RunError that names ``path``; return other errors
    unchanged.
    """
    number, said = getattr(error, "errno", None), str(error)
    # safetensors passes on the system's message as text; numpy reports the number of bytes written.
    if (named := re.search(r"os error (\d+)", said)) is not None:
        number = int(named[1])
    elif number is None and isinstance(error, OSError) and re.search(r"requested and \d+ written", said):
        return RunError(
            f"{path}: not written whole ({one_line(said)} bytes): the device is full, or a limit is reached"
        )
    return RunError(f"{path}: {_NO_ROOM[number]}") if number in _NO_ROOM else error


# ── what outlasts a crash ────────────────────────────────────────────────────────────────────────────────────────────


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` outlast a power cut; :func:`sync_tree` does so for the content of the files."""
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, which outlast a power cut.

    Raises:
        UsageError: the path holds a NUL character.
    """
    _refuse_nul(folder)
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
    """Return the path that a folder has while another takes its place."""
    path = path.absolute()  # of "." too
    return path.with_name(f".{path.name}.replaced")


def _of_aside(aside: Path) -> Path:
    return aside.with_name(aside.name.removeprefix(".").removesuffix(".replaced"))


def find_folder(path: Path) -> Path:
    """Return the present path of the folder ``path``: ``path``, or its path aside if a process died while replacing it;
    ``path`` if neither exists.
    """
    # Asked twice: a live process may finish between two looks.
    return next((there for there in (path, _aside(path), path) if there.exists()), path)


def list_folders(parent: Path, pattern: str) -> list[Path]:
    """List the folders of ``parent`` whose names match ``pattern``, sorted, with those that :func:`find_folder` finds
    aside.
    """
    there = {*parent.glob(pattern)} | {_of_aside(folder) for folder in parent.glob(f".{pattern}.replaced")}
    # A live process may have put a new one in place between the two looks.
    return sorted(there | {*parent.glob(pattern)})


def put_in_place(new: Path, path: Path) -> None:
    """Rename ``new``, which is synced, to its sibling or nephew ``path``, and make that outlast a power cut.

    A folder that stands at ``path`` is replaced: it is put aside, where :func:`find_folder` finds it, and deleted when
    the new one is in place. So one of the two is there whole at any moment. Only one process at a time may replace a
    folder.

    Raises:
        UsageError: ``new`` is a file, and a folder stands at ``path``.
    """
    aside = _aside(path)
    if path.is_dir():
        if not new.is_dir():
            raise UsageError(f"{path}: is a folder, where a file is to be written; name a file")
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
    """Delete a folder if it exists, so that a crash on the way leaves nothing that looks like a complete one."""
    if not folder.exists():
        return
    prefix = f".{folder.name.removeprefix('.')}."
    hidden = Path(tempfile.mkdtemp(prefix=prefix, suffix=".deleted", dir=folder.parent))
    folder.rename(hidden / folder.name)
    # On some file systems a file that another process has open may stay for now, as a leftover.
    shutil.rmtree(hidden, ignore_errors=True)


def remove_leftovers(parent: Path, pattern: str) -> None:
    """Remove the leftovers of dead writers of ``parent / pattern``, and bring back the folders that they had put aside.

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
    _refuse_nul(path)
    make_folder(path.parent)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        new = scratch / "new"
        yield new
        sync_tree(new)
        put_in_place(new, path)
    except (OSError, SafetensorError) as error:
        raise write_failure(path, error) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ── text and JSON ────────────────────────────────────────────────────────────────────────────────────────────────────


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")


def strict(value: Any) -> Any:
    """Return ``value`` with numbers that are not finite replaced by None, so that strict JSON can hold it."""
    if isinstance(value, Mapping):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite_or_nan(value: Any) -> float:
    """Return a logged value as a finite float, or NaN."""
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if finite else math.nan


#: The first characters of text that a spreadsheet computes, and numbers, which may begin with one of them.
_FORMULA, _NUMBER = tuple("=+-@\t\n＝＋－＠"), re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf|nan)")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Write rows as CSV, the form of every table of the package.

    Text that a spreadsheet would compute gets an apostrophe in front, which spreadsheets do not show. Numbers stay as
    they are; None is an empty cell.
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([_csv_cell(value) for value in row] for row in rows)
    return buffer.getvalue()


def _csv_cell(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    # The writer does not quote a carriage return, at which readers end a row.
    text = str(value).replace("\r", "\\r")
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    write_text(path, json.dumps(strict(value), indent=2, ensure_ascii=False) + "\n")


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Bytes of the largest file of each kind that is read whole.
TEXT_BYTES, JSON_BYTES = 1 << 28, 1 << 28
#: Commas and opening brackets of any JSON of this package, in strings too: the largest tokenizers have two million.
MOST_MARKS = 1 << 22
#: Lists and objects in one another, in any JSON or YAML of this package.
MOST_NESTED = 50


def _then(mend: str) -> str:
    """Return the end of a message with the remedy, "" without one."""
    return f"; {mend}" if mend else ""


def check_file(path: Path, most: int | None = None, fail: type[Exception] = RunError, mend: str = "") -> None:
    """Refuse a path that cannot be read as a file: a folder, a pipe, a device, a link to itself, more than ``most``
    bytes.

    Raises:
        RunError: or ``fail``, in one line with the path.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        raise fail(f"{path}: missing{_then(mend)}") from None
    except (OSError, ValueError) as error:
        raise fail(f"{one_line(path)}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(found.st_mode):
        what = next((words for is_kind, words in _NOT_FILES if is_kind(found.st_mode)), "no file")
        raise fail(f"{path}: is {what}; put the file there")
    if most is not None and found.st_size > most:
        raise fail(f"{path}: has {found.st_size:,} bytes, and {most:,} are read at most")


#: Bytes without content that a file of a corpus may have: some file systems store no blocks of zeros.
_MOST_HOLES = 1 << 20


def check_no_holes(path: Path, fail: type[Exception] = RunError) -> None:
    """Refuse a file that says that it is longer than its content: it takes no room on the disk, and hours to read.

    Raises:
        RunError: or ``fail``, in one line with the path.
    """
    facts = path.stat()
    # A file of as many blocks as bytes is not opened for this. A block has 512 bytes, whatever the file system says.
    if not hasattr(os, "SEEK_HOLE") or facts.st_blocks * 512 >= facts.st_size:
        return
    with path.open("rb", buffering=0) as file:
        at, holes, size = 0, 0, file.seek(0, os.SEEK_END)
        try:
            while holes < _MOST_HOLES and (hole := file.seek(at, os.SEEK_HOLE)) < size:
                # Past the last content there is none to seek, which is an error of its own.
                holes += size - hole
                at = file.seek(hole, os.SEEK_DATA)
                holes -= size - at
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise fail(f"{path}: cannot be read ({error.strerror})") from None
    if holes >= _MOST_HOLES:
        raise fail(
            f"{path}: has {size:,} bytes, of which {holes:,} or more are a hole without content; cut it, or copy it "
            "whole (cp --sparse=never)"
        )


_NOT_FILES = (
    (stat.S_ISDIR, "a folder, not a file"),
    (stat.S_ISFIFO, "a pipe, not a file"),
    (stat.S_ISSOCK, "a socket, not a file"),
    (stat.S_ISCHR, "a device, not a file"),
    (stat.S_ISBLK, "a device, not a file"),
)


def read_bytes(path: Path, most: int = TEXT_BYTES, fail: type[Exception] = RunError, mend: str = "") -> bytes:
    """Read a file's bytes; RunError, or ``fail``, names it (see :func:`check_file`)."""
    check_file(path, most, fail, mend)
    try:
        return path.read_bytes()
    except OSError as error:
        raise fail(f"{path}: cannot be read ({error.strerror})") from None
    except MemoryError:
        raise fail(f"{path}: has {path.stat().st_size:,} bytes, more than fit into memory") from None


def read_text(path: Path, most: int = TEXT_BYTES, fail: type[Exception] = RunError, mend: str = "") -> str:
    """Read a file as UTF-8; RunError, or ``fail``, names it."""
    try:
        return read_bytes(path, most, fail, mend).decode("utf-8")
    except UnicodeDecodeError as error:
        raise fail(f"{path}: not UTF-8 text (byte {error.start})") from None


def parse_json(text: str, *, not_finite: bool = False, unrepeated: bool = False) -> Any:
    """Parse strict JSON, or with ``not_finite`` also NaN and Infinity, which some writers produce.

    Args:
        text: the JSON.
        not_finite: accept numbers that are not finite.
        unrepeated: refuse an object with a name twice, of which another reader may take the other value.

    Raises:
        ValueError: the text is damaged, nested more than `MOST_NESTED` deep, has more than `MOST_MARKS` commas
            and brackets or a name twice, or holds text that UTF-8 cannot encode.
    """
    # Each value but the first follows one of these, and a small one takes thirty times its bytes.
    if sum(map(text.count, "[{,")) > MOST_MARKS:
        raise ValueError(f"holds more than {MOST_MARKS:,} commas and brackets")
    hook = _unrepeated if unrepeated else None
    try:
        value = json.loads(text, parse_constant=float if not_finite else _refuse_constant, object_pairs_hook=hook)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_NESTED} deep") from None
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        if depth > MOST_NESTED:
            raise ValueError(f"nested more than {MOST_NESTED} deep")
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("holds half a character (a lone surrogate)") from None
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {one_line(name, 60)!r} twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no JSON")


def read_json(path: Path, schema: Any = Any, mend: str = "") -> Any:
    """Read JSON and compare it with its schema (schema.py).

    Args:
        path: the file.
        schema: the type that its content must have.
        mend: remedy for a missing or damaged file, for the message.

    Raises:
        RunError: the file is missing, damaged or holds something else; it names file and field.
    """
    text = read_text(path, JSON_BYTES, mend=mend)
    try:
        return checked(parse_json(text), schema)
    except SchemaError as error:
        raise RunError(f"{path}: damaged ({error}){_then(mend)}") from None
    except ValueError as error:
        raise RunError(f"{path}: damaged JSON ({error}){_then(mend)}") from None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(content: Any) -> str:
    """Return the SHA-256, in hex, of the JSON value ``content``, whatever its layout and the order of its fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_sealed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON atomically, with the :func:`content_digest` of the rest as its last field, ``sha256``."""
    content = json.loads(json.dumps(strict(value)))
    write_json(path, content | {"sha256": content_digest(content)})


def read_sealed_json(path: Path, schema: Any, mend: str = "") -> Any:
    """Read the content that :func:`write_sealed_json` wrote, without ``sha256``; older files have none.

    Raises:
        RunError: as for :func:`read_json`, and if the content was changed since it was written.
    """
    content = read_json(path, schema, mend)
    if content.pop("sha256", None) not in (None, content_digest(content)):
        raise RunError(f"{path}: damaged (its SHA-256 is not the one in it){_then(mend)}")
    return content


def save_tensors(save: Callable[..., object], tensors: Mapping[str, Any], path: Path, **more: Any) -> None:
    """Write a safetensors file with the permissions of any new file.

    The library makes its files readable to their owner alone, whatever the umask says.

    Args:
        save: ``save_file`` of safetensors for the kind of tensors.
        tensors: tensors by name.
        path: new.
        more: further arguments of ``save``.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save(tensors, path, **more)
    path.chmod(mode)


#: Bytes of the longest header that the format of safetensors allows.
LONGEST_HEADER = 100_000_000


def check_tensor_file(path: Path, data_bytes: int | None = None, mend: str = "") -> tuple[dict[str, Any], int]:
    """Refuse a safetensors file that is longer than its header says, before anything reads it to its end.

    A file without content takes no room on the disk, however long it says that it is, and minutes to read.

    Args:
        path: the file.
        data_bytes: bytes of tensors that it may have, where another file says so.
        mend: remedy, for the message.

    Returns:
        The header, of which only the ends of tensors are checked, and the offset of the tensors' bytes.

    Raises:
        RunError: it is missing, no file, or longer.
    """
    check_file(path, mend=mend)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= min(LONGEST_HEADER, size - 8) else b""
    try:
        header = parse_json(text.decode("utf-8"), unrepeated=True)
        end = max((facts["data_offsets"][1] for name, facts in header.items() if name != "__metadata__"), default=0)
        said = 8 + length + int(end)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        reason = one_line(error) if text else f"it would have {length:,} bytes"
        raise RunError(f"{path}: damaged (its header: {reason}){_then(mend)}") from None
    if size > said:
        raise RunError(f"{path}: damaged (it has {size:,} bytes, and its header says {said:,}){_then(mend)}")
    if data_bytes is not None and said - length - 8 > data_bytes:
        raise RunError(f"{path}: damaged (it has {end:,} bytes of tensors, not {data_bytes:,}){_then(mend)}")
    return header, 8 + length


@contextmanager
def tensor_file(path: Path, framework: str, mend: str = "") -> Iterator[Any]:
    """Open a safetensors file; only the tensors that are read are loaded.

    Raises:
        RunError: the file is missing, no file, or damaged, also when a tensor is read in the block; the message names
            it.
    """
    check_tensor_file(path, mend=mend)
    try:
        with safe_open(path, framework=framework) as opened:
            yield opened
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{path}: damaged ({one_line(error)}){_then(mend)}") from None


#: Characters that no name from outside may have: they do not print, or are half of one.
_NOT_IN_NAMES = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_DRIVE = re.compile("[A-Za-z]:")
#: Bytes of UTF-8 of a name, and of a path of several.
_LONGEST_NAME, _LONGEST_PATH = 255, 4096


def path_below(folder: Path, key: str, fail: Callable[[str], Exception], *, nested: bool = False) -> Path:
    """Join a folder and the name of a file that somebody else chose: in an index, a listing, an archive, a URL.

    Args:
        folder: that the file lies in.
        key: name of the file.
        fail: function that makes the error from the key and the reason of the refusal, as in ``'../a', outside of this
            folder``.
        nested: allow folders between the two, divided by ``/``.

    Raises:
        Exception: as ``fail`` made it, where the key is absolute, leads out of the folder, or is no name of a file on
            every system.
    """
    parts = key.split("/") if nested else [key]
    if ".." in parts or "\\" in key or _DRIVE.match(key) or key.startswith("/") or ("/" in key and not nested):
        raise fail(f"{one_line(key)!r}, outside of this folder")
    empty = any(part in ("", ".") for part in parts)
    long = any(len(part.encode(errors="replace")) > _LONGEST_NAME for part in parts)
    if empty or long or len(key.encode(errors="replace")) > _LONGEST_PATH or _NOT_IN_NAMES.search(key):
        raise fail(f"{one_line(key, 60)!r}, which cannot be a file's name")
    return folder.joinpath(*parts)


#: Time, in seconds, for which a network's file system may remember that something was missing: NFS's by default.
SEEN_S = 60.0


def appears(path: Path, seconds: float) -> bool:
    """Wait until a file or folder that another machine has made is seen; return False if it is not seen in time."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def user_path(text: str | Path) -> Path:
    """Return the path that a person gave, with ``~`` and ``~name`` resolved.

    Raises:
        UsageError: nobody of that name has a home here, or the path holds a NUL character.
    """
    _refuse_nul(text)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{one_line(text)}: no home of such a user; give another path") from None


def _refuse_nul(path: str | Path) -> None:
    """Raise UsageError for a path that no system can open."""
    if "\0" in str(path):
        raise UsageError(f"{one_line(path)}: a path cannot hold a NUL character; give another one")
