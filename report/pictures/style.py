"""What the pictures of a report share: palette, type, axes, legends, and the way from a figure to a file.

Colours are plain values in a PNG; `to_svg` turns those of the palette into CSS variables, so that a page can give them
a dark form. matplotlib is imported where it is used: a machine without it can do all the rest.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from ...errors import UsageError
from ...files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# ── palette ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Light form → dark form. Run colours after Okabe and Ito, the pale ones darkened until each has a contrast of 3:1.
INK, MUTED, GRID, PAPER = "#23272e", "#7b8087", "#dcdfe4", "#fefefe"
RUN_COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0578d", "#8a6d00", "#0092b8")
_DARK_RUN_COLOURS = ("#5fb0ea", "#ff9250", "#3fc79a", "#e48fc4", "#d6b441", "#62cdea")
THEME = {
    "--ink": (INK, "#e3e6ea"),
    "--muted": (MUTED, "#969ca5"),
    "--grid": (GRID, "#343a43"),
    "--paper": (PAPER, "#16191d"),
    **{f"--run-{i}": pair for i, pair in enumerate(zip(RUN_COLOURS, _DARK_RUN_COLOURS, strict=True))},
}
"""CSS variable → (light, dark): what a page must define for the pictures in it."""

_VARIABLE = {light: f"var({name},{light})" for name, (light, _) in THEME.items()}
# First to last block: hues of one middling lightness, readable on white and on black.
DEPTH = ("#3b82c4", "#8f6cc0", "#c9577f", "#d9722b")
REFERENCE: dict[str, Any] = {"color": MUTED, "linestyle": (0, (5, 2)), "linewidth": 1.1}
_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 8.5,
    "axes.titlepad": 5,
    "axes.unicode_minus": True,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "legend.borderaxespad": 0.2,
    "legend.columnspacing": 1.4,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 2.0,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 3,
    "svg.fonttype": "none",
    "svg.hashsalt": "birthmark",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8,
    "xtick.minor.size": 0,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8,
    "ytick.minor.size": 0,
}


@contextmanager
def styled() -> Iterator[None]:
    """Our settings around drawing *and* saving: ticks are made as late as that."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise UsageError("reports need matplotlib: pip install 'birthmark[plots]'") from None
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Layout asks a font that lacks some tokens' letters; whoever shows the SVG has them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def picture(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a function that draws a figure, so that it draws in our style."""

    @wraps(draw)
    def in_style(*args: Any, **kwargs: Any) -> Figure:
        with styled():
            return draw(*args, **kwargs)

    return in_style


def new(width: float, height: float, rows: int = 1, columns: int = 1, **share: Any) -> tuple[Figure, Any]:
    """A figure of a size in points, and its axes as ``Figure.subplots`` gives them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
    return figure, figure.subplots(rows, columns, **share)


# ── from figure to file ──────────────────────────────────────────────────────────────────────────────────────────────


def to_svg(figure: Figure, prefix: str, description: str = "") -> str:
    """The figure as an ``<svg>`` element to stand in a page: same input, same bytes.

    Every id starts with ``prefix``; colours of the palette and the fonts become CSS variables (`THEME`, ``--sans``,
    ``--mono``); text stays text. ``description`` is what a screen reader says.
    """
    buffer = BytesIO()
    with styled():
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
    with styled(), atomic_path(path) as new:
        figure.savefig(new, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})


# ── shared parts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def run_colour(run: int) -> str:
    """Colour of the ``run``-th run, the same in every picture."""
    return RUN_COLOURS[run % len(RUN_COLOURS)]


def run_marker(run: int) -> str:
    """Marker of the ``run``-th run: another one where the colours begin again."""
    return "osD^v"[run // len(RUN_COLOURS) % 5]


def short(text: str, limit: int) -> str:
    """``text``, cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def count(value: float, _: object = None) -> str:
    """A tick of a count: 0, 10, 1k, 1.5k, 10M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def power(value: float, _: object = None) -> str:
    """A tick of a logarithmic axis, without the mathematical font that a page would not have."""
    exponent = round(np.log10(value)) if value > 0 else 0
    if not np.isclose(value, 10.0**exponent, rtol=1e-6):
        return ""
    return f"{value:g}" if -3 <= exponent <= 3 else "10" + str(exponent).translate(_SUPERSCRIPT)


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def step_axis(axes: Axes, last: float, linear_until: float | None) -> None:
    """Optimizer steps from birth on; with ``linear_until`` linear up to there and logarithmic behind."""
    axes.set_xlabel("optimizer step")
    if linear_until is None or last <= linear_until:
        axes.xaxis.set_major_formatter(count)
        axes.margins(x=0.02)
        return
    axes.set_xscale("symlog", linthresh=linear_until, linscale=0.4)
    decades = 10.0 ** np.arange(np.ceil(np.log10(linear_until) - 1e-9), np.floor(np.log10(last) + 1e-9) + 1)
    if len(decades) < 3:
        decades = np.unique(np.concatenate([decades, decades * 3, [linear_until]]))
    axes.set_xticks([0.0, *decades[decades <= last * 1.001]])
    axes.xaxis.set_minor_locator(no_ticks())
    axes.xaxis.set_major_formatter(count)
    axes.set_xlim(-0.12 * linear_until, last * 1.12)


def no_ticks() -> Any:
    """A tick locator that finds none."""
    from matplotlib.ticker import NullLocator

    return NullLocator()


def log_axis(axis: Any) -> None:
    """Label the decades of a logarithmic axis and nothing between."""
    axis.set_major_formatter(power)
    axis.set_minor_locator(no_ticks())


def legend(figure: Figure, entries: Sequence[tuple[str, Any]], characters: int = 81) -> None:
    """A legend above the axes in as many columns as fit; the figure grows by its height, the axes keep theirs."""
    if not entries:
        return
    for columns in range(len(entries), 0, -1):
        # matplotlib fills columns, people read rows.
        order = [i for column in range(columns) for i in range(column, len(entries), columns)]
        labels = [short(entries[i][0], 44) for i in order]
        rows = -(-len(labels) // columns)
        if sum(max(map(len, column)) + 7 for column in np.array_split(labels, columns)) <= characters:
            break
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + rows * 12.5 / 72)
    # Placeholders first: matplotlib leaves out labels that start with "_" and reads "$" as mathematics.
    handles = [entries[i][1] for i in order]
    legend = figure.legend(handles, [str(i) for i in range(len(labels))], loc="outside upper left", ncols=columns)
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)


def line(**look: Any) -> Any:
    """A line that only a legend shows."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)
