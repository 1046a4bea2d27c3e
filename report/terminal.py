"""What commands say: JSON, a bar while they work, and where their picture is."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from ..errors import UsageError
from ..files import user_path
from ..pace import Pace, duration

Kind = Literal["page", "picture"]


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


#: How files of a kind end.
_ENDINGS: Mapping[Kind, tuple[str, ...]] = {"page": (".html", ".htm"), "picture": (".png",)}


def out_file(out: str, *kinds: Kind) -> Path:
    """The file that ``--out`` names, which is of one of these kinds.

    Raises:
        UsageError: it is of none of them, or a folder.
    """
    path = user_path(out)
    if not any(is_kind(path, kind) for kind in kinds):
        endings = " or ".join(_ENDINGS[kind][0] for kind in kinds)
        raise UsageError(f"--out {out}: is no {' and no '.join(kinds)}; give a name that ends in {endings}")
    if path.is_dir():
        raise UsageError(f"--out {out}: is a folder; name a file")
    return path


def is_kind(path: Path, kind: Kind) -> bool:
    """Whether a file of this name is of this kind."""
    return path.suffix.lower() in _ENDINGS[kind]


def picture_path(out: str | None, default: str, *, as_json: bool) -> Path | None:
    """Where the picture goes, if one is drawn: where it was asked for, else the default unless JSON is printed.

    Raises:
        UsageError: ``out`` is no PNG, or a folder.
    """
    if out is not None:
        return out_file(out, "picture")
    if as_json:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: pip install 'birthmark[plots]'", flush=True)
        return None
    return Path(default)
