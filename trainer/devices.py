"""Devices that run models, and how their memory is allocated: kept between steps, or in segments that grow."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory; return True if it does.

    By default glibc maps every large tensor afresh and gives it back when it is freed, so that each step faults all of
    its memory in again, page by page: about a sixth of a step's time on CPU (benchmarks/results/attention_cost.md). A
    step frees what the next one asks for. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


@contextmanager
def growing_segments() -> Iterator[None]:
    """Let torch's allocator on GPUs grow its segments within the context, unless the environment says how it allocates.

    Snapshots, validation and steps ask for different sizes, and each would leave holes in segments that cannot grow.
    Call it before memory is allocated on a GPU; Windows does not support it.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the second is the name since torch 2.9
    if sys.platform != "linux" or any(name in os.environ for name in names):
        yield
        return
    os.environ[names[0]] = "expandable_segments:True"
    try:
        yield
    finally:
        # What the caller starts afterwards, such as another program, allocates as it likes.
        os.environ.pop(names[0], None)


# ---------------------------------------------------------------- device of the commands


def device() -> str:
    """Return the device on which commands run models; on a CPU, memory freed by one pass is kept for the next."""
    if torch.cuda.is_available():
        return "cuda"
    keep_freed_memory()
    return "cpu"
