"""This process among those that a launcher started for one run, as the launcher's environment says."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass

from ...errors import UsageError
from .srun import is_srun_task, torch_variables

#: Of Linux's prctl: the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class LaunchedProcess:
    """This process among those of its launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def n_nodes(self) -> int:
        """Machines, each with as many processes."""
        return self.world_size // self.local_world_size


def launched_process() -> LaunchedProcess | None:
    """This process, as the launcher's environment variables say; None where there was no launcher.

    srun's are given their names in torch first, so that torch and DeepSpeed read them too.

    Raises:
        UsageError: what it says makes no sense.
    """
    if "RANK" not in os.environ and is_srun_task(os.environ):
        os.environ.update(torch_variables(os.environ))
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    # One process per node, unless the launcher says more; DeepSpeed's has another name for how many.
    names = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_SIZE", "1")}
    numbers = []
    for name, default in names.items():
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UsageError(f"{name}={text!r} in the environment is not a number: start with a launcher")
        numbers.append(int(text))
    found = LaunchedProcess(*numbers)
    if not (found.rank < found.world_size and found.local_world_size > 0) or found.world_size % found.local_world_size:
        given = " ".join(f"{name}={number}" for name, number in zip(names, numbers, strict=True))
        raise UsageError(f"{given} in the environment fits no run: start as many on every node, with torchrun")
    return found


def stop_with_agent() -> None:
    """Have Linux send this process SIGTERM when the torchrun agent that started it dies, however it dies.

    The run then stops with a checkpoint. Without this it would train on alone, and a new start would find it locked.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    agent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl cannot tie this process to its torchrun agent")
    if os.getppid() != agent:  # it died before the system knew
        os.kill(os.getpid(), signal.SIGTERM)


def start_name() -> str:
    """A name for this start of the run's processes: what earlier ones left in the launcher's store is not ours.

    It is torchrun's count of restarts. Several agents each count by themselves, and may differ; but where a process of
    the run serves the store, and not an agent, every start has a new one and needs no name.
    """
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1" and not launchers_store():
        return "any"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def launchers_store() -> bool:
    """Whether the store at MASTER_PORT is in the launcher's own process; else it is in that of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def restarted() -> bool:
    """Whether a launcher started this process in the place of one that is gone: torchrun after a failure, SLURM after
    a requeue."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def restarts_are_counted() -> bool:
    """Whether :func:`restarted` knows of all: torchrun counts no start that a node's joining or leaving makes."""
    return "TORCHELASTIC_RUN_ID" not in os.environ
