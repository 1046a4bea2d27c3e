"""The process group of a run: joining of its processes, and errors when one is gone."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch.distributed.rendezvous import rendezvous

from ...errors import RunError
from ...messages import one_line
from ...models.attention.context_parallel import ContextGroup, context_ranks
from .joint_failure import LONGER
from .launched_process import LaunchedProcess, launchers_store, start_name

# Other open files of a process: libraries, data, logs, checkpoints.
_ROOM = 128


def sockets(process: LaunchedProcess, *, engine: bool) -> int:
    """Count the sockets that a process of a run needs, beside a few that do not grow with the run.

    Gloo connects every process of a group to every other. An engine (DeepSpeed) makes another group; a context group
    is small. If the launcher has no store, rank 0 holds two connections from every process.
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


# ---------------------------------------------------------------- the process group of a run
# Joining of its processes, and errors when one is gone.

#: Time that starting processes wait for one another, and least time in a collective: rank 0 may verify a large corpus.
TIMEOUT = timedelta(minutes=30)

# Time, in seconds, that gloo's threads get to release their last tensors.
_RELEASE_S = 0.2

#: Groups that this process has joined: a new one must not find the addresses that the last one left.
_groups = count()


def _lost(error: RuntimeError) -> bool:
    """Return True if an error says that another process is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def collective_timeout(timeout_s: float) -> timedelta:
    """Return torch's limit of the wait in one collective: longer than the watch allows (heartbeat.py), and a day
    without a watch.
    """
    return max(TIMEOUT, timedelta(seconds=(LONGER + 2) * timeout_s)) if timeout_s else timedelta(days=1)


def record_collectives(folder: Path) -> None:
    """Have NCCL keep its last collectives, and write them beside the run if one of them takes too long.

    Call it before processes join. Variables set by the user are kept.

    Args:
        folder: folder of the run; files ``nccl_trace_rank_R`` go there, for ``torch.distributed.flight_recorder``.
    """
    found = {
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000",
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"): str(folder.absolute() / "nccl_trace_rank_"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT",): "1",
    }
    # The second of a variable's two names is that of older versions of torch.
    for names, value in found.items():
        if not any(name in os.environ for name in names):
            os.environ.update(dict.fromkeys(names, value))


def _leave() -> None:
    """Destroy the group. DeepSpeed, if it has joined, drops its groups too, so that the next run starts afresh."""
    deepspeed_comm: Any = sys.modules.get("deepspeed.comm")
    joined = deepspeed_comm is not None and deepspeed_comm.is_initialized()
    (deepspeed_comm if joined else dist).destroy_process_group()


@contextmanager
def join_process_group(
    process: LaunchedProcess | None, device: torch.device, timeout: timedelta = TIMEOUT
) -> Iterator[None]:
    """Join one process group with the others within the context; a process without a launcher forms a group of its own.
    A group that this process has joined before is reused and kept: several runs of one launch may share it.

    Args:
        process: this process among those of its launcher.
        device: device of this process.
        timeout: longest wait for the others in one collective.

    Raises:
        RunError: the others were not found, are gone, or do not answer.
    """
    if process is None or dist.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        store, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=TIMEOUT))
        # Small things that are agreed upon go over the CPU, so that no GPU is waited for.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"group-{start_name()}-{next(_groups)}", store),
            rank=process.rank,
            world_size=process.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        said = str(error).partition("Exception raised from")[0].strip()  # a stack of C++ follows
        why = f"rank {process.rank} of {process.world_size} cannot join the others: {one_line(said)}"
        if "EADDRINUSE" in str(error):
            port = os.environ.get("MASTER_PORT")
            why = f"MASTER_PORT {port} is in use on {socket.gethostname()}: give the launcher another port"
        raise RunError(why) from None
    try:
        yield
    except RuntimeError as error:
        if not _lost(error):
            raise
        late = "timed out" in str(error).lower()
        raise RunError(
            f"rank {process.rank}: "
            + (
                f"the others have not answered for {timeout.total_seconds():.0f} s, though none is known to be gone"
                if late
                else "another process of the run is gone, and its own message or the launcher's says why"
            )
            + "; --resume goes on from the last checkpoint"
            # A script without the command's own ending would print torch's traceback before this line.
        ) from None
    # Not after a failure: it could wait for those that are gone.
    _leave()
    # Gloo's threads let go of the last exchange's tensors after it is over. If Python ended first they would abort it.
    time.sleep(_RELEASE_S)


class _Untraced(ContextGroup):
    """A group whose exchange ends a compiled graph: what is before it in a block and what is behind are two graphs."""

    # Decorated only by trainings: it loads torch's compiler.
    gathered = torch.compiler.disable(ContextGroup.gathered)


def join_context_group(size: int, timeout: timedelta) -> ContextGroup:
    """Join the group of ``size`` neighbouring processes that divide sequences among them. Collective: call on every
    rank.

    Args:
        size: number of its processes, which divides those of the run.
        timeout: longest wait for the others in one collective.
    """
    number, place = context_ranks(dist.get_rank(), size)
    # Each process takes part in the making of every group.
    groups = [
        dist.new_group(range(first, first + size), timeout=timeout) for first in range(0, dist.get_world_size(), size)
    ]
    return _Untraced(size, place, groups[number])


# ---------------------------------------------------------------- launch environment
# Processes of a run for Lightning, whatever launched them.


class LauncherEnvironment(ClusterEnvironment):
    """Environment from the launcher's facts (``launched_process.py``); Lightning itself knows only torchrun's
    variables.
    """

    def __init__(self, process: LaunchedProcess) -> None:
        super().__init__()
        self.process = process

    @property
    def creates_processes_externally(self) -> bool:
        """Always True: the processes exist already."""
        return True

    @property
    def main_address(self) -> str:
        """Host of rank 0."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """Port of rank 0."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Return False: the environment is passed explicitly."""
        return False

    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return self.process.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the size is fixed."""

    def global_rank(self) -> int:
        """Return this process's rank among all."""
        return self.process.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is fixed."""

    def local_rank(self) -> int:
        """Return this process's rank on its node."""
        return self.process.local_rank

    def node_rank(self) -> int:
        """Return the number of its node."""
        return self.process.rank // self.process.local_world_size
