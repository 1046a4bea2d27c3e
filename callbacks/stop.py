"""Stop of a run on request, at the next optimizer step with everything saved: Ctrl-C, SIGTERM, SLURM's SIGUSR1, or the
SIGHUP of a terminal that is gone.

One request is often several signals: DeepSpeed's launcher sends SIGTERM after the terminal's SIGINT; torchrun and SLURM
may both send SIGTERM to one process. All of them are one stop. Only a second Ctrl-C, after a pause, means at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import lightning as L

from ..child_python import stop_signals
from ..measure.ranks import begin_max_over_ranks, world_size
from ..measure.records import RunDir
from ..messages import for_terminal
from .milestones import StepCallback

# SLURM is asked to send SIGUSR1 before a job's time is over.
_STOPS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")

_Handler = Callable[[int, FrameType | None], None] | signal.Handlers

# A SIGINT that comes so long after the first, in seconds, is a person's second one.
_PAUSE_S = 2.0


class StopOnSignal(StepCallback):
    """Callback that sets ``trainer.should_stop`` at the first step boundary after a signal. Place it before all
    milestone callbacks. Python hands signals to the main thread alone: in another one a run hears none.

    A signal to one process of a run stops all of them, at the same step. With several processes, each sends at every
    step if it received one, and reads the others' at the next: no step waits for them, and the run stops a step later.

    It listens from before the training until everything is closed after it, so that the launcher's next signal does not
    hit a process that still saves.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """Signal that stopped the run."""
        self._own: signal.Signals | None = None
        self._interrupted_at: float | None = None
        self._asked: Callable[[], int] | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is None:
                self._interrupted_at = now
            elif now - self._interrupted_at >= _PAUSE_S:
                raise KeyboardInterrupt
        if self._own is None:
            self._own = signal.Signals(number)

    def listen(self) -> AbstractContextManager[None]:
        """Listen for signals within the context, around the training and its closing."""
        return _handled_by(self._handle, stop_signals(*_STOPS))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take SIGTERM back from Lightning, whose handler joins a collective at any point of the process."""
        if _is_main_thread():
            signal.signal(signal.SIGTERM, self._handle)

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Stop the run if a signal came; with several processes, if one had come to any of them a step ago."""
        asked, self._asked = self._asked, begin_max_over_ranks(self._own or 0)
        # Alone a process knows at once.
        if number := (self._asked if world_size() == 1 else asked or int)():
            self.received = signal.Signals(number)
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Answer the last question before the processes part."""
        if self._asked is not None:
            self._asked()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _handled_by(handler: _Handler, numbers: Iterable[signal.Signals]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number in numbers if _is_main_thread()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def stops_before_first_step(run: RunDir) -> Iterator[None]:
    """Have a stop signal other than Ctrl-C end the process with a line that no step was taken, within the context.

    For a run of one process, until `StopOnSignal` listens. A signal that is ignored or handled stays so.
    """
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not a process that was forked for the data
            again = f"birthmark pretrain --resume {run.path}" if RunDir.is_run(run.path) else "the same command"
            line = f"birthmark: stopped by {signal.Signals(number).name} before this start's first step"
            # Not through sys.stderr, which the signal may have interrupted in a write.
            os.write(2, for_terminal(f"{line}; go on with: {again}").encode(errors="backslashreplace") + b"\n")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    free = [n for n in stop_signals(*_STOPS[1:]) if signal.getsignal(n) is signal.SIG_DFL]
    with _handled_by(end, free):
        yield


def stopped_already() -> AbstractContextManager[None]:
    """Ignore all stop signals except Ctrl-C, around the short work after a stop."""
    return _handled_by(signal.SIG_IGN, stop_signals(*_STOPS[1:]))
