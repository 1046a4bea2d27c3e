"""What commands say: JSON, a bar while they work, and where their picture is."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..errors import UsageError
from ..pace import Pace, duration


def print_json(value: Any) -> None:
    """The whole answer of a command that was asked for ``--json``."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


def print_written(what: str, path: Path) -> None:
    """Say where something was written, beside what a command prints."""
    Console(stderr=True).print(f"{what}: {path}", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of ``total`` on a terminal's standard error, gone at the end; elsewhere a line now and then.

    Yields what moves it on by a number. ``quiet``: nothing is shown.
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


def page_or_picture(out: str | None) -> bool:
    """Whether ``--out`` names a page; False where it names a picture, or nothing.

    Raises:
        UsageError: it names neither.
    """
    if out is None or Path(out).suffix.lower() == ".png":
        return False
    if Path(out).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out {out}: is neither a page nor a picture; give a name that ends in .html or .png")
    return True


def picture_path(out: str | None, default: str, *, as_json: bool) -> Path | None:
    """Where the picture goes, if one is drawn: where it was asked for, else the default unless JSON is printed.

    Raises:
        UsageError: ``out`` is no PNG.
    """
    if out is not None and Path(out).suffix.lower() != ".png":
        raise UsageError(f"--out {out}: the picture is a PNG; give a name that ends in .png")
    if out is None and as_json:
        return None
    if out is None and importlib.util.find_spec("matplotlib") is None:
        print("no picture: pip install 'birthmark[plots]'", flush=True)
        return None
    return Path(out or default)
