"""Output of commands: JSON, tables of any width, progress bars, and paths of written files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..files import user_path
from ..pace import Pace, duration
from .text import shorten_middle

Kind = Literal["page", "picture"]


def print_json(value: Any) -> None:
    """Print the whole answer of a command as JSON, for ``--json``."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def print_written(what: str, path: Path) -> None:
    """Tell the user the path of a written file, beside the output of the command."""
    Console(stderr=True).print(f"{what}: {path}", highlight=False, soft_wrap=True, markup=False)


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_SHORTEST_NAME = 12
"""Characters that a name keeps at least where a table is narrow."""
_GAP = 3
"""Characters between two columns."""


@dataclass(frozen=True)
class Heading:
    """A column of `print_table`."""

    text: str
    kind: Literal["name", "text", "number"] = "number"
    """A name may be shortened, and stands before every part of a table; numbers are set to the right."""


def print_table(
    console: Console,
    headings: Sequence[Heading],
    rows: Sequence[Sequence[str | Text]],
    *,
    title: str = "",
    n_leading: int = 0,
) -> None:
    """Print a table without losing a cell, however narrow the console is.

    A table that does not fit has the middles of its names cut out, with the full names below. Columns for which there
    is still no room go into further tables, each with the names before them.

    Args:
        console: the console to print to.
        headings: the columns' headings; all columns up to the last name are repeated in every part.
        rows: a cell for each column.
        title: title above the table.
        n_leading: number of further columns that are repeated in every part.
    """
    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    named = [i for i, heading in enumerate(headings) if heading.kind == "name"]
    leading = list(range(max([n_leading, *(i + 1 for i in named)])))
    widths = _widths(headings, cells)
    limit = max((widths[i] for i in named), default=0)

    def narrowed(i: int) -> int:
        return max(cell_len(headings[i].text), min(widths[i], limit)) if i in named else widths[i]

    while limit > _SHORTEST_NAME and sum(narrowed(i) + _GAP for i in range(len(headings))) - _GAP > console.width:
        limit -= 1
    short = _shortened(dict.fromkeys(row[i].plain for row in cells for i in named), limit)
    cells = [
        [Text(short[cell.plain], cell.style) if i in named else cell for i, cell in enumerate(row)] for row in cells
    ]
    widths = _widths(headings, cells)
    parts = [leading]
    for column in range(len(leading), len(headings)):
        wider = [*parts[-1], column]
        if parts[-1] != leading and sum(widths[i] + _GAP for i in wider) - _GAP > console.width:
            parts.append([*leading, column])
        else:
            parts[-1] = wider
    if title:
        console.print(title, highlight=False, soft_wrap=True, markup=False)
    for i, part in enumerate(parts):
        if i:
            console.print()
        console.print(_table(headings, cells, part))
    for name, shown in short.items():
        if shown != name:
            console.print(f"{shown}  {name}", highlight=False, soft_wrap=True, markup=False)


def table_width(headings: Sequence[Heading], rows: Sequence[Sequence[str | Text]]) -> int:
    """Return the number of characters that the table takes if it is not split."""
    return sum(width + _GAP for width in _widths(headings, rows)) - _GAP


def print_left_out(console: Console, titles: Iterable[str], where: str) -> None:
    """Name the columns that a narrow console has no room for, if any, and where to find them."""
    if titles := [" ".join(title.replace("-\n", "").split()) for title in titles]:
        console.print(f"no room for {', '.join(titles)}: {where}", highlight=False, markup=False)


def _widths(headings: Sequence[Heading], rows: Sequence[Sequence[str | Text]]) -> list[int]:
    """Return the number of characters of the longest line of each column."""
    texts = [[heading.text, *(str(row[i]) for row in rows)] for i, heading in enumerate(headings)]
    return [max(cell_len(line) for text in column for line in text.split("\n")) for column in texts]


def _table(headings: Sequence[Heading], rows: Sequence[Sequence[Text]], shown: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i in shown:
        justify: Literal["left", "right"] = "right" if headings[i].kind == "number" else "left"
        # A cell wider than the console continues on the next line.
        table.add_column(Text(headings[i].text), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def _shortened(names: Iterable[str], limit: int) -> dict[str, str]:
    """Cut out the middles of names but keep them all different: if two become equal, numbers stand for the names."""
    short = {name: shorten_middle(name, limit) for name in names}
    if len(set(short.values())) < len(short):
        return {name: f"[{i}]" for i, name in enumerate(short, 1)}
    return short


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of ``total`` on a terminal's standard error until the end; elsewhere a line now and then.

    Yields the function that advances it by a number. ``quiet`` shows nothing.
    """
    console, pace, done = Console(stderr=True), Pace(total), 0

    def advance(n: int) -> None:
        nonlocal done
        done += n
        progress.advance(task, n)
        if progress.disable and not quiet and done < total and pace.is_due():
            left = duration(pace.seconds_left(done) or 0)
            print(f"{what}: {done:,} of {total:,}, about {left} left", file=sys.stderr, flush=True)

    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield advance


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────

#: Endings of the files of each kind.
_ENDINGS: Mapping[Kind, tuple[str, ...]] = {"page": (".html", ".htm"), "picture": (".png",)}


def out_file(out: str, *kinds: Kind) -> Path:
    """Return the file that ``--out`` names, if it is of one of ``kinds``.

    Raises:
        UsageError: it is of none of these kinds, or is a folder.
    """
    path = user_path(out)
    if not any(is_kind(path, kind) for kind in kinds):
        endings = " or ".join(_ENDINGS[kind][0] for kind in kinds)
        raise UsageError(f"--out {out}: is no {' and no '.join(kinds)}; give a name that ends in {endings}")
    if path.is_dir():
        raise UsageError(f"--out {out}: is a folder; name a file")
    return path


def is_kind(path: Path, kind: Kind) -> bool:
    """Say if the file's ending is one of this kind."""
    return path.suffix.lower() in _ENDINGS[kind]


def picture_path(out: str | None) -> Path | None:
    """Return the path of the picture, which is drawn only where ``--out`` asks for it.

    Raises:
        UsageError: ``out`` is no PNG, or a folder.
    """
    return None if out is None else out_file(out, "picture")
