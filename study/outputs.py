"""The files that a study writes beside its runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ..files import write_text


def write_outputs(
    out: Path,
    table: str,
    write_csv: Callable[[Path], object],
    draw: Callable[[Path], list[str]],
    page: str,
    console: Console,
    note: str = "",
) -> None:
    """Write ``index.html``, ``table.md``, ``table.csv`` and pictures into ``out``, and print the files' names.

    Args:
        out: the study's folder.
        table: content of ``table.md``.
        write_csv: writes the table for programs to a path.
        draw: draws pictures into a folder and gives their names; not called where matplotlib is missing.
        page: content of ``index.html``.
        console: where to print.
        note: a last paragraph for ``table.md``, such as which starts failed.
    """
    write_text(out / "table.md", f"{table}\n{note}\n" if note else table)
    write_csv(out / "table.csv")
    write_text(out / "index.html", page)
    files = ["index.html", "table.md", "table.csv"]
    if importlib.util.find_spec("matplotlib"):
        files += draw(out)
    else:
        files.append("(no pictures: pip install 'birthmark[plots]')")
    console.print(f"{out}: {' '.join(files)}", highlight=False, soft_wrap=True, markup=False)
