"""Where commands run models."""

from __future__ import annotations

import torch

from .allocator import keep_freed_memory


def device() -> str:
    """Where commands run models; on the CPU, what one pass frees is kept for the next."""
    if torch.cuda.is_available():
        return "cuda"
    keep_freed_memory()
    return "cpu"
