"""Python as a child process: no file of the working folder takes the place of a module.

Python puts the working folder first on its search path for ``-c`` and ``-m``, and wherever PYTHONPATH has an empty
entry. A ``torch.py`` that lies there, perhaps in a folder that somebody else published, would then be run. A child of
this package therefore starts with ``-P``. It is not ``-I``, which also ignores PYTHONPATH and a user's site-packages:
both are how some machines install this package, and both are named by the user.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def python_command(*arguments: str | Path) -> list[str]:
    """Make the command line of a Python that is given ``arguments``, such as ``-m MODULE``.

    Pair it with :func:`python_environment`.
    """
    return [sys.executable, "-P", *map(str, arguments)]


def python_environment(*more: Mapping[str, str]) -> dict[str, str]:
    """Make the environment of such a child and of its own children: this process's environment, and ``more``."""
    found = dict(os.environ)
    for variables in more:
        found |= variables
    found["PYTHONSAFEPATH"] = "1"
    if "PYTHONPATH" in found:
        found["PYTHONPATH"] = search_path(found["PYTHONPATH"].split(os.pathsep))
    return found


def search_path(entries: Iterable[str]) -> str:
    """Write a search path for the environment: absolute, without the empty entries that mean the working folder."""
    return os.pathsep.join(str(Path(entry).absolute()) for entry in entries if entry)


def stop_signals(*names: str) -> list[signal.Signals]:
    """Return the signals of these names that ask this process to stop: Windows lacks some, and under nohup SIGHUP is
    ignored, so that a process outlives its terminal.
    """
    found = [number for number in signal.Signals if number.name in names]
    return [one for one in found if one.name != "SIGHUP" or signal.getsignal(one) != signal.SIG_IGN]


#: Option of Linux's prctl: the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent dies, however it dies; other systems have no such thing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl cannot tie this process to its parent")
    if os.getppid() != parent:  # it died before the system knew
        os.kill(os.getpid(), signal.SIGTERM)


def leave_working_folder() -> None:
    """Take the working folder off this process's search path where nobody has named it, also for its children.

    ``python -m`` puts it first before this can be called; ``python -P -m`` does not.
    """
    here, given = str(Path.cwd()), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.update(python_environment())
    if here not in search_path(given).split(os.pathsep):
        first = len(given) + 1  # that of ``-m``, then those of PYTHONPATH; what is installed follows
        sys.path[:first] = [entry for entry in sys.path[:first] if entry not in ("", here)]
