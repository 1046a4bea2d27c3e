"""Speed and memory of a run: operations per token, the device's peaks, seconds of steps.

The command line reads the table of GPUs before torch is loaded.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..models.config import ModelConfig
from ..models.parameter_shapes import n_idle
from .gpu_specs import find_gpu

if TYPE_CHECKING:
    import torch


def flops_per_token(config: ModelConfig, n_params: int, seq_len: int, *, frozen: bool = False) -> float:
    """Compute the model FLOPs of one trained token, forward and backward: ``6·N + 12·L·H·d_head·T`` (arXiv 2204.02311,
    appendix B; for latent attention with the mean width of keys and values).

    ``N`` counts the parameters that take part in matrix products: the embedding table only if it is the head too. Only
    the experts that a token passes count. With a sliding window T is the window, or its mean over the blocks. For a
    ``frozen`` model, whose adapter alone is trained, ``6·N`` becomes ``4·N``: no gradients of its matrices are
    computed.
    """
    tables = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    if config.positions == "learned":
        tables += config.max_seq_len * config.d_model
    windows = [config.attention.window_of(block) for block in range(config.n_layers)]
    seen = sum(min(seq_len, window or seq_len) for window in windows)
    active = n_params - n_idle(config) - tables
    products = 6.0 * config.n_heads * (config.d_key + config.d_value) * seen
    return (4.0 if frozen else 6.0) * active + products


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of a device at a precision; None if unknown."""
    if device.type != "cuda" or precision != "bf16":
        return None
    import torch

    gpu = find_gpu(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has finished its work: a GPU returns from a call before that."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in GB: allocated on a GPU since the last call or, on CPU, resident in this process
    so far.
    """
    import torch

    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    if sys.platform == "win32":
        return math.nan
    import resource

    # In kilobytes on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


class HostClock:
    """Clock for a device that has finished its work when a call returns."""

    def now(self) -> Any:
        """Return this moment."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two past moments."""
        return float(end - start)


class GpuClock(HostClock):
    """Clock by moments in a GPU's queue: when the GPU reaches them, not when they were queued."""

    def now(self) -> Any:
        """See :class:`HostClock`; the GPU is not waited for."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @override
    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000


class Stopwatch:
    """Seconds of training, and of each step, without the work at milestones (snapshots, validation, checkpoints).

    Args:
        clock: clock of the device, for the steps.
    """

    def __init__(self, clock: HostClock | None = None) -> None:
        self.clock = clock or HostClock()
        self.seconds = 0.0
        self._since: float | None = None
        self._began: Any = None
        self._laps: list[tuple[Any, Any]] = []

    def resume(self) -> None:
        """Resume counting, if it was paused."""
        if self._since is None:
            self._since, self._began = time.perf_counter(), self.clock.now()

    def lap(self) -> None:
        """Note the end of a step."""
        ended = self.clock.now()
        self._laps.append((self._began, ended))
        self._began = ended

    def pause(self) -> None:
        """Stop counting: the following work is not training."""
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Return the seconds since the last take."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def take_laps(self) -> list[float]:
        """Return the seconds of each step since the last such take, which the device must have finished."""
        laps, self._laps = self._laps, []
        return [self.clock.seconds(began, ended) for began, ended in laps]
