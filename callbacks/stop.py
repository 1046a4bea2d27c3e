"""The first Ctrl-C or SIGTERM ends a run at the next optimizer step with everything saved, the second at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning as L

from ..measure.ranks import max_over_ranks
from .milestones import StepCallback


class StopOnSignal(StepCallback):
    """Sets ``trainer.should_stop`` at the first step boundary after a signal. Stands before all milestone callbacks.

    A signal to one process of a run stops all of them, at the same step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """What the run was stopped by."""
        self._own: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Not `received`: a launcher hands a signal to one process after the other, and its second is not the user's.
        if self._own is not None:
            raise KeyboardInterrupt
        self._own = signal.Signals(number)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the handlers over; Lightning's own would raise in the middle of a step."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Stop here if a signal came."""
        if number := max_over_ranks(self._own or 0):
            self.received = signal.Signals(number)
            trainer.should_stop = True

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Give the handlers back."""
        self._restore()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the handlers back."""
        self._restore()
