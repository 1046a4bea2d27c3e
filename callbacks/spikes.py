"""Steps whose loss or gradient norm exceeds those before them by far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

#: Steps that a step is compared with; fewer than the least, and none is a spike.
WINDOW, LEAST = 128, 32
#: So many robust standard deviations above their median is a spike.
FAR = 6.0
#: A standard deviation over the median absolute deviation, of a normal distribution.
_SD_OVER_MAD = 1.4826


class Spike(NamedTuple):
    """A spike."""

    step: int
    value: float
    z: float
    """Robust standard deviations above the median."""


class Spikes:
    """Counter of the spikes of one quantity.

    A spike is larger than all of the 128 values before it (32 at least), and more than 6 robust standard deviations
    above their median; one is 1.4826 times their median absolute deviation. It enters the window as any other value:
    the first steps of a new level are spikes, not all of them. A value that is not finite is of a skipped step, and
    left out.
    """

    def __init__(self) -> None:
        self.count = 0
        self._window: deque[float] = deque(maxlen=WINDOW)

    def take(self, steps: Sequence[int], values: Sequence[float]) -> list[Spike]:
        """Return the spikes among the next steps."""
        found = []
        for step, value in zip(steps, values, strict=True):
            if not math.isfinite(value):
                continue
            if (z := self._z(value)) > FAR:
                self.count += 1
                found.append(Spike(step, value, z))
            self._window.append(value)
        return found

    def _z(self, value: float) -> float:
        if len(self._window) < LEAST or value <= max(self._window):
            return 0.0
        middle = median(self._window)
        spread = _SD_OVER_MAD * median(abs(other - middle) for other in self._window)
        return (value - middle) / spread if spread else math.inf

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {"count": self.count, "window": list(self._window)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state` from a checkpoint."""
        self.count, self._window = state["count"], deque(state["window"], maxlen=WINDOW)
