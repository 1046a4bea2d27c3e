"""Rows of tables that are damaged: found, named with file and line, and left out up to ``data.max_bad_rows``.

A row of a .jsonl file is bad if its line is not a JSON object, not UTF-8, or holds anything but text (or null) in the
text's column; a row of a .csv file if it has more fields than the header, or is not UTF-8. These are found here. A row
of any table is bad if its text is not UTF-8, which `birthmark.data.row_corpora` finds; a damaged file is named.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..messages import one_line, reason_of
from .cache import Meta, build_once, facts_of_files, file_states, fingerprint, takes_files
from .suffixes import corpus_suffix

_COPIED = 1 << 20
#: Bytes of the longest row of a file of lines: readers hold several times as much.
_MOST_LINE = 1 << 27
#: UTF-8's.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
#: Characters of the longest field: the most that `csv` takes on every platform.
_MOST_FIELD = (1 << 31) - 1
MEND = "mend it, or raise data.max_bad_rows, which leaves such rows out"


class _BadRow(NamedTuple):
    line: int
    """Line of the file, from 1."""
    start: int
    end: int
    """Bytes of the file."""
    reason: str


class _CleanedMeta(Meta):
    bad: list[int]


def check_columns(files: Sequence[Path], column: str) -> None:
    """Check that each of several files has the text's column, without reading their rows.

    Raises:
        UsageError: one lacks it, or is damaged; names the file.
    """
    for path in files if len(files) > 1 else ():
        try:
            columns = _COLUMNS.get(path.suffix.lower(), _unknown)(path, column)
        except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
            raise UsageError(f"{path}: damaged ({reason_of(error)}); copy it again, or leave it out") from None
        if columns is not None and column not in columns:
            raise UsageError(
                f"data.text_field: no column {column!r} in {path}; its columns are "
                f"{one_line(', '.join(map(repr, columns))) or 'none'}"
            )


def without_bad_rows(
    files: Sequence[Path], column: str, most: int, cache_dir: Path, verify: str = "checksum"
) -> tuple[list[Path], int]:
    """Return the files, with a copy in ``cache_dir`` for each that has bad rows, and the number of rows left out.

    Every row is checked once, as long as the files are unchanged (`file_states`).

    Args:
        files: files of one kind.
        column: column of the text.
        most: largest number of bad rows in all files together.
        cache_dir: folder for the copies; may be read-only if no row is bad.
        verify: check of existing copies; see `build_once`.

    Raises:
        UsageError: more than ``most`` rows are bad; names the first one too many. Or a line is not a row.
        RunError: a copy is damaged, or the disk is full.
    """
    if files[0].suffix.lower() not in _BAD_ROWS:
        return list(files), 0

    def found() -> Iterator[list[_BadRow]]:
        left = most
        for path in files:
            check_lines(path)
            bad = bad_rows(path, column, left)
            left -= len(bad)
            yield bad

    def build(scratch: Path) -> dict[str, Any]:
        counts = []
        for number, (path, bad) in enumerate(zip(files, found(), strict=True)):
            counts.append(len(bad))
            if bad:
                _copy_without(path, bad, scratch / f"{number:05d}-{path.name}")
        return {"files": facts_of_files(scratch), "bad": counts}

    folder = cache_dir / f"cleaned-{fingerprint(files=file_states(files), column=column, format=3)[:16]}"
    if not folder.is_dir() and not takes_files(cache_dir) and not any(found()):
        return list(files), 0
    counts = build_once(folder, build, verify, schema=_CleanedMeta)["bad"]
    n_bad = sum(counts)
    if n_bad > most:  # the copies are those of a run that allowed more
        for _ in found():
            pass
    return [folder / f"{i:05d}-{p.name}" if n else p for i, (p, n) in enumerate(zip(files, counts, strict=True))], n_bad


def check_first_row(path: Path) -> None:
    """Check that the first row of a .csv file has no more fields than the header.

    pandas compares every row with those before it, and the first with none: it would take the first column as names of
    the rows, and each text from the column beside.

    Raises:
        UsageError: it has more, or is not UTF-8; the message names the line.
    """
    for row in _bad_among(islice(_records(path), 2), path) if path.suffix.lower() == ".csv" else ():
        raise UsageError(f"{path}: line {row.line} {row.reason}; {MEND}")


def bad_rows(path: Path, column: str, most: int) -> list[_BadRow]:
    """List the bad rows of a file, at most ``most``.

    Raises:
        UsageError: there are more.
    """
    found: list[_BadRow] = []
    for row in _BAD_ROWS.get(path.suffix.lower(), _none)(path, column):
        if len(found) == most:
            raise UsageError(f"{path}: line {row.line} {row.reason}; {MEND}")
        found.append(row)
    return found


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_lines(path: Path) -> None:
    """Read a .jsonl or .csv file through; UsageError if a line is too long to be a row."""
    if path.suffix.lower() in _BAD_ROWS:
        with path.open("rb") as file:
            deque(of_short_lines(path, iter(partial(file.read, _COPIED), b"")), maxlen=0)


def of_short_lines(path: Path, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks of a file; UsageError at a line that is too long to be a row, if it is .jsonl or .csv."""
    has_lines, length = corpus_suffix(path.name) in _BAD_ROWS, 0
    for block in blocks:
        if has_lines:
            # Lines within a block are shorter than it.
            *ended, rest = block.split(b"\n")
            longest = length + len(ended[0] if ended else rest)
            length = len(rest) if ended else longest
            if longest > _MOST_LINE:
                raise UsageError(f"{path}: a line of more than {_MOST_LINE >> 20} MiB; give a file with one row a line")
        yield block


def _none(path: Path, column: str) -> Iterator[_BadRow]:
    return iter(())


def _bad_lines(path: Path, column: str) -> Iterator[_BadRow]:
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and (reason := _why_no_row(line, column)):
                yield _BadRow(number, start, start + len(line), reason)
            start += len(line)


def row_of(line: bytes) -> Any:
    """Return the content of a line of a .jsonl file; ValueError says why it has none."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({reason_of(error)})") from None


def text_of(row: Any, column: str) -> str | None:
    """Return a row's text, None without one; ValueError says why it is no row."""
    if not isinstance(row, dict):
        raise ValueError(f"is no JSON object but {type(row).__name__}")
    value = row.get(column)
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"has {type(value).__name__}, not text, as {column!r}")


def _why_no_row(line: bytes, column: str) -> str:
    try:
        (text_of(row_of(line), column) or "").encode("utf-8")
    except UnicodeEncodeError as error:
        return f"has a lone surrogate, U+{ord(error.object[error.start]):04X}, in {column!r}"
    except ValueError as error:
        return str(error)
    return ""


class _Record(NamedTuple):
    line: int
    """Line of the file, from 1."""
    start: int
    content: bytes
    n_fields: int


def _records(path: Path) -> Iterator[_Record]:
    """Yield the records of a .csv file, without empty lines, divided like pandas does: quotes count only at the
    beginning of a field.
    """
    first, start, lines, over = 1, 0, list[str](), False
    # Latin-1 gives every byte a character of its own.
    with path.open(encoding="latin-1", newline="") as file:

        def read() -> Iterator[str]:
            nonlocal over
            for line in file:
                lines.append(line)
                yield line if start or len(lines) > 1 else line.removeprefix(BYTE_ORDER_MARK.decode("latin-1"))
            over = True

        # The reader's limit is one of the process.
        limit = csv.field_size_limit(_MOST_FIELD)
        try:
            for fields in csv.reader(read()):
                if over:
                    raise UsageError(f"{path}: line {first} opens a quote that is never closed; mend the file")
                content = "".join(lines).encode("latin-1")
                if content.strip():
                    yield _Record(first, start, content, len(fields))
                first, start = first + len(lines), start + len(content)
                lines.clear()
        except csv.Error as error:
            raise UsageError(f"{path}: line {first} is no row ({error}); mend the file") from None
        finally:
            csv.field_size_limit(limit)


def _bad_records(path: Path, column: str) -> Iterator[_BadRow]:
    return _bad_among(_records(path), path)


def _bad_among(records: Iterable[_Record], path: Path) -> Iterator[_BadRow]:
    """Yield the bad ones among a file's records, the first of which is its header."""
    in_header: int | None = None
    for line, start, record, n_fields in records:
        is_header = in_header is None
        in_header = n_fields if in_header is None else in_header
        reason = f"has {n_fields} fields, the header has {in_header}" if n_fields > in_header else ""
        try:
            record.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 ({error.reason})"
        if reason and is_header:
            raise UsageError(f"{path}: its header {reason}; mend it")
        if reason:
            yield _BadRow(line, start, start + len(record), reason)


_BAD_ROWS: dict[str, Callable[[Path, str], Iterator[_BadRow]]] = {".jsonl": _bad_lines, ".csv": _bad_records}


def _copy_without(path: Path, bad: Sequence[_BadRow], to: Path) -> None:
    with path.open("rb") as file, to.open("wb") as copy:
        for first, last in zip((0, *(row.end for row in bad)), (*(row.start for row in bad), None), strict=True):
            file.seek(first)
            left = path.stat().st_size - first if last is None else last - first
            while left and (block := file.read(min(left, _COPIED))):
                copy.write(block)
                left -= len(block)


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_parquet(path: Path, column: str) -> list[str]:
    from pyarrow import parquet

    return list(parquet.read_schema(path).names)


def _of_arrow(path: Path, column: str) -> list[str]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file:
        try:
            return list(pyarrow.ipc.open_stream(file).schema.names)
        except pyarrow.ArrowInvalid:
            return list(pyarrow.ipc.open_file(file).schema.names)


def _of_lines(path: Path, column: str) -> list[str] | None:
    """Return the columns of the first row that has this one; else those of all rows."""
    found: dict[str, None] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                row = row_of(line)
            except ValueError:
                continue  # a bad row, which is found later
            found |= dict.fromkeys(row) if isinstance(row, dict) else {}
            if column in found:
                break
    return list(found) if found else None


def _of_csv(path: Path, column: str) -> list[str] | None:
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        return next(csv.reader(file), None)


def _unknown(path: Path, column: str) -> None:
    return None


_COLUMNS: dict[str, Callable[[Path, str], list[str] | None]] = {
    ".parquet": _of_parquet,
    ".arrow": _of_arrow,
    ".jsonl": _of_lines,
    ".csv": _of_csv,
}
