"""Figures that are drawn when they are asked for: a page that shows the numbers live does not ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ParamSpec

from .panels import same_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")


class Later:
    """A figure to be drawn."""

    def __init__(self, draw: Callable[[], Figure]) -> None:
        self._draw = draw
        self._settle: Callable[[], object] = lambda: None

    @cached_property
    def alone(self) -> Figure:
        """As it is drawn by itself."""
        return self._draw()

    @cached_property
    def figure(self) -> Figure:
        """Drawn, and on one scale with those beside it."""
        self._settle()
        return self.alone

    def share(self, settle: Callable[[], object]) -> None:
        """Call ``settle`` before it is given."""
        self._settle = settle


def later(draw: Callable[P, Figure], *args: P.args, **kwargs: P.kwargs) -> Later:
    """What ``draw`` makes of its arguments, once it is asked for."""
    return Later(lambda: draw(*args, **kwargs))


def on_one_scale(figures: Sequence[Later], square: bool = False) -> None:
    """Give figures that stand side by side one scale (`same_scale`) as soon as one of them is asked for."""
    done = False

    def settle() -> None:
        nonlocal done
        if not done:
            done = True
            same_scale([one.alone for one in figures], square)

    for one in figures:
        one.share(settle)
