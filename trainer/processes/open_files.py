"""Limit of open files and sockets of a process: joining takes sockets for every other process of the run."""

from __future__ import annotations

import sys

from ...errors import RunError
from .launched_process import LaunchedProcess, launchers_store

# Other open files of a process: libraries, data, logs, checkpoints.
_ROOM = 128


def sockets(process: LaunchedProcess, *, engine: bool) -> int:
    """Count the sockets that a process of a run needs, beside a few that do not grow with the run.

    Gloo connects every process of a group to every other. An engine (DeepSpeed) makes another group. If the launcher
    has no store, rank 0 holds two connections from every process.
    """
    groups = 2 if engine else 1
    return process.world_size * (groups + (2 if process.rank == 0 and not launchers_store() else 0))


def allow_sockets(process: LaunchedProcess, *, engine: bool) -> None:
    """Raise this process's limit of open files to the number that the run needs, as far as the system allows.

    Raises:
        RunError: the system does not allow it.
    """
    if sys.platform == "win32":
        return
    import resource

    needed = sockets(process, engine=engine) + _ROOM
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RunError(
            f"ulimit -n is {hard} at most, and each of {process.world_size} processes needs {needed} open files: raise "
            "the hard limit on every node (LimitNOFILE of its service, --ulimit nofile of a container), or use fewer"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
