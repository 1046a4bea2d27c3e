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
    """Of the symmetric matrix whose upper half this is, rising, ``[D]``; what is below the diagonal is not read."""
    if upper_DD.device.type != "cpu":
        return torch.linalg.eigvalsh(upper_DD, UPLO="U")
    # numpy's OpenBLAS takes .55 of the time of torch's MKL on an AMD processor. In the order of Fortran, the upper half
    # is the lower one.
    return torch.from_numpy(np.linalg.eigvalsh(upper_DD.numpy().T, UPLO="L"))


def each_at_once(function: Callable[[Tensor], Tensor], matrices: Iterable[Tensor], at_most: int) -> list[Tensor]:
    """``function`` of every matrix. Eigenvalues of matrices of this size gain little from several cores together, and
    lose much where the cores are busy elsewhere; on a GPU a single matrix leaves most of it idle.

    Args:
        function: gives a tensor of its own; it is called in threads.
        matrices: all on one device.
        at_most: how many at once where memory is short, on a GPU; on the CPU it is one for each core.
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
    """The same ones every time: torch keeps the memory that was freed on a stream for that stream."""
    return tuple(torch.cuda.Stream(device) for _ in range(_STREAMS))


def _on_streams(function: Callable[[Tensor], Tensor], matrices: list[Tensor], n_streams: int) -> list[Tensor]:
    """Each in a thread, because solvers make their thread wait for the device, on a stream of its own."""
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
