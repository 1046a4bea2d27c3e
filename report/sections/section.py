"""What a page is made of: pictures with their captions and numbers, lists, and the sections that hold them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from ...errors import UsageError
from ...files import atomic_path
from ..history import printable
from ..pictures.style import to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "run", "probe", "step", "lambda", "layer", "head", "position", "epsilon", "rank", "unit", "channel", "token",
    "text", "quantity", "value",
)  # fmt: skip
"""Columns of the CSV files, in their order; a file has those that its picture needs (docs/run-directory.md)."""


@dataclass(frozen=True)
class Cube:
    """Numbers of a picture: an array whose axes are columns of a table."""

    quantity: str
    values: np.ndarray
    axes: Sequence[Mapping[str, Sequence[Any]]] = ()
    """Per axis, its columns: name in `COLUMNS` → the coordinate of every index."""
    at: Mapping[str, Any] = field(default_factory=dict)
    """Columns that are one and the same for the whole array."""

    def within(self, at: Mapping[str, Any]) -> Cube:
        """The same numbers with further columns."""
        return Cube(self.quantity, self.values, self.axes, {**at, **self.at})

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
            told = [[_cell(coordinate) for coordinate in coordinates] for coordinates in axis.values()]
            axes.append(([place[name] for name in axis], list(zip(*told, strict=True))))
        places = [i for where, _ in axes for i in where] + [place["value"]]
        values = np.asarray(self.values).reshape(-1)
        for index, value in zip(product(*(coordinates for _, coordinates in axes)), values, strict=True):
            for i, cell in zip(places, [cell for cells in index for cell in cells] + [_cell(value)], strict=True):
                row[i] = cell
            yield row


def _cell(value: Any) -> str:
    """A value as a CSV holds it: every digit that it has, nothing where it is not a number."""
    if isinstance(value, np.generic):
        # A float32 has nine digits; its float64 form would show eight more that nobody measured.
        value = float(f"{value:.9g}") if value.dtype == np.float32 else value.item()
    if isinstance(value, float):
        return "" if math.isnan(value) else str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return printable(value).replace("\n", "\\n")


def tidy(cubes: Sequence[Cube]) -> str:
    """The numbers as CSV in long form: a header, then one value per line."""
    used = {name for cube in cubes for name in cube.columns()}
    columns = [name for name in COLUMNS if name in used]
    buffer = io.StringIO()
    table = csv.writer(buffer, lineterminator="\n")
    table.writerow(columns)
    for cube in cubes:
        table.writerows(cube.rows(columns))
    return buffer.getvalue()


Drawn = tuple["Figure", list[Cube]] | None
"""A picture and its numbers, if there is something to draw."""


@dataclass(frozen=True)
class Plate:
    """A picture as it stands in a page."""

    svg: Markup
    caption: str
    file: str
    """Name of the CSV that holds its numbers."""
    cubes: Sequence[Cube]


@dataclass(frozen=True)
class List:
    """A table of a few rows below the pictures."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    file: str
    cubes: Sequence[Cube]
    texts: Sequence[int] = ()
    """Columns that are text, not numbers; the rest are set to the right."""


@dataclass(frozen=True)
class Section:
    """A heading, the sentence that says what one sees, and its pictures."""

    id: str
    title: str
    lede: str
    plates: list[Plate] = field(default_factory=list)
    lists: list[List] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader must know before the pictures, or why there are none."""

    def add(self, figure: Figure, key: str, caption: str, cubes: Sequence[Cube], index: int | None = None) -> None:
        """Add a picture. Those of one ``key`` share a CSV; ``index`` tells them apart in the page."""
        name = f"{self.id}-{key}"
        described = printable(caption)
        svg = Markup(to_svg(figure, name if index is None else f"{name}-{index}", described))
        self.plates.append(Plate(svg, described, f"{name}.csv", cubes))


def tables(sections: Iterable[Section]) -> dict[str, str]:
    """CSV text by file name, of everything that the sections show."""
    found: dict[str, list[Cube]] = {}
    for section in sections:
        every: list[Plate | List] = [*section.plates, *section.lists]
        for shown in every:
            found.setdefault(shown.file, []).extend(shown.cubes)
    return {name: tidy(cubes) for name, cubes in found.items()}


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


def write_tables(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the CSV files into ``folder``, which appears whole or not at all, in place of what it held."""
    with atomic_path(folder) as new:
        new.mkdir()
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8", newline="")
