"""From a figure to a file: PNG and SVG, the same bytes for the same figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...files import atomic_path
from .style import figure_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
