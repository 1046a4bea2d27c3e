"""From a figure, drawn when it is asked for, to a file: SVG to stand in a page, PNG where SVG is not shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from ...files import atomic_path
from .panels import same_scale
from .style import BASE_SIZE, THEME, TICK_SIZE, figure_style

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


# ---------------------------------------------------------------- files

_VARIABLES = {light: f"var({name},{light})" for name, (light, _) in THEME.items()}


def to_svg(figure: Figure, prefix: str, description: str = "") -> str:
    """Render the figure as an ``<svg>`` element for a page: same input, same bytes.

    Every id starts with ``prefix``; colours of the palette and the fonts become CSS variables (`THEME`, ``--sans``,
    ``--mono``); text stays text. ``description`` is the text for screen readers.
    """
    with figure_style():
        from .engine.svg import svg_element

        return svg_element(figure, prefix, description, _VARIABLES)


def save_png(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Write the figure as a PNG on white, for documents that do not show SVG."""
    with figure_style(), atomic_path(path) as new:
        figure.savefig(new, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})


def save_svg(figure: Figure, path: Path) -> None:
    """Write the figure as an SVG on white of its own; text stays text."""
    with figure_style(), atomic_path(path) as new:
        figure.savefig(new, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})


def save_both(figure: Figure, folder: Path, name: str) -> list[str]:
    """Write the figure as a PNG and as an SVG of one name; return the files' names."""
    save_png(figure, folder / f"{name}.png")
    save_svg(figure, folder / f"{name}.svg")
    return [f"{name}.png", f"{name}.svg"]


FORMATS = (".pdf", ".svg", ".png")
"""Endings of files that figures are written to."""


def save_sized(
    figure: Figure, path: Path, *, width: float, height: float | None = None, font_size: float | None = None
) -> None:
    """Write the figure for a paper: on white, at its size in inches and with its letters in points; same input, same
    bytes.

    Args:
        figure: figure of this package.
        path: file with one of the suffixes `FORMATS`.
        width: inches.
        height: inches; by default in the figure's own proportion.
        font_size: size of axes' labels; all other letters keep their proportion to them.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {"Software": None}}
    kind = path.suffix.lower()
    # Papers want letters that can be searched, not outlines of their own.
    with figure_style(), rc_context({"pdf.fonttype": 42}), atomic_path(path) as new:
        drawn = figure.get_size_inches()
        figure.set_size_inches(width, height if height is not None else width * drawn[1] / drawn[0])
        if font_size is not None:
            share = font_size / BASE_SIZE
            for text in figure.findobj(Text):
                text.set_fontsize(float(text.get_fontsize()) * share)
            for axes in figure.axes:
                # Labels of ticks are made when it is drawn.
                axes.tick_params(labelsize=TICK_SIZE * share)
        figure.savefig(new, format=kind[1:], dpi=300, facecolor="white", metadata=undated[kind])
