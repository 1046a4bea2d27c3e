"""Traces of chosen steps, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from ...callbacks.milestones import StepCallback
from ...errors import UsageError

#: Free bytes that traces ask for: those of a step of a large model are some hundred megabytes before compression.
_ROOM = 10**9
#: Events that a GPU's memory snapshot remembers.
_EVENTS = 100_000


def check_room(folder: Path) -> None:
    """Check that traces can be written to ``folder``, which is created.

    Raises:
        UsageError: the folder is not writable, or has too little room.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(
            f"trainer.profile writes to {folder}, which cannot be written ({error.strerror}): make room, or remove it"
        ) from None
    if free < _ROOM:
        raise UsageError(
            f"trainer.profile writes to {folder}, where {free / 1e6:.0f} MB are free: make {_ROOM / 1e6:.0f} MB of "
            "room, or remove it"
        )


class StepProfile(StepCallback):
    """Callback that writes a trace of chosen steps, consecutive ones into one; and on a GPU a snapshot of its memory.

    Stands behind the log's clock, and on one rank alone: the others wait for it in the step's collectives.

    Args:
        steps: optimizer steps, counted from 1; those that a resumed run has behind it are passed over.
        folder: folder for ``steps-FIRST-LAST.json.gz`` and ``….pickle`` (for pytorch.org/memory_viz).
        device: device of the run.
    """

    def __init__(self, steps: Collection[int], folder: Path, device: torch.device) -> None:
        self.steps, self.folder, self.on_gpu = frozenset(steps), folder, device.type == "cuda"
        self._profiler: profile | None = None
        self._first = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin before the first micro-batch of a step."""
        if self._profiler is None and trainer.global_step + 1 in self.steps:
            self._first = trainer.global_step + 1
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
            if self.on_gpu:
                torch.cuda.memory._record_memory_history(max_entries=_EVENTS)
            self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
            self._profiler.start()

    def on_step_end(self, trainer: L.Trainer, module: Any, step: int) -> None:
        """Write the trace, unless the next step is chosen too."""
        if self._profiler is None or (step + 1 in self.steps and step < trainer.max_steps and not trainer.should_stop):
            return
        # The time of writing does not count as training.
        module.stopwatch.pause()
        profiler = self._end()
        path = self.folder / f"steps-{self._first:08d}-{step:08d}"
        if self.on_gpu:
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(path.with_suffix(".json.gz")))

    def _end(self) -> profile:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        return profiler

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Drop the trace of an unfinished step."""
        if self._profiler is not None:
            self._end()
            if self.on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)
