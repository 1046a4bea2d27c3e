"""The tables of docs/run-directory.md, from declarations: ``python -m birthmark.launch.reference.run_directory``.

The page is written by hand around them.
"""

from __future__ import annotations

from pathlib import Path

from ...files import write_text
from ...metrics.quantity import AXES, CSV_COLUMNS
from .generated_tables import Tables, markdown_rows, regenerated

FILE = Path(__file__).parents[2] / "docs" / "run-directory.md"


def axes() -> str:
    """List the dimensions of arrays."""
    return markdown_rows(
        ["axis", "length", "indices"], ([f"`{k}`", f"`{a.letter}`", a.meaning] for k, a in AXES.items())
    )


def columns() -> str:
    """List the columns of CSV files."""
    return markdown_rows(["column", "meaning"], ([f"`{name}`", meaning] for name, meaning in CSV_COLUMNS.items()))


TABLES: Tables = {"axes": axes, "columns": columns}

if __name__ == "__main__":
    write_text(FILE, regenerated(FILE.read_text(encoding="utf-8"), TABLES))
