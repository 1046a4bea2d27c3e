"""From a figure to a file: SVG to stand in a page, PNG for documents that do not show SVG.

Colours are plain values in a PNG; `to_svg` turns those of the palette into CSS variables, so that a page can give them
a dark form.
"""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ...files import atomic_path
from .style import BASE_SIZE, THEME, TICK_SIZE, our_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VARIABLE = {light: f"var({name},{light})" for name, (light, _) in THEME.items()}


def to_svg(figure: Figure, prefix: str, description: str = "") -> str:
    """The figure as an ``<svg>`` element to stand in a page: same input, same bytes.

    Every id starts with ``prefix``; colours of the palette and the fonts become CSS variables (`THEME`, ``--sans``,
    ``--mono``); text stays text. ``description`` is what a screen reader says.
    """
    buffer = BytesIO()
    with our_style():
        # Saving with a layout engine would draw everything twice.
        if (engine := figure.get_layout_engine()) is not None:
            engine.execute(figure)
            figure.set_layout_engine(None)
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # `<style>` would reach the whole page; its one rule stands in the page's own sheet.
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        element.attrib.clear()
        element.attrib.update({name: _portable(name, value, prefix) for name, value in attributes.items()})
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-label": description})
    _lean(root, set(re.findall(r"#([^\s\")]+)", buffer.getvalue().decode())), prefix)
    return ElementTree.tostring(root, encoding="unicode")


def _lean(element: ElementTree.Element, wanted: set[str], prefix: str) -> None:
    """Leave out ids that nothing refers to, groups that say nothing, and space: a third of what matplotlib writes."""
    if element.get("id", "").removeprefix(f"{prefix}-") not in wanted:
        element.attrib.pop("id", None)
    if element.tag != "text":
        element.text = None
    children = []
    for child in element:
        _lean(child, wanted, prefix)
        child.tail = None
        empty = child.tag in ("g", "defs") and not len(child)
        children += [] if empty else list(child) if child.tag == "g" and not child.attrib else [child]
    element[:] = children
    looks = {child.get("style") for child in element}
    if (
        element.tag == "g"
        and "style" not in element.attrib
        and len(element) > 1
        and len(looks) == 1
        and looks != {None}
    ):
        element.set("style", element[0].attrib["style"])  # of a cloud of markers, said once
        for child in element:
            del child.attrib["style"]


def _portable(name: str, value: str, prefix: str) -> str:
    """An attribute of matplotlib's SVG as it can stand beside other pictures in a page."""
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    if name == "clip-path":
        return value.replace("url(#", f"url(#{prefix}-")
    if name == "style":
        value = re.sub(r"#[0-9a-f]{6}", lambda match: _VARIABLE.get(match[0], match[0]), value)
        value = value.replace("'DejaVu Sans Mono'", "var(--mono)").replace("'DejaVu Sans'", "var(--sans)")
        return value.replace(": ", ":").replace("; ", ";")
    if name in ("d", "x", "y", "transform"):  # a hundredth of a point is finer than any screen
        value = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
        return " ".join(value.split())
    return value


def save_png(figure: Figure, path: Path, dpi: int = 200) -> None:
    """Write the figure as a PNG on white, for documents that do not show SVG."""
    with our_style(), atomic_path(path) as new:
        figure.savefig(new, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})


def save_svg(figure: Figure, path: Path) -> None:
    """Write the figure as an SVG on white that stands alone; text stays text."""
    with our_style(), atomic_path(path) as new:
        figure.savefig(new, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})


def save_both(figure: Figure, folder: Path, name: str) -> list[str]:
    """Write the figure as a PNG and as an SVG of one name; the files' names."""
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
        figure: as our pictures draw it.
        path: ends in one of `FORMATS`.
        width: inches.
        height: inches; by default in the figure's own proportion.
        font_size: of axes' labels; all other letters keep their proportion to them.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    undated = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}, ".png": {"Software": None}}
    kind = path.suffix.lower()
    # Papers want letters that can be searched, not outlines of their own.
    with our_style(), rc_context({"pdf.fonttype": 42}), atomic_path(path) as new:
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
