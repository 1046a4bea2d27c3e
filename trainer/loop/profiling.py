"""Memory that is cleaned up between steps, and traces of chosen steps for Perfetto or chrome://tracing."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile

from ...callbacks.milestones import StepCallback, is_due, never
from ...errors import UsageError

#: Optimizer steps between collections of young objects.
_EVERY = 50


@contextmanager
def collector_at_rest(device: torch.device) -> Iterator[None]:
    """Let Python's garbage collector run, within the context, only when called, and skip all objects that exist now.

    By itself it runs whenever enough objects were made, scans all of a large library's, and does so at different times
    on each rank, while all others wait. It is restored afterwards.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    # Objects that are garbage now would stay forever. For a GPU's memory a full scan pays.
    gc.collect(1 if device.type == "cpu" else 2)
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


class CleanUp(StepCallback):
    """Callback that collects garbage at the same steps on every rank, and returns a GPU's cached memory after
    milestones.

    Stands after all that measures and saves: what that needed is not what a step needs.

    Args:
        every: optimizer steps between milestones.
        device: device of the run.
        more: asks for further steps.
    """

    def __init__(self, every: int, device: torch.device, more: Callable[[int], bool] = never) -> None:
        self.every, self.device, self.more = every, device, more

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Clean up after the measurement of birth."""
        if trainer.global_step == 0:
            self._after_milestone()

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Collect garbage if it is due."""
        if is_due(trainer, self.every, self.more):
            self._after_milestone()
        elif step % _EVERY == 0:
            gc.collect(1)

    def _after_milestone(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# ---------------------------------------------------------------- profiling
# Traces of chosen steps, to be opened in Perfetto or chrome://tracing.

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
