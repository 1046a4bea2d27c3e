"""Work on many matrices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

#: Matrices that a GPU works on at once, at most.
_STREAMS = 8


def symmetric_eigenvalues(upper_DD: Tensor) -> Tensor:
    """Return the eigenvalues ``[D]``, rising, of the symmetric matrix whose upper half is given; the part below the
    diagonal is not read.
    """
    if upper_DD.device.type != "cpu":
        return torch.linalg.eigvalsh(upper_DD, UPLO="U")
    # numpy's OpenBLAS takes .55 of the time of torch's MKL on an AMD processor. In the order of Fortran, the upper half
    # is the lower one.
    return torch.from_numpy(np.linalg.eigvalsh(upper_DD.numpy().T, UPLO="L"))


def each_at_once(function: Callable[[Tensor], Tensor], matrices: Iterable[Tensor], at_most: int) -> list[Tensor]:
    """Apply ``function`` to every matrix, several at a time. Eigenvalues of matrices of this size gain little from
    several cores, and lose much if the cores are busy; on a GPU a single matrix leaves most of it idle.

    Args:
        function: returns a new tensor; called in threads.
        matrices: all on one device.
        at_most: limit of matrices at once on a GPU, for memory; the CPU takes one per core.
    """
    matrices, n_threads = list(matrices), torch.get_num_threads()
    device_type = matrices[0].device.type if matrices else "cpu"
    if device_type == "cuda" and len(matrices) > 1 and at_most > 1:
        return _on_streams(function, matrices, min(at_most, len(matrices), _STREAMS))
    if device_type != "cpu":
        return [function(matrix) for matrix in matrices]
    # numpy's threads do not know of torch's.
    with threadpool_limits(1, user_api="blas"):
        if n_threads == 1 or len(matrices) < 2:
            return [function(matrix) for matrix in matrices]
        try:
            with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                return list(pool.map(function, matrices))
        finally:
            torch.set_num_threads(n_threads)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Return the same streams at every call: torch keeps memory that was freed on a stream for that stream."""
    return tuple(torch.cuda.Stream(device) for _ in range(_STREAMS))


def _on_streams(function: Callable[[Tensor], Tensor], matrices: list[Tensor], n_streams: int) -> list[Tensor]:
    """Apply ``function`` to each matrix in a thread with its own stream, because solvers make their thread wait for the
    device.
    """
    device = matrices[0].device
    caller, streams = torch.cuda.current_stream(device), _streams(device)[:n_streams]
    # Torch loads its solvers at the first call, which fails where that comes from several threads
    # (github.com/pytorch/pytorch/issues/90613).
    torch.linalg.eigvalsh(torch.ones(1, 1, device=device))
    idle: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
    for stream in streams:
        # The matrices, and all memory that is free now, are the caller's.
        stream.wait_stream(caller)
        idle.put(stream)

    def on_a_stream(matrix: Tensor) -> Tensor:
        stream = idle.get()
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                found = function(matrix)
                # Its memory is the stream's, and the caller reads it.
                found.record_stream(caller)
                return found
        finally:
            idle.put(stream)

    try:
        with ThreadPoolExecutor(n_streams) as pool:
            return list(pool.map(on_a_stream, matrices))
    finally:
        for stream in streams:
            caller.wait_stream(stream)
