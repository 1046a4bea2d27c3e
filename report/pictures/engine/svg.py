"""Figures as SVG elements, written directly from their content.

Lines, areas and markers draw themselves, onto `_Canvas`. Axes, grids and texts are written by this module: matplotlib
measures every text before it draws it, but a browser uses its own font anyway.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_hex, to_rgba
from matplotlib.image import AxesImage
from matplotlib.path import Path
from matplotlib.text import Annotation, Text

from ..labels import text_width
from .measured_layout import LABEL_PAD, labelled_side, tick_reach, tick_size, visible_ticks

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.transforms import Transform

_LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
_POINTS = {Path.CURVE3: 2, Path.CURVE4: 3}
_BASELINE = {"top": 0.9, "center": 0.35, "center_baseline": 0.35, "bottom": -0.25, "baseline": 0.0}
"""Vertical alignment → from the point that is meant down to the baseline, as a share of the size."""
_MANY_POINTS = 24
_ANCHOR = {"left": "", "center": "middle", "right": "end"}


def svg_element(figure: Figure, prefix: str, description: str, variables: Mapping[str, str]) -> str:
    """Render the figure as an ``<svg>`` element.

    Args:
        figure: figure of `new_figure`.
        prefix: prefix of every id in it.
        description: text for screen readers.
        variables: colours that a page may change → their CSS variables.
    """
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    width, height = (72 * float(side) for side in figure.get_size_inches())
    canvas = _Canvas(width, height, prefix, variables)
    for axes in figure.axes:
        if axes.get_visible():
            _draw_axes(canvas, axes)
    _draw_children(canvas, [*figure.artists, *figure.lines, *figure.patches, *figure.texts])
    head = f'viewBox="0 0 {_n(width)} {_n(height)}" role="img" aria-label="{escape(description)}"'
    return f"<svg {head}>{''.join(canvas.parts)}</svg>"


def _n(value: float) -> str:
    """Write a length to a hundredth of a point, which is finer than any screen."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _tenths(value: float) -> str:
    """Write a coordinate to a tenth of a point, which is enough for one of many points of a line."""
    return f"{value:.1f}".removesuffix(".0")


class _Canvas(RendererBase):
    """Canvas that receives the drawing of artists, in points, and keeps it as elements."""

    def __init__(self, width: float, height: float, prefix: str, variables: Mapping[str, str]) -> None:
        super().__init__()
        self._variables = variables
        self.width, self.height, self.prefix = width, height, prefix
        self.parts: list[str] = []
        self._clips: dict[tuple[float, ...], str] = {}
        self._markers: dict[str, str] = {}

    def paint(self, name: str, colour: Any) -> str:
        """Return the properties of a fill or a stroke."""
        light, opacity = to_hex(colour), to_rgba(colour)[3]
        faint = f";{name}-opacity:{_n(opacity)}" if opacity < 1 else ""
        return f"{name}:{self._variables.get(light, light)}{faint}"

    def stroke(self, segments: Iterable[str], colour: Any, width: str) -> None:
        """Draw a path's parts in one style."""
        style = f"{self.paint('stroke', colour)};stroke-width:{width}"
        self.parts.append(f'<path d="{"".join(segments)}" style="{style}"/>')

    # Signatures are those of matplotlib.

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self.width, self.height

    def flipy(self) -> bool:
        return False

    def draw_path(self, gc: Any, path: Path, transform: Transform, rgbFace: Any = None) -> None:
        d = self._d(path, transform, rgbFace is None)
        if d:
            self.parts.append(f'<path d="{d}" style="{self._style(gc, rgbFace)}"{self._clip(gc)}/>')

    def draw_markers(
        self, gc: Any, marker_path: Path, marker_trans: Transform, path: Path, trans: Transform, rgbFace: Any = None
    ) -> None:
        shape = self._d(marker_path, marker_trans, False, flip=0.0)
        points = np.asarray(trans.transform(path.vertices))
        points = points[np.isfinite(points).all(1)]
        if not len(points):
            return
        if len(points) > _MANY_POINTS and marker_path is Path.unit_circle() and rgbFace == gc.get_rgb()[: len(rgbFace)]:
            # Dots are the round ends of lines of no length: a fifth of the bytes.
            across = 2 * abs(float(marker_trans.get_matrix()[0, 0])) + gc.get_linewidth()
            d = "".join(f"M{_tenths(x)} {_tenths(self.height - y)}h0" for x, y in points.tolist())
            look = f"fill:none;{self.paint('stroke', gc.get_rgb())};stroke-width:{_n(across)};stroke-linecap:round"
            self.parts.append(f'<path d="{d}" style="{look}"{self._clip(gc)}/>')
            return
        if shape not in self._markers:
            self._markers[shape] = f"{self.prefix}-m{len(self._markers)}"
            self.parts.append(f'<defs><path id="{self._markers[shape]}" d="{shape}"/></defs>')
        uses = "".join(
            f'<use href="#{self._markers[shape]}" x="{_n(x)}" y="{_n(self.height - y)}"/>' for x, y in points.tolist()
        )
        self.parts.append(f'<g style="{self._style(gc, rgbFace)}"{self._clip(gc)}>{uses}</g>')

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:
        raise NotImplementedError("images are written by their axes")

    def draw_text(
        self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, ismath: Any = False, mtext: Any = None
    ) -> None:
        # For artists that lay out their own text, from the left end of its baseline.
        self.write(x, y, s, prop.get_size_in_points(), gc.get_rgb(), turn=angle)

    def write(
        self,
        x: float,
        y: float,
        text: str,
        size: float,
        colour: Any,
        *,
        across: str = "left",
        along: str = "baseline",
        turn: float = 0.0,
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """Write a text at a point, in a page's font."""
        x, y = float(x), self.height - float(y)
        lines = text.split("\n")
        below = _BASELINE[along] * size
        if along in ("center", "bottom"):
            below -= 1.2 * size * (len(lines) - 1) * (0.5 if along == "center" else 1)
        weight = "bold " if bold else ""
        style = f"font:{weight}{_n(size)}px var(--{'mono' if mono else 'sans'});{self.paint('fill', colour)}"
        if _ANCHOR[across]:
            style += f";text-anchor:{_ANCHOR[across]}"
        turned = f' transform="rotate({_n(-turn)} {_n(x)} {_n(y)})"' if turn else ""
        for i, line in enumerate(lines):
            at = f'x="{_n(x)}" y="{_n(y + below + 1.2 * size * i)}"'
            self.parts.append(f'<text {at} style="{style}"{turned}>{escape(line, quote=False)}</text>')

    def image(self, rgba: np.ndarray, corners: np.ndarray) -> None:
        """Draw an image with a single colour per cell, between two opposite corners, lower left first."""
        (left, low), (right, high) = corners
        rgba = rgba[:, ::-1] if right < left else rgba
        rgba = rgba[::-1] if high < low else rgba
        data = base64.b64encode(_to_png(rgba)).decode("ascii")
        place = f'x="{_n(min(left, right))}" y="{_n(self.height - max(low, high))}"'
        size = f'width="{_n(abs(right - left))}" height="{_n(abs(high - low))}"'
        look = 'preserveAspectRatio="none" style="image-rendering:crisp-edges;image-rendering:pixelated"'
        self.parts.append(f'<image {place} {size} {look} href="data:image/png;base64,{data}"/>')

    def _d(self, path: Path, transform: Any, simplify: bool, flip: float | None = None) -> str:
        """Return a path's data, upside down for SVG."""
        height = self.height if flip is None else flip
        clean = path.cleaned(transform=transform, remove_nans=True, simplify=simplify and path.should_simplify)
        parts, last, left = [], "", 0
        write = _tenths if simplify and np.size(clean.vertices) > 2 * _MANY_POINTS else _n
        codes = np.asarray(clean.codes)
        for (x, y), code in zip(np.asarray(clean.vertices).tolist(), codes.tolist(), strict=True):
            if code == Path.STOP:
                break
            if code == Path.CLOSEPOLY:
                parts.append("Z")
                last = ""
                continue
            letter = _LETTERS[code]
            if left:
                letter, left = " ", left - 1
            elif letter == last == "L":
                letter = " "
            else:
                left = _POINTS.get(code, 1) - 1
                last = letter
            parts.append(f"{letter}{write(x)} {write(height - y)}")
        return "".join(parts)

    def _style(self, gc: Any, face: Any) -> str:
        alpha = gc.get_alpha() if gc.get_forced_alpha() else 1.0
        whole = (
            [self.paint("fill", (*face[:3], alpha if gc.get_forced_alpha() or len(face) < 4 else face[3]))]
            if (face is not None)
            else ["fill:none"]
        )
        width = gc.get_linewidth()
        if width > 0 and gc.get_rgb()[3] > 0:
            red, green, blue, own = gc.get_rgb()
            whole += [self.paint("stroke", (red, green, blue, alpha if gc.get_forced_alpha() else own))]
            whole += [f"stroke-width:{_n(width)}"]
            offset, dashes = gc.get_dashes()
            if dashes is not None:
                whole += ["stroke-dasharray:" + ",".join(_n(dash) for dash in dashes)]
                whole += [f"stroke-dashoffset:{_n(offset)}"] if offset else []
        return ";".join(whole)

    def _clip(self, gc: Any) -> str:
        box = gc.get_clip_rectangle()
        return self.clip(box.bounds) if box is not None else ""

    def clip(self, bounds: Iterable[float]) -> str:
        """Return the attribute that clips an element to a rectangle."""
        key = tuple(round(float(bound), 2) for bound in bounds)
        if key not in self._clips:
            self._clips[key] = f"{self.prefix}-c{len(self._clips)}"
            x, y, width, height = key
            place = f'x="{_n(x)}" y="{_n(self.height - y - height)}" width="{_n(width)}" height="{_n(height)}"'
            self.parts.append(f'<clipPath id="{self._clips[key]}"><rect {place}/></clipPath>')
        return f' clip-path="url(#{self._clips[key]})"'


def _to_png(rgba: np.ndarray) -> bytes:
    """Encode the pixels as a PNG, with one byte each if there are few enough colours."""
    from PIL import Image

    image, buffer = Image.fromarray(np.ascontiguousarray(rgba)), BytesIO()
    colours, index = np.unique(rgba.reshape(-1, 4), axis=0, return_inverse=True)
    opacity = b""
    if len(colours) <= 256:
        image = Image.fromarray(index.reshape(rgba.shape[:2]).astype(np.uint8), mode="P")
        image.putpalette(colours[:, :3].tobytes())
        opacity = colours[:, 3].tobytes()
    image.save(buffer, format="png", **({"transparency": opacity} if opacity.strip(b"\xff") else {}))
    return buffer.getvalue()


# ── axes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _draw_axes(canvas: _Canvas, axes: Axes) -> None:
    axes.apply_aspect()
    box = axes.get_window_extent()
    for image in axes.images:
        _draw_image(canvas, image)
    for axis, across in ((axes.xaxis, True), (axes.yaxis, False)):
        _draw_axis(canvas, axis, box, across)
    own = (*axes.spines.values(), *axes.images, axes.patch, axes.xaxis, axes.yaxis)
    _draw_children(canvas, [child for child in axes.get_children() if child not in own])
    frame = []
    for side, spine in axes.spines.items():
        if spine.get_visible():
            (x0, y0), (x1, y1) = {
                "left": ((box.x0, box.y0), (box.x0, box.y1)),
                "right": ((box.x1, box.y0), (box.x1, box.y1)),
                "bottom": ((box.x0, box.y0), (box.x1, box.y0)),
                "top": ((box.x0, box.y1), (box.x1, box.y1)),
            }[side]
            frame.append(f"M{_n(x0)} {_n(canvas.height - y0)}L{_n(x1)} {_n(canvas.height - y1)}")
    if frame:
        canvas.stroke(frame, rcParams["axes.edgecolor"], ".6")


def _draw_image(canvas: _Canvas, image: AxesImage) -> None:
    left, right, bottom, top = image.get_extent()
    corners = image.get_transform().transform([(left, bottom), (right, top)])
    rgba = image.to_rgba(np.ma.asarray(image.get_array()), bytes=True)
    canvas.image(rgba if image.origin == "upper" else rgba[::-1], corners)


def _draw_axis(canvas: _Canvas, axis: Axis, box: Any, across: bool) -> None:
    """Draw grid, ticks, their numbers, and the label."""
    if not axis.get_visible():
        return
    shown, ticks = axis.get_tick_params(), visible_ticks(axis)
    low, long = (box.x0, box.width) if across else (box.y0, box.height)
    places = [low + at * long for _, at, _ in ticks]
    foot, head = canvas.height - box.y0, canvas.height - box.y1
    if shown.get("gridOn"):
        lines = [
            f"M{_n(p)} {_n(head)}V{_n(foot)}" if across else f"M{_n(box.x0)} {_n(canvas.height - p)}H{_n(box.x1)}"
            for p in places
        ]
        canvas.stroke(lines, rcParams["grid.color"], ".5")
    length = float(shown.get("length", 3.5))
    if length and shown.get("bottom" if across else "left"):
        lines = [
            f"M{_n(p)} {_n(foot)}v{_n(length)}" if across else f"M{_n(box.x0)} {_n(canvas.height - p)}h{_n(-length)}"
            for p in places
        ]
        canvas.stroke(lines, rcParams["xtick.color"], ".8")
    side, size, reach = labelled_side(axis), tick_size(axis), tick_reach(axis)
    colour = shown.get("labelcolor", rcParams["xtick.labelcolor"])
    wide = 0.0
    for place, (_, _, text) in zip(places, ticks, strict=True):
        if side and text:
            wide = max(wide, text_width(text, size))
            if across:
                canvas.write(place, box.y0 - reach, text, size, colour, across="center", along="top")
            else:
                x = box.x0 - reach if side == "left" else box.x1 + reach
                canvas.write(x, place, text, size, colour, across="right" if side == "left" else "left", along="center")
    text = axis.get_label_text()
    if not text:
        return
    label, letters = axis.label, float(axis.label.get_fontsize())
    middle = low + long / 2
    if across:
        y = box.y0 - (reach + 1.2 * size if side else 0.0) - LABEL_PAD
        canvas.write(middle, y, text, letters, label.get_color(), across="center", along="top")
        return
    beside = (reach + wide if side else 0.0) + LABEL_PAD
    right = axis.get_label_position() == "right"
    x = box.x1 + beside + 0.9 * letters if right else box.x0 - beside - 0.25 * letters
    canvas.write(x, middle, text, letters, label.get_color(), across="center", turn=90)


def _draw_children(canvas: _Canvas, children: Iterable[Artist]) -> None:
    """Draw everything but axes, from the back to the front."""
    for child in sorted(children, key=lambda child: child.get_zorder()):
        if not child.get_visible():
            continue
        if isinstance(child, Text) and not isinstance(child, Annotation):
            _draw_text(canvas, child)
        else:
            child.draw(canvas)


def _draw_text(canvas: _Canvas, text: Text) -> None:
    if not text.get_text():
        return
    x, y = text.get_transform().transform(text.get_unitless_position())
    canvas.write(
        x, y, text.get_text(), float(text.get_fontsize()), text.get_color(), across=text.get_horizontalalignment(),
        along=text.get_verticalalignment(), turn=float(text.get_rotation()),
        mono="Mono" in text.get_fontname(), bold=text.get_fontweight() == "bold",
    )  # fmt: skip
