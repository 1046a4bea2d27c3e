"""Progress of something long, for those who wait: the time left, and when to report it again."""

from __future__ import annotations

import time

#: Seconds between two lines where there is no terminal for a bar.
LINES_S = 30.0


class Pace:
    """Rate of progress since the object was made.

    Args:
        total: amount to do.
        done: amount done before.
    """

    def __init__(self, total: float, done: float = 0) -> None:
        self.total, self._first = total, done
        self._start = self._said = time.monotonic()

    def seconds_left(self, done: float) -> float | None:
        """Estimate the seconds left from the rate since the start, pauses included; None if nothing is done yet.

        Args:
            done: amount done now.
        """
        if done <= self._first:
            return None
        return (time.monotonic() - self._start) / (done - self._first) * max(0.0, self.total - done)

    def is_due(self) -> bool:
        """Say if the last line is so long ago that another one is due; if so, count it as printed now."""
        now = time.monotonic()
        if now - self._said < LINES_S:
            return False
        self._said = now
        return True

    def said(self) -> None:
        """Note that a line about the progress has been printed."""
        self._said = time.monotonic()


def duration(seconds: float) -> str:
    """Format a time in words, as coarse as an estimate is: ``40 s``, ``12 min``, ``3 h 20 min``, ``5 days 4 h``."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h"
