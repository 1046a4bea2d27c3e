"""Devices that take no more bytes: a limit of the system, and a library that stands before libc."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_LIBRARY = "TORTURE_DEVICE"

#: Errors of devices, by the words that a person reads.
REASONS = {"quota": errno.EDQUOT, "file size": errno.EFBIG, "device error": errno.EIO, "full": errno.ENOSPC}


def preload() -> None:
    """Start this process again with the failing device loaded, once; without a compiler of C limits stand for it."""
    if (loaded := os.environ.get(_LIBRARY)) is not None:
        if loaded:
            atexit.register(shutil.rmtree, Path(loaded).parent, ignore_errors=True)
        return
    library = Path(tempfile.mkdtemp(prefix="failing-device-"), "failing_device.so")
    source = Path(__file__).with_name("failing_device.c")
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no failing device, since it cannot be compiled ({error}): limits of files alone are tried", flush=True)
        os.environ[_LIBRARY] = ""
        return
    os.environ |= {_LIBRARY: str(library), "LD_PRELOAD": str(library)}
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.argv])


def fails(reason: str, after: int, below: Path) -> Callable[[], None]:
    """Make a function that lets this process's writes below a folder fail after so many bytes.

    Without a failing device, every file is limited to that size.
    """

    def begin() -> None:
        if library := os.environ.get(_LIBRARY):
            found = ctypes.CDLL(library)
            found.fail_writes(os.fsencode(below), REASONS[reason], ctypes.c_longlong(after))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (after, after))

    return begin


def limits_files(after: int) -> Callable[[], None]:
    """Make a function that limits every file of this process to a size, as ``ulimit -f`` does."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (after, after))
