"""What commands say: JSON, and a bar while they work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress


def print_json(value: Any) -> None:
    """The whole answer of a command that was asked for ``--json``."""
    print(json.dumps(value, indent=2, ensure_ascii=False), flush=True)


@contextmanager
def bar(what: str, total: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of ``total`` on a terminal's standard error, gone at the end; yields what moves it on by a number."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)
