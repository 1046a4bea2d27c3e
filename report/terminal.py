"""Output of commands: JSON, progress bars, and paths of written files."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from ..errors import UsageError
from ..files import user_path
from ..findings.formatting import in_ascii
from ..messages import for_terminal
from ..time_left import Pace, duration

Kind = Literal["page", "picture"]


def print_json(value: Any) -> None:
    """Print the whole answer of a command as JSON, for ``--json``."""
    # A stream that takes no Unicode would write escapes of Python's, which are no JSON.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(value, indent=2, ensure_ascii=not encoding.lower().startswith("utf"))
    # JSON escapes no control characters from U+007F on.
    print(re.sub(r"[^\n -~]", lambda c: c[0] if c[0].isprintable() else json.dumps(c[0])[1:-1], text), flush=True)


def say(console: Console, text: str, *, title: str = "", style: str = "", wrapped: bool = False) -> None:
    """Print a text without markup, in ASCII on a console that has no more, and with escapes for what does not print;
    ``wrapped`` at its width.

    Args:
        console: the console.
        text: the text.
        title: begins the line in bold, if given.
        style: style of the text, as rich names it.
        wrapped: break lines at the console's width.
    """
    written = Text.assemble((for_terminal(title), "bold"), "  " if title else "", (for_terminal(text, "\n\t"), style))
    if console.options.ascii_only:
        written.plain = in_ascii(written.plain)
    console.print(written, soft_wrap=not wrapped)


def printed(show: Callable[[Console], None], *, width: int) -> str:
    """Return the text that a function prints on a console of so many columns."""
    text = io.StringIO()
    # In a notebook rich would show each line there, whatever file it is given; and colours may be asked for everywhere.
    show(Console(file=text, width=width, force_jupyter=False, color_system=None))
    return text.getvalue()


class RunConsole(Console):
    """Console of a run, or of a study: when nobody can read it any more it says so once on standard error, and the work
    goes on.
    """

    def __init__(self, log: Path, *, work: str = "run", quiet: bool = False, stderr: bool = False) -> None:
        super().__init__(quiet=quiet, stderr=stderr)
        self._log_file, self._work = log, work

    def on_broken_pipe(self) -> None:
        """Leave the output, in place of the process."""
        self._leave("nobody reads the output any more", f"the {self._work} goes on, ")

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            # A full disk stops no work; a terminal that is gone (EIO) does, unless nohup was used.
            goes_on = "" if error.errno == errno.EIO else f"the {self._work} goes on, "
            self._leave(f"the output cannot be written any more ({error.strerror})", goes_on)

    def _leave(self, why: str, goes_on: str) -> None:
        """Write to nowhere from now on. If it wrote to the process's output, so does all else that would be printed,
        and what is left at Python's end.
        """
        self.quiet = True
        del self._buffer[:]
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError, AttributeError):  # a stream of Python's own has no descriptor
            if self.file.fileno() == 1:
                os.dup2(nowhere, 1)
        try:
            # Past rich, whose bar puts itself in the place of standard error.
            os.write(2, os.fsencode(f"birthmark: {why}; {goes_on}its log is {self._log_file}\n"))
        except OSError:  # it went the same way, and later lines must not end the run
            os.dup2(nowhere, 2)
        os.close(nowhere)


def print_written(what: str, path: Path) -> None:
    """Tell the user the path of a written file, beside the output of the command."""
    Console(stderr=True).print(for_terminal(f"{what}: {path}"), highlight=False, soft_wrap=True, markup=False)


def print_picture(path: Path) -> None:
    """Tell the user the path of a written picture, and of its numbers beside it."""
    print_written("picture", path)
    print_written("numbers", path.with_suffix(".csv"))


# ── progress ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def bar(what: str, total: int, *, quiet: bool, then: str = "") -> Iterator[Callable[[int], None]]:
    """Show a progress bar of ``total`` on a terminal's standard error until the end; elsewhere a line now and then.

    Yields the function that advances it by a number. ``quiet`` shows nothing. ``then`` names work of unknown length
    behind the last, shown until the end.
    """
    console, pace, done = Console(stderr=True), Pace(total), 0

    def advance(n: int) -> None:
        nonlocal done
        done += n
        progress.advance(task, n)
        if then and done >= total:
            progress.update(task, description=then, total=None)
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
