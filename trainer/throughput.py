"""How fast a run is: floating-point operations per token, and the peak of the device that it runs on.

The command line reads the table of GPUs before torch is loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..models.config import ModelConfig
from .gpu_specs import find_gpu

if TYPE_CHECKING:
    import torch


def flops_per_token(config: ModelConfig, n_params: int, seq_len: int) -> float:
    """Model FLOPs of one trained token, forward and backward: ``6·N + 12·L·H·d_head·T`` (arXiv 2204.02311, appendix B).

    ``N`` counts the parameters that take part in matrix products: the embedding table only where it is the head too.
    With a sliding window T is the window.
    """
    tables = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    if config.positions == "learned":
        tables += config.max_seq_len * config.d_model
    seen = min(seq_len, config.attention.window or seq_len)
    return 6.0 * (n_params - tables) + 12.0 * config.n_layers * config.n_heads * config.d_head * seen


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of a device at a precision; None where it is not known."""
    if device.type != "cuda" or precision != "bf16":
        return None
    import torch

    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has computed what it was given: a GPU returns from a call before that."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)


class Stopwatch:
    """Seconds of training, without what happens at milestones (snapshots, validation, checkpoints)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None

    def resume(self) -> None:
        """Training goes on from now, if it was paused."""
        if self._since is None:
            self._since = time.perf_counter()

    def pause(self) -> None:
        """What follows is not training."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Seconds since the last take."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
