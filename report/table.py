"""One table for every output: made once, then printed to a console, shown on a page, and written as Markdown and CSV.

    table = Table([Column("model", "name"), Column("loss", format=".3f")], [["run@0", 3.72], ["run@6", 3.17]])
    table.print(Console())
    write_text(out, table.csv())
    blocks.append(table)

Rows that a command prints as JSON are mappings, of which `Table.of` takes the columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from markupsafe import Markup
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as ConsoleTable
from rich.text import Text

from ..files import csv_text
from ..findings.formatting import MISSING, format_value, in_ascii, one_line, shorten, shorten_middle
from ..messages import for_terminal
from .terminal import say

Kind = Literal["name", "text", "prose", "token", "number"]

_SHORTEST_NAME = 12
"""Characters that a name keeps at least where a table is narrow."""
_GAP = 3
"""Characters between two columns."""


@dataclass(frozen=True)
class Column:
    """A column: its heading, its kind, and the format of its numbers."""

    title: str
    """Heading; a line break where a console has one."""
    kind: Kind = "number"
    """Numbers are set to the right. A name may be shortened on a console, and stands before every part of a table
    there. Prose has several lines, and a token any characters, on a page."""
    format: str = ""
    """Format of its numbers, as for `format_value`; without one they are written as they are."""
    key: str = ""
    """Name for programs; default: the title."""
    gives_way: int = 0
    """Order in which columns give way where a console is narrow, from 1; 0: never."""
    beside: str = ""
    """Title of the values in brackets behind its own; "": none."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", self.line)

    @property
    def line(self) -> str:
        """Title in one line."""
        return " ".join(self.title.replace("-\n", "").split())


@dataclass(frozen=True)
class Cell:
    """A cell that is more than its value."""

    value: object
    """Number, text, or a tuple of texts. None and NaN are missing. A page does not escape markup."""
    beside: str = ""
    """Value in brackets behind it, in grey."""
    look: str = ""
    """Style on a console."""
    strong: bool = False
    """True if it is bold on pages and in Markdown."""

    def text(self, column: Column) -> str:
        """Write the value for people."""
        if isinstance(self.value, tuple):
            return ", ".join(self.value)
        if isinstance(self.value, str):
            return self.value
        if column.format or self.value is None:
            return format_value(self.value, column.format)  # type: ignore[arg-type]
        return MISSING if self.value != self.value else str(self.value)

    def on_page(self, column: Column) -> str:
        """Write the cell for a page, which escapes all that is not markup."""
        text = self.text(column)
        if isinstance(self.value, tuple):
            text = Markup("<br>").join(map(one_line, self.value))
        if column.kind == "prose" and text:
            text = Markup('<span class="evidence">{}</span>').format(text)
        if column.kind == "token":
            text = Markup('<span class="token">{}</span>').format(shorten(one_line(text), _LONGEST_TOKEN))
        if self.strong:
            text = Markup("<strong>{}</strong>").format(text)
        return Markup('{} <span class="beside">({})</span>').format(text, self.beside) if self.beside else text


@dataclass(frozen=True)
class Table:
    """A table, and a block of a page."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[object]]
    """A value, or a `Cell`, for each column."""
    caption: str = ""
    """Sentence above it on a page."""
    gaps: Collection[int] = ()
    """Rows before which a console leaves a line empty."""
    kind: str = "table"

    @classmethod
    def of(cls, columns: Sequence[Column], records: Iterable[Mapping[str, object]]) -> Table:
        """Take the columns' keys from mappings; a missing one is an empty place."""
        return cls(columns, [[record.get(column.key) for column in columns] for record in records])

    @property
    def cells(self) -> list[list[Cell]]:
        """Rows of cells."""
        return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in self.rows]

    def without(self, *keys: str) -> Table:
        """Return the table without some columns."""
        return self._of_columns([column for column in self.columns if column.key not in keys])

    def _of_columns(self, columns: Sequence[Column]) -> Table:
        places = [i for i, column in enumerate(self.columns) if column in columns]
        return replace(self, columns=columns, rows=[[row[i] for i in places] for row in self.rows])

    # ── Markdown and CSV ─────────────────────────────────────────────────────────────────────────────────────────────

    def markdown(self) -> str:
        """Write Markdown. Cells are not padded, so that a changed number changes its own row alone."""
        from tabulate import DataRow, TableFormat, tabulate

        rule = "|" + "|".join("---:" if column.kind == "number" else "---" for column in self.columns) + "|"
        row = DataRow("| ", " | ", " |")
        # tabulate's own "pipe" format pads cells to align them.
        layout = TableFormat(None, lambda widths, alignments: rule, None, None, row, row, 0, None)
        titles = [column.line for column in self.columns]
        return tabulate(self._in_markdown(), titles, layout, disable_numparse=True, stralign=None, numalign=None)

    def _in_markdown(self) -> list[list[str]]:
        written = [
            [(one_line(cell.text(column)).replace("|", "\\|"), cell.strong) for column, cell in self._with_columns(row)]
            for row in self.cells
        ]
        return [[f"**{text}**" if strong else text for text, strong in row] for row in written]

    def _with_columns(self, row: Sequence[Cell]) -> Iterable[tuple[Column, Cell]]:
        return zip(self.columns, row, strict=True)

    def csv(self) -> str:
        """Write CSV: the columns' keys, then the values as they are; a missing one is empty."""
        rows = [[_for_programs(cell.value) for cell in row] for row in self.cells]
        return csv_text([[column.key for column in self.columns], *rows])

    # ── the console ──────────────────────────────────────────────────────────────────────────────────────────────────

    def print(
        self,
        console: Console,
        *,
        title: str = "",
        narrower: Sequence[Table] = (),
        all_columns: str = "",
        ruled: bool = True,
    ) -> None:
        """Print the table without losing a cell, however narrow the console is.

        The first form that fits is printed, and the columns that it lacks are named below. If none fits, names of the
        last have their middles cut out, with the full names below; columns for which there is still no room go into
        further tables, each with the names, or the first column, before them.

        Args:
            console: the console to print to.
            title: title above the table.
            narrower: narrower forms, the widest first; by default, values in brackets go, then columns that give way.
            all_columns: the place that has every column, for the line about those that are missing.
            ruled: draw a line below the headings.
        """
        forms = [self, *(narrower or self._narrower())]
        shown = next((form for form in forms if _width(form._widths(console)) <= console.width), forms[-1])
        if title:
            say(console, title)
        shown._print(console, ruled=ruled)
        left_out = ["controls"] if _has_beside(self) and not _has_beside(shown) else []
        left_out += [column.line for column in self.columns if column.key not in {c.key for c in shown.columns}]
        if left_out:
            comma = "; " if any("," in title for title in left_out) else ", "
            say(console, f"no room for {comma.join(left_out)}: {all_columns}", wrapped=True)

    def _narrower(self) -> list[Table]:
        forms = [self]
        if _has_beside(self):
            columns = [replace(column, beside="") for column in self.columns]
            rows = [[replace(cell, beside="") for cell in row] for row in self.cells]
            forms.append(replace(self, columns=columns, rows=rows))
        for level in sorted({column.gives_way for column in self.columns} - {0}):
            forms.append(forms[-1]._of_columns([c for c in forms[-1].columns if not 0 < c.gives_way <= level]))
        return forms[1:]

    def _on_console(self, console: Console) -> tuple[list[Text], list[list[Text]]]:
        """Return headings and cells as the console shows them."""

        def written(text: str) -> str:
            text = for_terminal(text)
            return in_ascii(text) if console.options.ascii_only else text

        titles = [f"{column.line}\n({column.beside})" if column.beside else column.title for column in self.columns]
        rows = []
        for row in self.cells:
            texts = []
            for column, cell in self._with_columns(row):
                text = Text(written(cell.text(column)), style=cell.look)
                if cell.beside:
                    text.append(written(f" ({cell.beside})"), style="dim")
                texts.append(text)
            rows.append(texts)
        return [Text(written(title)) for title in titles], rows

    def _widths(self, console: Console) -> list[int]:
        """Return the number of characters of the longest line of each column."""
        return _longest_lines(*self._on_console(console))

    def _print(self, console: Console, *, ruled: bool) -> None:
        headings, cells = self._on_console(console)
        named = [i for i, column in enumerate(self.columns) if column.kind == "name"]
        leading = list(range(max([1, *(i + 1 for i in named)])))
        widths = _longest_lines(headings, cells)

        def narrowed(i: int, limit: int) -> int:
            return max(cell_len(headings[i].plain), min(widths[i], limit)) if i in named else widths[i]

        def parts_at(limit: int) -> tuple[list[list[int]], int]:
            """Divide the columns among parts, with names of so many characters; return also their excess in width."""
            parts = [leading]
            for column in range(len(leading), len(headings)):
                wider = [*parts[-1], column]
                fits = _width(narrowed(i, limit) for i in wider) <= console.width
                if parts[-1] == leading or fits:
                    parts[-1] = wider
                else:
                    parts.append([*leading, column])
            width = max(_width(narrowed(i, limit) for i in part) for part in parts)
            return parts, max(width - console.width, 0)

        limit = longest = max((widths[i] for i in named), default=0)
        parts, excess = parts_at(min(_SHORTEST_NAME, longest))
        while parts_at(limit) != (parts, excess):
            limit -= 1
        short = _shortened(dict.fromkeys(row[i].plain for row in cells for i in named), limit)
        cells = [
            [Text(short[cell.plain], cell.style) if i in named else cell for i, cell in enumerate(row)] for row in cells
        ]
        for i, part in enumerate(parts):
            if i:
                console.print()
            console.print(self._part(headings, cells, part, ruled=ruled))
        for name, cut in short.items():
            if cut != name:
                say(console, f"{cut}  {name}")

    def _part(
        self, headings: Sequence[Text], rows: Sequence[Sequence[Text]], shown: Sequence[int], *, ruled: bool
    ) -> ConsoleTable:
        table = ConsoleTable(box=box.SIMPLE_HEAD if ruled else None, show_edge=False, pad_edge=False)
        for i in shown:
            # A cell wider than the console continues on the next line.
            justify: Literal["left", "right"] = "right" if self.columns[i].kind == "number" else "left"
            table.add_column(headings[i], justify=justify, overflow="fold")
        for number, row in enumerate(rows):
            if number in self.gaps:
                table.add_section()
            table.add_row(*(row[i] for i in shown))
        return table


def broken(title: str) -> str:
    """Break a heading into two lines as short as possible, for a console."""
    words = title.split()
    forms = [f"{' '.join(words[:i])}\n{' '.join(words[i:])}" for i in range(1, len(words))]
    return min(reversed(forms), key=lambda form: max(map(len, form.split("\n"))), default=title)


_LONGEST_TOKEN = 32
"""Characters of a token's text on a page."""


def _for_programs(value: object) -> object:
    if isinstance(value, tuple):
        return " | ".join(value)
    return None if value != value else value


def _has_beside(table: Table) -> bool:
    return any(column.beside for column in table.columns)


def _width(widths: Iterable[int]) -> int:
    return sum(width + _GAP for width in widths) - _GAP


def _longest_lines(headings: Sequence[Text], rows: Sequence[Sequence[Text]]) -> list[int]:
    texts = [[heading.plain, *(row[i].plain for row in rows)] for i, heading in enumerate(headings)]
    return [max(cell_len(line) for text in column for line in text.split("\n")) for column in texts]


def _shortened(names: Iterable[str], limit: int) -> dict[str, str]:
    """Cut out the middles of names but keep them all different: if two become equal, numbers stand for the names."""
    short = {name: shorten_middle(name, limit) for name in names}
    if len(set(short.values())) < len(short):
        return {name: f"[{i}]" for i, name in enumerate(short, 1)}
    return short
