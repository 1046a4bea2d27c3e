"""Rows of tables that are damaged: found, named with file and line, and left out up to ``data.max_bad_rows``.

A row of a .jsonl file is bad if its line is no JSON object, no UTF-8, or has something else than text (or null) in the
text's column; a row of a .csv file if it has more fields than the header, or is no UTF-8. Columnar files have no rows
that could be left out: a damaged one is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UsageError
from ...files import one_line, reason_of
from ..cache import Meta, build_once, facts_of_files, file_states, fingerprint

_COPIED = 1 << 20
_MEND = "mend it, or raise data.max_bad_rows, which leaves such rows out"


class _BadRow(NamedTuple):
    line: int
    """Of the file, from 1."""
    start: int
    end: int
    """Bytes of the file."""
    reason: str


class _CleanedMeta(Meta):
    bad: list[int]


def check_columns(files: Sequence[Path], column: str) -> None:
    """See that each of several files has the text's column, without reading their rows.

    Raises:
        UsageError: one has not, or is damaged; names it.
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


def without_bad_rows(files: Sequence[Path], column: str, most: int, cache_dir: Path) -> tuple[list[Path], int]:
    """The files, a copy in ``cache_dir`` in place of each that has bad rows, and how many were left out.

    Raises:
        UsageError: more than ``most`` rows are bad; names the first that is too much.
    """
    if files[0].suffix.lower() not in _BAD_ROWS:
        return list(files), 0
    known = fingerprint(files=file_states(files), column=column, format=1)
    folder = cache_dir / f"cleaned-{known[:16]}"

    def build(scratch: Path) -> dict[str, Any]:
        counts, left = [], most
        for number, path in enumerate(files):
            bad = bad_rows(path, column, left)
            left -= len(bad)
            counts.append(len(bad))
            if bad:
                _copy_without(path, bad, scratch / f"{number:05d}-{path.name}")
        return {"files": facts_of_files(scratch), "bad": counts}

    counts = build_once(folder, build, schema=_CleanedMeta)["bad"]
    if sum(counts) > most:  # the copies are those of a run that allowed more
        for path in files:
            most -= len(bad_rows(path, column, most))
    return [folder / f"{i:05d}-{p.name}" if n else p for i, (p, n) in enumerate(zip(files, counts, strict=True))], sum(
        counts
    )


def check_first_row(path: Path, column: str) -> None:
    """See that a .jsonl file begins like one: pyarrow's reader may crash on another.

    It parses on threads, and some errors end the process in place of the parsing (apache/arrow#49272 is one). A file
    that begins with a list or with an object of several lines is left to the reader, which may know it.

    Raises:
        UsageError: it does not; names the line.
    """
    with path.open("rb") as file:
        number, line = next(((n, line) for n, line in enumerate(file, 1) if line.strip()), (0, b"{"))
    if not line.removeprefix(b"\xef\xbb\xbf").lstrip().startswith((b"{", b"[")):
        raise UsageError(f"{path}: line {number} {_why_no_row(line, column)}; {_MEND}")


def bad_rows(path: Path, column: str, most: int) -> list[_BadRow]:
    """The bad rows of a file, at most ``most``.

    Raises:
        UsageError: there are more.
    """
    found: list[_BadRow] = []
    for row in _BAD_ROWS.get(path.suffix.lower(), _none)(path, column):
        if len(found) == most:
            raise UsageError(f"{path}: line {row.line} {row.reason}; {_MEND}")
        found.append(row)
    return found


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _none(path: Path, column: str) -> Iterator[_BadRow]:
    return iter(())


def _bad_lines(path: Path, column: str) -> Iterator[_BadRow]:
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip() and (reason := _why_no_row(line, column)):
                yield _BadRow(number, start, start + len(line), reason)
            start += len(line)


def _why_no_row(line: bytes, column: str) -> str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"is not UTF-8 ({error.reason})"
    except (ValueError, RecursionError) as error:
        return f"is no JSON ({reason_of(error)})"
    if not isinstance(row, dict):
        return f"is no JSON object but {type(row).__name__}"
    value = row.get(column)
    return "" if value is None or isinstance(value, str) else f"has {type(value).__name__}, not text, as {column!r}"


_QUOTED = re.compile(rb'"(?:[^"]|"")*"')


def _records(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Line, first byte and bytes of each record of a .csv file: a line's end in quotes ends none."""
    start, first, parts, inside = 0, 1, list[bytes](), False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            parts.append(line)
            inside ^= line.count(b'"') % 2 == 1
            if not inside:
                record = b"".join(parts)
                yield first, start, record
                start, first, parts = start + len(record), number + 1, []
    if parts:
        raise UsageError(f"{path}: line {first} opens a quote that is never closed; mend the file")


def _bad_records(path: Path, column: str) -> Iterator[_BadRow]:
    n_fields = None
    for line, start, record in _records(path):
        fields = _QUOTED.sub(b"", record).count(b",") + 1
        n_fields = fields if n_fields is None else n_fields
        reason = f"has {fields} fields, the header has {n_fields}" if fields > n_fields else ""
        try:
            record.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 ({error.reason})"
        if reason and not start:
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
    """Columns of the first row that has this one; else of all rows."""
    found: dict[str, None] = {}
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a bad row, which is found later
            found |= dict.fromkeys(row) if isinstance(row, dict) else {}
            if column in found:
                break
    return list(found) if found else None


def _of_csv(path: Path, column: str) -> list[str] | None:
    import csv

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
