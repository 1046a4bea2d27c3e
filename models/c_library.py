"""C files of the package, for CPUs: compiled at first use, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from ..errors import UsageError
from ..files import atomic_path, user_path
from ..messages import one_line

_FLAGS = ("-O3", "-std=c11", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-ffp-contract=off")
_INSTRUCTIONS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma")
#: What C files here include.
_HEADER = Path(__file__).with_name("bf16.h")
#: Seconds after which a compiler is taken not to come back; this library takes one.
_PATIENCE = 120


class CannotCompileError(Exception):
    """Error for a library that cannot be built; the message says why, in a few words."""


@functools.cache
def kernel(source: Path) -> ctypes.CDLL | str:
    """Load the library of a C file; return the reason, in a few words, if this machine cannot run it."""
    if not torch.cpu._is_avx512_bf16_supported():
        return "the processor has no AVX-512 BF16 instructions"
    if torch.cpu._is_amx_tile_supported():
        return "the processor has AMX, where it was not timed beside torch's products"
    try:
        return load(source)
    except CannotCompileError as error:
        return str(error)


def cache_folder() -> Path:
    """Return the folder for compiled files: ``$XDG_CACHE_HOME/birthmark``, by default ``~/.cache/birthmark``.

    Raises:
        UsageError: the user has no home.
    """
    try:
        return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "birthmark"
    except UsageError:
        raise UsageError("this user has no home to keep a cache in; set HOME or XDG_CACHE_HOME") from None


def load(source: Path) -> ctypes.CDLL:
    """Compile a C file by ``$CC`` (gcc) if needed, and load the library.

    A compiled file is named by a hash of its source, header and flags, and moved into place whole, so that concurrent
    processes may each make it.

    Raises:
        CannotCompileError: there is no compiler, it fails, or the result cannot be kept or loaded.
    """
    command = shlex.split(os.environ.get("CC", "gcc"))
    flags = (*_FLAGS, *_INSTRUCTIONS)
    texts = source.read_bytes(), _HEADER.read_bytes(), "\0".join((*command, *flags)).encode()
    made_of = hashlib.sha256(b"".join(texts)).hexdigest()
    try:
        library = cache_folder() / f"{source.stem}-{made_of[:16]}.so"
    except UsageError as error:
        raise CannotCompileError(str(error)) from None
    try:
        if not library.is_file():
            if not command or shutil.which(command[0]) is None:
                raise CannotCompileError(f"there is no C compiler ({' '.join(command) or 'CC is empty'})")
            with atomic_path(library) as new:
                made = subprocess.run(
                    [*command, *flags, f"-I{_HEADER.parent}", str(source), "-o", str(new), "-lm"],
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
