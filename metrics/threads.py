"""Work on many matrices at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def each_on_one_core(function: Callable[[Tensor], Tensor], matrices: Iterable[Tensor]) -> list[Tensor]:
    """``function`` of every matrix, as many at a time as there are cores.

    Eigenvalues of matrices of this size gain little from several cores together, and lose much where the cores are
    busy elsewhere. On other devices than the CPU they are taken one after the other.
    """
    matrices, n_threads = list(matrices), torch.get_num_threads()
    if n_threads == 1 or len(matrices) < 2 or matrices[0].device.type != "cpu":
        return [function(matrix) for matrix in matrices]
    try:
        with ThreadPoolExecutor(n_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, matrices))
    finally:
        torch.set_num_threads(n_threads)
