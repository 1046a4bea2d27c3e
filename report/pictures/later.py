"""Figures drawn on request: a page that shows the numbers live requests none."""

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
        """Figure as drawn by itself."""
        return self._draw()

    @cached_property
    def figure(self) -> Figure:
        """Figure, drawn, and on one scale with those beside it."""
        self._settle()
        return self.alone

    def share(self, settle: Callable[[], object]) -> None:
        """Call ``settle`` before the figure is returned."""
        self._settle = settle


def later(draw: Callable[P, Figure], *args: P.args, **kwargs: P.kwargs) -> Later:
    """Defer ``draw`` with its arguments until its figure is requested."""
    return Later(lambda: draw(*args, **kwargs))


def on_one_scale(figures: Sequence[Later], square: bool = False) -> None:
    """Give figures that stand side by side one scale (`same_scale`) once one of them is requested."""
    done = False

    def settle() -> None:
        nonlocal done
        if not done:
            done = True
            same_scale([one.alone for one in figures], square)

    for one in figures:
        one.share(settle)
