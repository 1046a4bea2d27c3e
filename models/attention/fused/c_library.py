"""A C file of the package as a library: compiled where it is first used, and kept among the user's cached files."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

from ....files import atomic_path, one_line, user_path

_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno")
#: Seconds after which a compiler is taken not to come back; ours takes three.
_PATIENCE = 120


class CannotCompileError(Exception):
    """There is no library; the message says why, in a few words."""


def cache_folder() -> Path:
    """Where compiled files are kept: ``$XDG_CACHE_HOME/birthmark``, by default ``~/.cache/birthmark``."""
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "birthmark"


def load(source: Path, instructions: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a C file, compiled by ``$CC`` (gcc) with these flags of the processor's instructions.

    A compiled file is named by what it was made of, and put in place whole: processes that begin together may each
    make it.

    Raises:
        CannotCompileError: there is no compiler, it fails, or the result cannot be kept or loaded.
    """
    command = shlex.split(os.environ.get("CC", "gcc"))
    flags = (*_FLAGS, *instructions)
    made_of = hashlib.sha256(source.read_bytes() + "\0".join((*command, *flags)).encode()).hexdigest()
    library = cache_folder() / f"{source.stem}-{made_of[:16]}.so"
    try:
        if not library.is_file():
            if not command or shutil.which(command[0]) is None:
                raise CannotCompileError(f"there is no C compiler ({' '.join(command) or 'CC is empty'})")
            with atomic_path(library) as new:
                made = subprocess.run(
                    [*command, *flags, str(source), "-o", str(new), "-lm"],
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=_PATIENCE,
                )
                if made.returncode:
                    raise CannotCompileError(f"{command[0]} fails ({one_line(made.stderr)})")
        return ctypes.CDLL(str(library))
    except subprocess.TimeoutExpired:
        raise CannotCompileError(f"{command[0]} took more than {_PATIENCE} s") from None
    except OSError as error:
        raise CannotCompileError(f"{library} cannot be made or loaded ({one_line(error)})") from None
