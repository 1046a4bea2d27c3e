"""Memory of a training step on CPU: kept between steps in place of given back."""

from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed; returns whether it does.

    By default glibc maps every large tensor afresh and gives it back when it is freed, so that each step faults all of
    its memory in again, page by page: about a sixth of a step's time on CPU (benchmarks/results/attention_cost.md). A
    step frees what the next one asks for. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
