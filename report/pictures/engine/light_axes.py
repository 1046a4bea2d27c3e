"""Axes that make no ticks before matplotlib draws them, which it does in files: a page needs none.

A tick is three lines and two texts; making them took half of the time that it takes to make a picture.
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
        """Start with no tick, not with one of each kind; `get_major_ticks` makes those that are asked for."""
        self.majorTicks, self.minorTicks = [], []

    def get_ticks_position(self) -> Any:
        """Where ticks are, which matplotlib asks the first of each kind."""
        _need_ticks(self)
        return super().get_ticks_position()


class _LightY(YAxis):
    def reset_ticks(self) -> None:
        """As of x."""
        self.majorTicks, self.minorTicks = [], []

    def get_ticks_position(self) -> Any:
        """As of x."""
        _need_ticks(self)
        return super().get_ticks_position()


class LightAxes(Axes):
    """As matplotlib's in all else."""

    def _init_axis(self) -> None:
        self.xaxis = _LightX(self, clear=False)
        self.yaxis = _LightY(self, clear=False)
        for side, spine in self.spines.items():
            spine.register_axis(self.xaxis if side in ("bottom", "top") else self.yaxis)
