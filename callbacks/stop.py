"""The first Ctrl-C or SIGTERM ends a run at the next optimizer step with everything saved, the second at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import lightning as L

from .schedule import StepCallback


class StopOnSignal(StepCallback):
    """Sets ``trainer.should_stop`` at the first step boundary after a signal. Stands before all milestone callbacks."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the handlers over; Lightning's own would raise in the middle of a step."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def on_step_end(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Stop here if a signal came."""
        if self.received is not None:
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
