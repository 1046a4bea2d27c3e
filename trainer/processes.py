"""The processes that a launcher started for one run: which one this is, how they join, and how they fail as one."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import RunError, UsageError

#: How long a process waits for the others inside one exchange before the run counts as hung. Rank 0 may meanwhile
#: write a large checkpoint.
TIMEOUT = timedelta(minutes=30)

# Of a failure: how long rank 0 is given to tell what all ranks fail of, and how long those that fail wait for another.
_FIRST, _TOGETHER = timedelta(seconds=2), timedelta(seconds=3)


# How long whoever listens at the run's port is given to answer, in seconds.
_ANSWER_S = 5

# How long gloo's threads are given to let go of what they hold, in seconds.
_LET_GO_S = 0.2

#: Groups that this process has joined: a new one must not find the addresses that the last one left.
_groups = count()


@dataclass(frozen=True)
class Place:
    """This process among those of its launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def n_nodes(self) -> int:
        """Machines, each with as many processes."""
        return self.world_size // self.local_world_size


def place() -> Place | None:
    """Where the launcher says that this process stands; None where there was no launcher.

    Raises:
        UsageError: what it says makes no sense.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    # One process per node, unless the launcher says more; DeepSpeed's has another name for how many.
    names = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_SIZE", "1")}
    numbers = []
    for name, default in names.items():
        text = os.environ.get(name, default)
        if not text.isdecimal():
            raise UsageError(f"{name}={text!r} in the environment is not a number: start with torchrun or deepspeed")
        numbers.append(int(text))
    found = Place(*numbers)
    if not (found.rank < found.world_size and found.local_world_size > 0) or found.world_size % found.local_world_size:
        given = " ".join(f"{name}={number}" for name, number in zip(names, numbers, strict=True))
        raise UsageError(f"{given} in the environment fits no run: start as many on every node, with torchrun")
    return found


def _restart() -> str:
    """Which start of the run's processes this is: what earlier ones left in the launcher's store is not ours."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def restarted() -> bool:
    """Whether a launcher started this process in the place of one that is gone: torchrun after a failure, SLURM after
    a requeue."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count not in ("", "0") for count in counts)


def _lost(error: RuntimeError) -> bool:
    """Whether it says that another process is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@contextmanager
def joined(where: Place | None, device: torch.device) -> Iterator[None]:
    """Stand in one process group with the others; without a place there is none.

    A group that this process has joined before is used, and left as it is: several runs of one launch may share it.

    Raises:
        RunError: the others were not found, or are gone.
    """
    if where is None or dist.is_initialized():
        yield
        return
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        store, _, _ = next(rendezvous("env://", where.rank, where.world_size, timeout=TIMEOUT))
        # Small things that are agreed upon go over the CPU, so that no GPU is waited for.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"group-{_restart()}-{next(_groups)}", store),
            rank=where.rank,
            world_size=where.world_size,
            timeout=TIMEOUT,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        why = f"rank {where.rank} of {where.world_size} cannot join the others: {error}"
        if "EADDRINUSE" in str(error):
            port = os.environ.get("MASTER_PORT")
            why = f"MASTER_PORT {port} is in use on {socket.gethostname()}: give the launcher another port"
        raise RunError(why) from None
    try:
        yield
    except RuntimeError as error:
        if not _lost(error):
            raise
        raise RunError(
            f"rank {where.rank}: another process of the run is gone; its own message says why, and --resume goes on "
            "from the last checkpoint"
        ) from error
    # Not after a failure: it could wait for those that are gone.
    dist.destroy_process_group()
    # Gloo's threads let go of the last exchange's tensors after it is over. If Python ended first they would abort it.
    time.sleep(_LET_GO_S)


def _common_store() -> dist.Store | None:
    """Where the processes can leave word without a group; None if that is gone."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Asked first, because the store itself tells at length that there is none.
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except (KeyError, ValueError, OSError):
        return None
    found: list[dist.Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S)))

    # Something else may listen there and never answer, for which the store would wait without end.
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return dist.PrefixStore(f"birthmark/{_restart()}", found[0]) if found else None


def tell(line: str, status: int, where: Place) -> int:
    """Print why this process fails, unless another one of the run has told already; returns the run's exit status.

    The first to fail knows the cause; what comes after is that it is gone. What all fail of is told by rank 0.
    """
    store = _common_store()
    if store is None:
        if where.rank > 0:
            # Most likely rank 0 fails of the same, tells it, and the launcher ends all others.
            time.sleep(_TOGETHER.total_seconds())
        print(line, file=sys.stderr, flush=True)
        return status
    with suppress(RuntimeError):
        if where.rank > 0:
            with suppress(RuntimeError):
                store.wait(["told"], _FIRST)
        if store.add("failed", 1) == 1:
            print(line, file=sys.stderr, flush=True)
            store.set("told", str(status))
        else:
            store.wait(["told"], _TOGETHER)
            status = int(store.get("told"))
        # A launcher ends the rest as soon as one is gone; those that can leave by themselves with this status.
        store.add("leaving", 1)
        end = time.monotonic() + _TOGETHER.total_seconds()
        while store.add("leaving", 0) < where.world_size and time.monotonic() < end:
            time.sleep(0.05)
    return status
