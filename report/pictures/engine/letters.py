"""Widths of letters, in points, from the font's table of advances: enough for a layout, without drawing."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

_UNIT = 100
"""Points at which advances are read."""


@cache
def _font(family: str) -> Any:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return get_font(findfont(FontProperties(family=family)))


@cache
def _advance(character: str, family: str) -> float:
    """Return the width of a character as a share of the size; for one that the font lacks, a typical width."""
    font = _font(family)
    if not font.get_char_index(ord(character)):
        return 1.0 if unicodedata.east_asian_width(character) in "WF" else 0.6
    font.set_size(_UNIT, 72)
    return float(font.load_char(ord(character)).linearHoriAdvance) / 65536 / _UNIT


def text_width(text: str, size: float, family: str = "DejaVu Sans") -> float:
    """Return the width of the longest line of ``text`` at ``size`` points, in points."""
    return size * max(sum(_advance(character, family) for character in line) for line in text.split("\n"))


def text_height(text: str, size: float) -> float:
    """Return the height from the top of the first line to the foot of the last, in points."""
    return 1.2 * size * (1 + text.count("\n"))
