"""End of a study: its results, printed and written beside its runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..errors import UsageError
from ..files import write_text
from .request import StudyRequest
from .taking.claims import alone
from .taking.tries import told
from .trials import Trial


def _nothing(console: Console) -> None:
    """Write no further files."""


@dataclass(frozen=True)
class Outputs:
    """Functions that print and write the results of a study. Nothing is made before they are called."""

    show: Callable[[Console], object]
    """Function that prints the results."""
    table: Callable[[], str]
    """Content of ``table.md``."""
    write_csv: Callable[[Path], object]
    """Function that writes the table for programs to a path."""
    draw: Callable[[Path], list[str]]
    """Function that draws pictures into a folder and returns their names; not called where matplotlib is missing."""
    page: Callable[[], str]
    """Content of ``index.html``."""
    write_more: Callable[[Console], object] = _nothing
    """Function that writes further files of this kind of study, and prints their names."""


def end_study(
    request: StudyRequest, out: Path, trials: Sequence[Trial], console: Console, outputs: Outputs | None, missing: str
) -> None:
    """Print the results of a study, and write ``index.html``, ``table.md``, ``table.csv`` and pictures.

    One process at a time writes: processes with trials of the same study end at the same moment.

    Args:
        request: the request.
        out: the study's folder.
        trials: trials whose failed starts the table lists.
        console: console to print to.
        outputs: outputs of the results; None without results.
        missing: name of the results that are then missing.

    Raises:
        UsageError: a summary was asked for, and there are no results.
    """
    if outputs is None:
        if request.summary:
            raise UsageError(f"{out}: no {missing} of {request.file} in it yet")
        return
    outputs.show(console)
    with alone(out):
        _write(out, outputs, console, told(trials))
        outputs.write_more(console)


def _write(out: Path, outputs: Outputs, console: Console, failed: str) -> None:
    """Write the files; ``failed`` is a last paragraph for ``table.md``."""
    table = outputs.table()
    write_text(out / "table.md", f"{table}\n{failed}\n" if failed else table)
    outputs.write_csv(out / "table.csv")
    write_text(out / "index.html", outputs.page())
    files = ["index.html", "table.md", "table.csv"]
    if importlib.util.find_spec("matplotlib"):
        files += outputs.draw(out)
    else:
        files.append("(no pictures: pip install 'birthmark[plots]')")
    console.print(f"{out}: {' '.join(files)}", highlight=False, soft_wrap=True, markup=False)
