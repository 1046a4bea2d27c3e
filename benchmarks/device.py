"""Seconds and bytes of a call: by the clock and allocator of a GPU, or by those of the process on a CPU."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


def seconds(function: Callable[[], object], device: torch.device | str) -> float:
    """Time one call. On a GPU it is timed between two events, so that neither the launch nor the wait counts twice."""
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    function()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1000


def replayed(step: Callable[[], object], device: torch.device | str, pool: Any = None) -> Callable[[], object]:
    """Record the work that a call gives to a GPU; return a function that does the same work again, as one launch.

    An attention of a few milliseconds is sixty launches or more, which take longer on a slow host: what is compared is
    then the host's work. A model that trains gives the GPU more at once. On a CPU ``step`` itself is returned.

    Args:
        step: function that waits for nothing; called several times.
        device: device of its tensors.
        pool: memory that several records share (``torch.cuda.graph_pool_handle()``), if nobody reads their results.
    """
    if torch.device(device).type != "cuda":
        return step
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay


def release(device: torch.device | str) -> None:
    """Release unused memory to the system."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


class Peak:
    """The most bytes held on a device between :meth:`start` and :meth:`above`, over those held at first.

    On a GPU the bytes of tensors; on a CPU the resident size of the process, which is coarser (Linux only).
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device, self._before = torch.device(device), 0

    def start(self) -> None:
        """Forget the peak so far."""
        release(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif sys.platform == "linux":
            self._before = _resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")

    def above(self) -> int | None:
        """Return the bytes above the start; None if the system does not report them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self._before
        return _resident("VmHWM") - self._before if sys.platform == "linux" else None


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith(field)).split()[1])


class Spread(NamedTuple):
    """Time of one of several that took turns: median seconds, and the ratio to the first one within each round, with
    quartiles.
    """

    seconds: float
    low: float
    ratio: float
    high: float


def in_turn(
    steps: Mapping[str, Callable[[], object]], device: torch.device | str, rounds: int, warmup: int
) -> dict[str, Spread]:
    """Time calls that follow one another, A B C … A B C …: medians, since machines are noisy."""
    for _ in range(warmup):
        for step in steps.values():
            step()
    times = np.array([[seconds(step, device) for step in steps.values()] for _ in range(rounds)])
    low, middle, high = np.percentile(times / times[:, :1], [25, 50, 75], axis=0)
    columns = zip(np.median(times, axis=0), low, middle, high, strict=True)
    return {name: Spread(*map(float, values)) for name, values in zip(steps, columns, strict=True)}
