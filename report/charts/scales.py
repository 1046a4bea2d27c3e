"""Mapping of numbers to places in a still picture: linear and logarithmic scales, their ticks, and colours of cells."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...findings.formatting import counted, format_value, power_text
from ..pictures.axes import OF_ZEROS, on_axis
from ..pictures.style import DEPTH

CIVIDIS = (
    "#00224e", "#002e6c", "#1a386f", "#34436e", "#494d6e", "#5a5870", "#6a6372", "#797076",
    "#887c78", "#988a77", "#a99873", "#bba66c", "#cdb562", "#dfc553", "#f2d640", "#fee838",
)  # fmt: skip
"""A colour map that the colour-blind read as others do, dark to light; the page's script has it from here."""


@dataclass(frozen=True)
class Scale:
    """An axis that maps a number to its share, 0 at the low end and 1 at the high one."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return a value's share of the axis; NaN if the axis cannot show it."""
        if math.isnan(on_axis(value, self.log)):
            return math.nan
        low, high, at = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self, about: int = 4) -> list[float]:
        """Return round values within the axis."""
        if self.log:
            decades = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            every = max(1, math.ceil(len(decades) / about))
            found = [10.0**decade for decade in decades][::every]
            if len(found) > 1:
                return found
            return [tick for tick in Scale(self.low, self.high).ticks(about) if tick > 0]
        raw = (self.high - self.low) / about
        size = 10 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [round(i * step, 12) for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def fitting_scale(values: Sequence[float] | np.ndarray, log: bool = False) -> Scale:
    """Build a scale that shows all finite ``values``, and zero if it is near; linear if none is positive."""
    held = on_axis(values)
    held = held[np.isfinite(held)]
    # A logarithmic axis without anything to show would be an empty one.
    positive = held[np.isfinite(on_axis(held, log=True))]
    log = log and len(positive) > 0
    if log:
        held = positive
    elif not len(held):
        return Scale(0.0, 1.0)
    elif not held.any():
        return Scale(*OF_ZEROS)
    low, high = float(held.min()), float(held.max())
    if log:
        margin = min(max((high / low) ** 0.1, 1.02), 1.15) if high > low else 2.0
        return Scale(low / margin, high * margin, True)
    if 0 < low < 0.35 * high:
        low = 0.0
    room = (high - low) * 0.05 or abs(high) * 0.1 or 1.0
    return Scale(low - (0 if low == 0 else room), high + room)


def tick_text(value: float) -> str:
    """Write a number at a tick."""
    if value and not 1e-3 <= abs(value) < 1e6:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        lead = f"{value / 10**power:.3g}"
        return power_text(power) if lead == "1" else f"{lead}·{power_text(power)}"
    return counted(value) if value >= 10_000 else format_value(value, ".4g")


def depth_colour(share: float) -> str:
    """Return the colour of a block, 0 being the first and 1 the last."""
    ramp = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in DEPTH])
    places = np.linspace(0, 1, len(ramp))
    return "#" + "".join(f"{round(np.interp(share, places, channel)):02x}" for channel in ramp.T)


def png_of_cells(shares: np.ndarray) -> bytes:
    """Encode a PNG with one pixel per cell in the colours of `CIVIDIS`; cells that are not finite are transparent.

    Args:
        shares: ``[rows, columns]``, 0 for the first colour and 1 for the last.
    """
    held = np.nan_to_num(np.clip(shares, 0, 1))
    index = np.where(np.isfinite(shares), np.round(held * (len(CIVIDIS) - 1)), len(CIVIDIS)).astype(np.uint8)
    palette = bytes.fromhex("".join(colour[1:] for colour in CIVIDIS) + "000000")
    opacity = bytes([255] * len(CIVIDIS) + [0])
    rows, columns = index.shape
    # Each row of pixels begins with its filter, none.
    pixels = zlib.compress(np.pad(index, ((0, 0), (1, 0))).tobytes(), 9)
    head = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"PLTE", palette), (b"tRNS", opacity), (b"IDAT", pixels), (b"IEND", b""))
    packed = b"\x89PNG\r\n\x1a\n"
    for kind, data in chunks:
        packed += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return packed


def cell_colour(share: float) -> tuple[str, str]:
    """Return the background of a cell, and a readable ink for it."""
    place = min(max(share, 0.0), 1.0)
    return CIVIDIS[round(place * (len(CIVIDIS) - 1))], "#ffffff" if place < 0.55 else "#000000"
