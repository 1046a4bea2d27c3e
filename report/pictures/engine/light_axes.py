"""Axes that create no ticks until matplotlib draws them, for files: a page needs none.

A tick is three lines and two texts; creating them took half of a picture's time.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis, YAxis


def _need_ticks(axis: Axis) -> None:
    axis.get_major_ticks(1)
    axis.get_minor_ticks(1)


class _LightX(XAxis):
    def reset_ticks(self) -> None:
        """Start without ticks, not with one of each kind; `get_major_ticks` creates those that are requested."""
        self.majorTicks, self.minorTicks = [], []

    def get_ticks_position(self) -> Any:
        """Return the place of ticks, which matplotlib reads from the first of each kind."""
        _need_ticks(self)
        return super().get_ticks_position()


class _LightY(YAxis):
    def reset_ticks(self) -> None:
        """Start without ticks, like the x axis."""
        self.majorTicks, self.minorTicks = [], []

    def get_ticks_position(self) -> Any:
        """Return the place of ticks, like the x axis."""
        _need_ticks(self)
        return super().get_ticks_position()


class LightAxes(Axes):
    """Axes that equal matplotlib's in everything else."""

    def _init_axis(self) -> None:
        self.xaxis = _LightX(self, clear=False)
        self.yaxis = _LightY(self, clear=False)
        for side, spine in self.spines.items():
            spine.register_axis(self.xaxis if side in ("bottom", "top") else self.yaxis)
