"""Processes of a run: the rank of this one, its part of the work, and agreement between all.

Without a process group there is one process. In a group the calls are collective: every rank must make them in the same
order.
"""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RunError, UsageError
from ..metrics.summed_metrics import sum_over_ranks as sum_over_ranks

T = TypeVar("T")


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if _grouped() else 0


def world_size() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if _grouped() else 1


def rank_on_host(number: int, host: str | None = None) -> str:
    """Name a rank in a message by its number and its host, which is by default this one."""
    return f"rank {number} on host {socket.gethostname() if host is None else host}"


def batches_of_rank(x: Tensor, batch_size: int) -> list[tuple[Tensor, bool]]:
    """Split this rank's contiguous part of the rows of ``x`` into batches; return each with a flag that says if it
    counts.

    Parts differ by at most one row. A rank with fewer batches than another adds a row that does not count: if weights
    are sharded, all ranks must make the same number of passes.
    """
    n_ranks = world_size()
    mine = x.tensor_split(n_ranks)[rank()]
    batches = [(batch, True) for batch in mine.split(batch_size)] if len(mine) else []
    most = math.ceil(math.ceil(len(x) / n_ranks) / batch_size)
    return batches + [(x[:1], False)] * (most - len(batches))


def gather_rows(mine: Tensor, n_rows: int) -> Tensor:
    """Gather all ``n_rows`` rows from the ranks' parts of :func:`batches_of_rank`. Returned on the CPU."""
    n_ranks = world_size()
    if n_ranks == 1:
        return mine
    lengths = [len(part) for part in torch.arange(n_rows).tensor_split(n_ranks)]
    padded = mine.new_zeros(max(lengths), *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in range(n_ranks)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def max_over_ranks(value: int) -> int:
    """Return the largest of the ranks' values. Collective, on the CPU, so that no device is waited for."""
    if world_size() == 1:
        return value
    values = torch.tensor(value)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return int(values)


def begin_max_over_ranks(value: int) -> Callable[[], int]:
    """Start :func:`max_over_ranks`; return a function that waits for the largest value. Collective: every rank must
    call both.
    """
    if world_size() == 1:
        return lambda: value
    values = torch.tensor(value)
    work = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)

    def result() -> int:
        assert work is not None
        work.wait()
        return int(values)

    return result


def from_rank_zero(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0 alone and return its result on every rank; if it fails there, it fails on every rank."""
    if world_size() == 1:
        return make()
    sent: list[tuple[T | None, Exception | None]] = [(None, None)]
    failure: Exception | None = None
    if rank() == 0:
        try:
            sent = [(make(), None)]
        except Exception as error:
            failure = error
            known = isinstance(error, (UsageError, RunError))
            sent = [(None, error if known else RunError(f"rank 0: {type(error).__name__}: {error}"))]
    dist.broadcast_object_list(sent)
    value, raised = sent[0]
    if (cause := failure or raised) is not None:
        raise cause
    return value  # type: ignore[return-value]


def on_all_ranks(make: Callable[[], T]) -> T:
    """Return what ``make`` returns. A ``UsageError``, ``RunError`` or ``OSError`` of one rank is an error on every
    rank."""
    if world_size() == 1:
        return make()
    failure: UsageError | RunError | OSError | None = None
    try:
        value = make()
    except (UsageError, RunError, OSError) as error:
        failure = error
    said = gather_objects(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for number, problem in enumerate(said):
        if problem is not None:
            raise RunError(f"rank {number}: {problem}")
    return value


def gather_objects(mine: T) -> list[T]:
    """Return the values of all ranks, in their order; plain data. Collective."""
    if world_size() == 1:
        return [mine]
    found: list[T] = [mine] * world_size()
    dist.all_gather_object(found, mine)
    return found


def check_same(what: str, value: str, mend: str) -> None:
    """Raise RunError on every rank if ``value`` differs between them."""
    if world_size() == 1:
        return
    mine = torch.frombuffer(bytearray(hashlib.sha256(value.encode()).digest()), dtype=torch.uint8)
    hashes = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(hashes, mine)
    other = next((i for i, found in enumerate(hashes) if not torch.equal(found, hashes[0])), None)
    if other is not None:
        raise RunError(f"{what} of rank {other} is not that of rank 0: {mend}")


def check_clocks(longest_s: float) -> None:
    """Raise RunError on every rank if the clocks of two ranks differ by more than ``longest_s`` seconds."""
    if world_size() == 1:
        return
    dist.barrier()
    clocks = [torch.zeros((), dtype=torch.float64) for _ in range(world_size())]
    dist.all_gather(clocks, torch.tensor(time.time(), dtype=torch.float64))
    ahead = [float(clock - clocks[0]) for clock in clocks]
    worst = max(range(world_size()), key=lambda i: abs(ahead[i]))
    if abs(ahead[worst]) > longest_s:
        raise RunError(
            f"the clock of rank {worst} is {abs(ahead[worst]):.0f} s {'ahead of' if ahead[worst] > 0 else 'behind'} "
            "rank 0's: set the nodes' clocks by one time server"
        )
