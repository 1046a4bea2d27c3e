"""Storage of a probe's hidden states between two blocks: in memory, or in a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...errors import RunError, UsageError
from ...files import one_line, user_path

#: Bytes of hidden states that are kept in memory; more need a folder for a file.
IN_MEMORY = 1 << 30


@contextmanager
def kept_states(shape: tuple[int, int, int], dtype: torch.dtype, scratch: str | Path | None) -> Iterator[Tensor]:
    """Allocate hidden states ``[N, T, D]`` on the CPU; above 1 GiB in a temporary file in ``scratch``.

    Raises:
        UsageError: more than 1 GiB without a folder, or ``scratch`` is not a folder.
        RunError: the disk has no room for the file.
    """
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    if n_bytes <= IN_MEMORY:
        yield torch.empty(shape, dtype=dtype)
        return
    size = f"{n_bytes / 2**30:.1f} GiB"
    if scratch is None:
        raise UsageError(
            f"the hidden states of {shape[0]} sequences of {shape[1]} tokens take {size}, and --stream keeps "
            f"{IN_MEMORY / 2**30:.3g} GiB in memory: give --scratch DIR, or fewer sequences"
        )
    folder = user_path(scratch)
    try:
        file = tempfile.NamedTemporaryFile(dir=folder, prefix="hidden-states-")  # noqa: SIM115, closed below
    except OSError as error:
        raise UsageError(f"--scratch {folder}: {one_line(error.strerror)}; give a folder to write in") from None
    with file:
        try:
            # A mapped file without room behind it would end the process when it is written into.
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        except OSError as error:
            raise RunError(f"--scratch {folder}: no room for {size} ({one_line(error.strerror)})") from None
        yield torch.from_file(file.name, shared=True, size=n_bytes // dtype.itemsize, dtype=dtype).view(shape)
