"""The text's column of tabular files, read alone: other columns may hold anything, of another type in every file.

``datasets`` reads all columns and casts them to the types of the first file (datasets#7092, #7222). It still resolves
names, downloads, keeps what is read and streams; this module is its builder.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow as pa
from datasets.utils.file_utils import xopen
from pyarrow import compute, parquet

from ..errors import UsageError
from ..messages import one_line
from ..urls import hide_credentials
from .bad_rows import BYTE_ORDER_MARK, row_of, text_of
from .cache import room_check
from .stored_files import StoredFile, open_table

#: Bytes of text, and rows, that are handed on together.
_MOST_BYTES, _MOST_ROWS = 1 << 23, 1 << 10
#: Bytes of the largest .json file that is no list and has no row on its first line.
_MOST_WHOLE = 1 << 30
_NEXT = re.compile(r"\S")
_NO_ROW = BYTE_ORDER_MARK + b" \t\r\n"
_BYTES = pa.large_binary()
_AS_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): _BYTES,
    pa.binary(): pa.binary(),
    _BYTES: _BYTES,
    pa.null(): _BYTES,
}


@dataclass
class _Config(datasets.BuilderConfig):
    column: str = ""
    suffix: str = ""


class TextColumn(datasets.ArrowBasedBuilder):
    """Builder of a table with the text's column alone, as bytes: UTF-8, unless a row is bad.

    Args of its config: ``column``, and ``suffix`` of the files' kind (a key of `READERS`).
    """

    BUILDER_CONFIG_CLASS = _Config
    _check_room: Callable[[str, int], None] | None = None

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=datasets.Features({self.config.column: datasets.Value("large_binary")}))

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        names = [str(file) for file in self.config.data_files["train"]]
        files = {"names": names, "files": dl_manager.download(names)}
        return [datasets.SplitGenerator(name="train", gen_kwargs=files)]

    def _prepare_split(self, *args: Any, **kwargs: Any) -> None:
        # The rows are streamed without this.
        self._check_room = room_check(Path(self._cache_dir_root))
        super()._prepare_split(*args, **kwargs)

    def _generate_tables(self, names: list[str], files: list[str]) -> Iterator[tuple[tuple[int, int], pa.Table]]:
        for number, (name, file) in enumerate(zip(names, files, strict=True)):
            for part, column in enumerate(read_column(name, file, self.config.suffix, self.config.column)):
                if self._check_room is not None:
                    self._check_room(hide_credentials(name), column.nbytes)
                yield (number, part), pa.table({self.config.column: column})


def column_of_files(files: Sequence[str], suffix: str, column: str, cache_dir: str | None = None) -> TextColumn:
    """Return the builder for files of one kind: paths, or URLs with or without wildcards."""
    return TextColumn(cache_dir=cache_dir, data_files=list(files), suffix=suffix, column=column)


def column_of_set(name: Sequence[str], column: str) -> datasets.DatasetBuilder:
    """Return the builder for a set of the hub, by its name and config; that of ``datasets`` if its files are of no kind
    in `READERS`.
    """
    builder = datasets.load_dataset_builder(*name)
    suffix = f".{builder.name}"
    if suffix not in READERS:
        return builder
    return TextColumn(
        config_name=builder.config.name,
        dataset_name=builder.dataset_name,
        repo_id=builder.repo_id,
        hash=builder.hash,
        base_path=builder.base_path,
        data_files=builder.config.data_files,
        suffix=suffix,
        column=column,
    )


def read_column(name: str, file: str, suffix: str, column: str) -> Iterator[pa.Array]:
    """Yield the column in portions: Arrow arrays of bytes, which are UTF-8 unless a row is bad.

    Args:
        name: name of the file, which says its compression.
        file: path or URL, anything that ``datasets`` opens; or a pointer to a file in a store.
        suffix: key of `READERS`.
        column: name of the text's column.

    Raises:
        UsageError: no such column, or not of text; names the field.
        ValueError, OSError: the file is damaged.
    """
    stored = None if "://" in file else StoredFile.at(Path(file))
    shown = hide_credentials(name) if stored is None else stored.path
    with xopen(file, "rb") if stored is None else open_table(stored) as opened:
        parts = READERS[suffix](_uncompressed(opened, name), shown, column)
        for array in chain.from_iterable(map(_decoded, parts)):
            as_bytes = _AS_BYTES.get(array.type)
            if as_bytes is None:
                raise UsageError(
                    f"data.text_field: column {column!r} holds {array.type}, not text, in {shown}; name another column"
                )
            # A view trusts the rows' borders.
            array = array.cast(_BYTES) if pa.types.is_null(array.type) else array.view(as_bytes)
            array.validate(full=True)
            yield array.cast(_BYTES)


def _decoded(column: pa.Array) -> Iterator[pa.Array]:
    """Yield a column in portions without its dictionary: a text of a megabyte may be each of a million rows."""
    if not pa.types.is_dictionary(column.type):
        yield column
        return
    sizes = compute.fill_null(compute.binary_length(column.dictionary).take(column.indices), 0).to_numpy()
    group = np.cumsum(sizes, dtype=np.int64) // _MOST_BYTES
    for first, end in pairwise([0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(column)]):
        yield column.slice(first, end - first).dictionary_decode()


def _uncompressed(file: Any, name: str) -> Any:
    path = name.partition("?")[0].lower()
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if path.endswith(".zst"):
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, "r"), "zstd"))
    return file


def _check_columns(column: str, columns: Iterable[str], name: str) -> None:
    columns = list(columns)
    if column not in columns:
        listed = one_line(", ".join(map(repr, columns))) or "none"
        raise UsageError(f"data.text_field: no column {column!r} in {name}; its columns are {listed}")


# ── one reader for each kind of file ─────────────────────────────────────────────────────────────────────────────────


def _of_parquet(file: Any, name: str, column: str) -> Iterator[pa.Array]:
    plain = parquet.ParquetFile(file, pre_buffer=True)
    _check_columns(column, plain.schema_arrow.names, name)
    # Each text is in memory once, and reading takes twice as long.
    by_dictionary = parquet.ParquetFile(file, metadata=plain.metadata, read_dictionary=[column])
    for group in range(plain.num_row_groups):
        facts = plain.metadata.row_group(group)
        mean = max(1, facts.total_byte_size // max(1, facts.num_rows))
        n_rows = min(max(1, _MOST_BYTES // mean), _MOST_ROWS)
        # A group has one dictionary, before its rows.
        first = next(by_dictionary.iter_batches(1, row_groups=[group], columns=[column]), None)
        is_small = first is None or _longest_text(first.column(0)) * n_rows <= 4 * _MOST_BYTES
        table = plain if is_small else by_dictionary
        for batch in table.iter_batches(n_rows, row_groups=[group], columns=[column]):
            yield batch.column(0)


def _longest_text(column: pa.Array) -> int:
    """Return the bytes of the longest text of a column's dictionary; 0 without one."""
    if not pa.types.is_dictionary(column.type):
        return 0
    return compute.max(compute.binary_length(column.dictionary)).as_py() or 0


def _of_arrow(file: Any, name: str, column: str) -> Iterator[pa.Array]:
    try:
        batches = pa.ipc.open_stream(file)
        schema = batches.schema
    except pa.ArrowInvalid:
        whole = pa.ipc.open_file(file)
        schema, batches = whole.schema, map(whole.get_batch, range(whole.num_record_batches))
    _check_columns(column, schema.names, name)
    for batch in batches:
        yield batch.column(schema.get_field_index(column))


def _of_csv(file: Any, name: str, column: str) -> Iterator[pa.Array]:
    # An empty string is text, and "NA" a word.
    options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "chunksize": _MOST_ROWS}
    for number, table in enumerate(pandas.read_csv(file, **options)):
        _check_columns(column, map(str, table.columns), name)
        if number == 0 and len(table) and (kind := _number_type(table[column])):
            yield pa.nulls(0, kind)
        yield pa.array(table[column], pa.large_string(), from_pandas=True)


def _number_type(cells: pandas.Series) -> pa.DataType | None:
    """Return the type of numbers in text; None if one is no number."""
    try:
        return pa.from_numpy_dtype(pandas.to_numeric(cells.dropna()).to_numpy().dtype)
    except ValueError:
        return None


def _of_json(file: Any, name: str, column: str) -> Iterator[pa.Array]:
    held, n_bytes, others, found = list[bytes | None](), 0, dict[str, None](), False
    for place, row in _rows(file):
        try:
            text = text_of(row, column)
        except ValueError as error:
            raise ValueError(f"{place} {error}") from None
        if not found:
            found = column in row
            others |= dict.fromkeys(row)
        # A lone surrogate makes bytes that are no UTF-8: a bad row.
        held.append(None if text is None else text.encode("utf-8", "surrogatepass"))
        n_bytes += len(held[-1] or b"")
        if len(held) == _MOST_ROWS or n_bytes >= _MOST_BYTES:
            yield pa.array(held, _BYTES)
            held, n_bytes = [], 0
    if others and not found:
        _check_columns(column, others, name)
    yield pa.array(held, _BYTES)


def _rows(file: Any) -> Iterator[tuple[str, Any]]:
    """Yield place and content of the rows: one on each line, or all in one list, or objects of several lines."""
    number, line = next(((n, line) for n, line in enumerate(file, 1) if line.strip(_NO_ROW)), (0, b""))
    if line.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        whole = json.loads((line + file.read()).decode("utf-8-sig"))
        # A row that is a text alone has its column's usual name.
        rows = ({"text": row} if isinstance(row, str) else row for row in whole)
        yield from ((f"row {n}", row) for n, row in enumerate(rows, 1))
        return
    try:
        first = row_of(line) if line else None
    except ValueError as error:
        rest = file.read(_MOST_WHOLE)
        try:
            yield from _objects((line + rest).decode("utf-8-sig"))
        except (ValueError, RecursionError):
            raise ValueError(f"line {number} {error}") from None
        return
    if first is not None:
        yield f"line {number}", first
    for at, line in enumerate(file, number + 1):
        if line.strip():
            try:
                yield f"line {at}", row_of(line)
            except ValueError as error:
                raise ValueError(f"line {at} {error}") from None


def _objects(text: str) -> list[tuple[str, Any]]:
    """Return all objects of a text, one behind another."""
    decoder, found, at = json.JSONDecoder(), list[tuple[str, Any]](), 0
    while begin := _NEXT.search(text, at):
        row, at = decoder.raw_decode(text, begin.start())
        found.append((f"row {len(found) + 1}", row))
    return found


#: Readers by kind of file: from an open file, its name and the column's to portions of the column.
READERS: dict[str, Callable[[Any, str, str], Iterator[pa.Array]]] = {
    ".parquet": _of_parquet,
    ".arrow": _of_arrow,
    ".json": _of_json,
    ".jsonl": _of_json,
    ".csv": _of_csv,
}
