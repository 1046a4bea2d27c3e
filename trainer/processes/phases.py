"""Activity of a process of a run, and the time that it may take before the run counts as hung (heartbeat.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: Factor on ``trainer.timeout_s`` for phases that take longer than a step: by default half an hour.
LONGER = 15

#: Phase → how many times ``trainer.timeout_s`` a process may be in one. The first step of a start compiles.
PHASES = {
    "birth": LONGER,
    "set-up": LONGER,
    "first step": LONGER,
    "data": 1,
    "step": 1,
    "validation": LONGER,
    "snapshot": LONGER,
    "fingerprint": LONGER,
    "evaluation": LONGER,
    "checkpoint": LONGER,
    "end": LONGER,
}


class Place(NamedTuple):
    """Place of a process in its run. All processes of a run pass the same places."""

    number: int
    """Number of the place among all that the process has passed, from 1."""
    phase: str
    """A key of ``PHASES``."""
    step: int
    """The optimizer step that is being taken, or after which this happens."""

    def __str__(self) -> str:
        return f"{self.phase} (step {self.step})"


class Progress:
    """Current place of this process. Moving on costs an assignment; other threads read it."""

    def __init__(self) -> None:
        self.place = Place(1, "birth", 0)
        self.waits_for: int | None = None
        """The thread that the main thread waits for, if it does: a hang is then where that one is."""
        self.waited_s = 0.0
        """Seconds that steps waited for their batches, in all."""
        self.on_fault: Callable[[str], None] | None = None
        """Function called with the reason when this process ends because it or another hangs: by a thread of the watch,
        with little time.
        """

    def enter(self, phase: str, step: int) -> None:
        """Enter a new place. Every rank must call, in the same order."""
        self.place = Place(self.place.number + 1, phase, step)
