"""The numbers of pictures: labelled arrays, and the CSV files beside a page that hold them in long form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
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
    """Per axis, its columns: name in `COLUMNS` → the coordinate of every index."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are one and the same for the whole array."""

    def within(self, at: Mapping[str, Any]) -> LabelledArray:
        """The same numbers with further columns."""
        return LabelledArray(self.quantity, self.values, self.axes, {**at, **self.at})

    def columns(self) -> set[str]:
        """Names of all its columns."""
        return {"quantity", "value", *self.at, *(name for axis in self.axes for name in axis)}

    def rows(self, columns: Sequence[str]) -> Iterator[list[str]]:
        """One row per value, its axes in C order."""
        place = {name: i for i, name in enumerate(columns)}
        row = [""] * len(columns)
        for name, value in {**self.at, "quantity": self.quantity}.items():
            row[place[name]] = _cell(value)
        axes = []
        for axis in self.axes:
            written = [[_cell(coordinate) for coordinate in coordinates] for coordinates in axis.values()]
            axes.append(([place[name] for name in axis], list(zip(*written, strict=True))))
        places = [i for where, _ in axes for i in where] + [place["value"]]
        values = np.asarray(self.values).reshape(-1)
        for index, value in zip(product(*(coordinates for _, coordinates in axes)), values, strict=True):
            for i, cell in zip(places, [cell for cells in index for cell in cells] + [_cell(value)], strict=True):
                row[i] = cell
            yield row


def _cell(value: Any) -> str:
    """A value as a CSV holds it: every digit that it has, nothing where it is not a number."""
    if isinstance(value, np.generic):
        # A float32 has nine digits; its float64 form would show eight more that were never measured.
        value = float(f"{value:.9g}") if value.dtype == np.float32 else value.item()
    if isinstance(value, float):
        return "" if math.isnan(value) else str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return one_line(value)


def to_csv(arrays: Sequence[LabelledArray]) -> str:
    """The numbers as CSV in long form: a header, then one value per line."""
    used = {name for array in arrays for name in array.columns()}
    columns = [name for name in COLUMNS if name in used]
    # An array gives one list again and again, so that no two rows may be held.
    return csv_text(chain([columns], chain.from_iterable(array.rows(columns) for array in arrays)))


def data_folder(page: Path) -> Path:
    """Where the numbers of a page stand: beside it."""
    return page.with_name(f"{page.stem}-data")


def check_data_folder(folder: Path) -> None:
    """Refuse a folder that holds anything but CSV files: it is replaced as a whole.

    Raises:
        UsageError: it does, or is no folder.
    """
    if folder.exists():
        foreign = [folder] if not folder.is_dir() else sorted(p for p in folder.iterdir() if p.suffix != ".csv")
        if foreign:
            raise UsageError(f"{foreign[0]}: in the way of the pictures' numbers ({folder}); move it, or give --out")


def write_csv_files(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the CSV files into ``folder``, which appears whole or not at all, in place of what it held."""
    with atomic_path(folder) as new:
        new.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8", newline="")
