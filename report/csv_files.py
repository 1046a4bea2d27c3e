"""Numbers of pictures: labelled arrays, and the CSV files beside a page that hold them in long form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UsageError
from ..files import atomic_path, csv_text
from ..findings.formatting import one_line
from ..metrics.quantity import CSV_COLUMNS

COLUMNS = tuple(CSV_COLUMNS)
"""Columns of the CSV files, in their order; a file has those that its picture needs (docs/run-directory.md)."""


@dataclass(frozen=True)
class LabelledArray:
    """Numbers of a picture: an array whose axes are columns of a table."""

    quantity: str
    values: np.ndarray
    axes: Sequence[Mapping[str, Sequence[Any]]] = ()
    """Columns of each axis: name in `COLUMNS` → the coordinate of every index."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are the same for the whole array."""

    def within(self, at: Mapping[str, Any]) -> LabelledArray:
        """Return the same numbers with further columns."""
        return LabelledArray(self.quantity, self.values, self.axes, {**at, **self.at})

    def columns(self) -> set[str]:
        """Return the names of all its columns."""
        return {"quantity", "value", *self.at, *(name for axis in self.axes for name in axis)}

    def lines(self, columns: Sequence[str]) -> Iterator[str]:
        """Yield the lines of a CSV file, one per value, its axes in C order, those of the last axis at a time."""
        values = np.asarray(self.values)
        if not values.size:
            return
        fixed = {name: _field(value) for name, value in {**self.at, "quantity": self.quantity}.items()}
        *outer, last = [_fields(axis) for axis in self.axes] or [[{}]]
        # The lines of the last axis are written once, with marks for all that the other axes fill in.
        marks = {name: f"\0{name}\0" for axis in self.axes[:-1] for name in axis}
        lines = []
        for fields in last:
            row = {**fixed, **marks, **fields, "value": _NUMBER}
            lines.append(",".join(row.get(name, "") for name in columns) + "\n")
        form = "".join(lines).replace("%", "%%").replace(_NUMBER, "%s")
        for index, numbers in zip(product(*outer), values.reshape(-1, len(last)), strict=True):
            found = form
            for name, text in ((name, text) for fields in index for name, text in fields.items()):
                found = found.replace(marks[name], text.replace("%", "%%"))
            yield found % tuple(_numbers(numbers))


#: Mark of a number in the form of lines: no field has a NUL character.
_NUMBER = "\0\0"


def _fields(axis: Mapping[str, Sequence[Any]]) -> list[dict[str, str]]:
    """Write the fields of the columns for every index of an axis."""
    written = [[_field(coordinate) for coordinate in coordinates] for coordinates in axis.values()]
    return [dict(zip(axis, fields, strict=True)) for fields in zip(*written, strict=True)]


def _field(value: Any) -> str:
    """Write a value for a place between two commas of a CSV file."""
    return csv_text([[_cell(value), ""]])[: -len(",\n")]


def _numbers(values: np.ndarray) -> list[str]:
    """Write fields of numbers with all their digits, empty for values that are not numbers."""
    if values.dtype.kind != "f":
        return [_field(value) for value in values.tolist()]
    if values.dtype == np.float32:
        # Its float64 form would show eight more digits that were never measured.
        if (np.abs(values) < _WRITTEN_OUT).all():
            # All at once, which takes a fifth of the time. Minus zero becomes zero.
            return ("%.9g\n" * len(values) % tuple((values + 0).tolist())).split("\n")[:-1]
        held = [float(f"{value:.9g}") for value in values.tolist()]
    else:
        held = values.tolist()
    return [_float(value) if math.isfinite(value) else _field(value) for value in held]


#: Size below which ``%.9g`` writes a float32 without an exponent.
_WRITTEN_OUT = 1e9


def _float(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _cell(value: Any) -> str:
    """Write a value as text; empty for a number that is NaN."""
    if isinstance(value, np.generic):
        value = float(f"{value:.9g}") if value.dtype == np.float32 else value.item()
    if isinstance(value, float):
        return "" if math.isnan(value) else _float(value)
    return one_line(value)


def to_csv(arrays: Sequence[LabelledArray]) -> str:
    """Write the numbers as CSV in long form: a header, then one value per line."""
    used = {name for array in arrays for name in array.columns()}
    columns = [name for name in COLUMNS if name in used]
    return csv_text([columns]) + "".join(lines for array in arrays for lines in array.lines(columns))


def data_folder(page: Path) -> Path:
    """Return the folder of a page's numbers, beside the page."""
    return page.with_name(f"{page.stem}-data")


def check_data_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but CSV files: it is replaced as a whole.

    Raises:
        UsageError: it holds another file, or is not a folder.
    """
    if folder.exists():
        in_the_way = [folder] if not folder.is_dir() else sorted(p for p in folder.iterdir() if p.suffix != ".csv")
        if in_the_way:
            raise UsageError(f"{in_the_way[0]}: in the way of the pictures' numbers ({folder}); move it, or give --out")


def write_csv_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the CSV files into ``folder``, which appears whole or not at all, and replaces the old one."""
    with atomic_path(folder) as new:
        new.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8", newline="")
