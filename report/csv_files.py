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
from ..metrics.quantity import CSV_COLUMNS
from .text import one_line

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
        varying = [name for name in columns if name in last[0]]
        tails = [tuple(fields[name] for name in varying) for fields in last]
        # Each line of the last axis differs in few fields, so that the others are joined once.
        for index, numbers in zip(product(*outer), values.reshape(-1, len(last)), strict=True):
            row = fixed | {name: field for fields in index for name, field in fields.items()}
            parts = [
                "%s" if name in varying or name == "value" else row.get(name, "").replace("%", "%%") for name in columns
            ]
            line = ",".join(parts) + "\n"
            yield "".join([line % (*tail, number) for tail, number in zip(tails, _numbers(numbers), strict=True)])


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
    held = values.tolist()
    if values.dtype == np.float32:
        # Its float64 form would show eight more digits that were never measured.
        held = [float(f"{value:.9g}") for value in held]
    return [_float(value) if math.isfinite(value) else _field(value) for value in held]


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
        foreign = [folder] if not folder.is_dir() else sorted(p for p in folder.iterdir() if p.suffix != ".csv")
        if foreign:
            raise UsageError(f"{foreign[0]}: in the way of the pictures' numbers ({folder}); move it, or give --out")


def write_csv_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the CSV files into ``folder``, which appears whole or not at all, and replaces the old one."""
    with atomic_path(folder) as new:
        new.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8", newline="")
