"""The process group of a run: how its processes join, and what it means when one is gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import RunError
from .launched_process import LaunchedProcess, start_name

#: How long a process waits for the others inside one collective before the run counts as hung. Rank 0 may meanwhile
#: write a large checkpoint.
TIMEOUT = timedelta(minutes=30)

# How long gloo's threads are given to release their last tensors, in seconds.
_RELEASE_S = 0.2

#: Groups that this process has joined: a new one must not find the addresses that the last one left.
_groups = count()


def _lost(error: RuntimeError) -> bool:
    """Whether it says that another process is gone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@contextmanager
def join_process_group(process: LaunchedProcess | None, device: torch.device) -> Iterator[None]:
    """Stand in one process group with the others; a process that no launcher started is alone.

    A group that this process has joined before is used, and left as it is: several runs of one launch may share it.

    Raises:
        RunError: the others were not found, or are gone.
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
            timeout=TIMEOUT,
            device_id=device if on_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        why = f"rank {process.rank} of {process.world_size} cannot join the others: {error}"
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
            f"rank {process.rank}: another process of the run is gone; its own message says why, and --resume goes on "
            "from the last checkpoint"
        ) from error
    # Not after a failure: it could wait for those that are gone.
    dist.destroy_process_group()
    # Gloo's threads let go of the last exchange's tensors after it is over. If Python ended first they would abort it.
    time.sleep(_RELEASE_S)
