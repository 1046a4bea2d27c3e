"""Device of the commands."""

from __future__ import annotations

import torch

from .allocator import keep_freed_memory


def device() -> str:
    """Return the device on which commands run models; on a CPU, memory freed by one pass is kept for the next."""
    if torch.cuda.is_available():
        return "cuda"
    keep_freed_memory()
    return "cpu"
