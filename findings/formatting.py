"""Numbers and names as people read them, in sentences, tables, pages and on the terminal: one way of writing for all.

A number has a zero before its point, commas between thousands, and powers of ten as ``1.2·10⁻⁵``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import Any

from ..messages import printable

MISSING = "–"
"""The mark in place of a missing number."""

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
"""Digits of an exponent."""
_PLAIN = {ord(high): low for low, high in zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)}
_SYMBOLS = {
    "→": "->", "–": "-", "σ²": "var", "p̄": "p", "‖": "||", "ε": "epsilon", "±": "+-", "∞": "inf",
}  # fmt: skip
_PLAIN_POWERS = range(-4, 7)
"""Powers of ten of the numbers that are written out."""


def format_value(value: float | None, spec: str) -> str:
    """Write a number; "–" for None and NaN.

    Args:
        value: the number.
        spec: a format specification (``.3f``, ``.3g``, ``d``), ``percent`` or ``ratio``.
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if spec == "percent":
        return f"{100 * value:.1f} %"
    if spec == "ratio":
        if 0 < abs(value) < 0.005:
            return _significant(value, 1)
        spec = f".{2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0}f"
    if spec.endswith("g"):
        return _significant(value, int(spec.strip(",.g") or 6))
    if spec.endswith("d"):
        return format(int(value), spec)
    # A small negative number rounds to -0.000, which says nothing that 0.000 does not.
    return re.sub(r"^-(0\.?0*)$", r"\1", format(value, f",{spec}" if spec[:1] in ".0123456789" else spec))


def _significant(value: float, digits: int) -> str:
    """Write a number with so many significant digits, without zeros at its end."""
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = int(exponent)
    if value == 0 or power in _PLAIN_POWERS:
        text = f"{float(f'{mantissa}e{power}'):,.{max(digits - 1 - power, 0)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}·{power_text(power)}"


def power_text(exponent: int) -> str:
    """Write a power of ten: ``10⁻⁵``."""
    return f"10{str(exponent).translate(SUPERSCRIPT)}"


def counted(n: float) -> str:
    """Write a large count in short: ``245.8k``, ``65.3M``."""
    for size, digits, word in ((1e9, 3, "G"), (1e6, 3, "M"), (1e4, 4, "k")):
        if n >= size:
            return f"{_significant(n / (1e3 if word == 'k' else size), digits)}{word}"
    return format_value(n, ".4g")


def number_of(n: int, noun: str) -> str:
    """Write a number of things: ``1 block``, ``1,200 blocks``."""
    return f"{n:,} {noun}{'s' if n != 1 else ''}"


def in_prose(value: float, decimals: int = 3) -> str:
    """Write a number for a sentence."""
    return format_value(value, f".{decimals}f")


def format_p(log10_p: float | None) -> str:
    """Write a probability by its power of ten, even one too small for a float; "–" for None and NaN."""
    if log10_p is None or math.isnan(log10_p):
        return MISSING
    exponent = math.floor(log10_p)
    digits = f"{10 ** (log10_p - exponent):.1f}"
    if digits == "10.0":
        digits, exponent = "1.0", exponent + 1
    return f"{10**log10_p:.3f}" if exponent >= -3 else f"{digits}·{power_text(exponent)}"


def p_in_prose(log10_p: float) -> str:
    """Write a chance for a sentence, never smaller than it is: ``p 0.004``, ``p < 10⁻³⁰``."""
    if log10_p > -3:
        return f"p {in_prose(math.ceil(10 ** (log10_p + 3)) / 1000)}"
    return f"p < {power_text(math.floor(log10_p) + 1)}"


def in_ascii(text: str) -> str:
    """Write a text for a terminal that supports only ASCII."""
    plain = re.sub(r"(·?)10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda f: ("e" if f[1] else "1e") + f[2].translate(_PLAIN), text)
    for symbol, letters in _SYMBOLS.items():
        plain = plain.replace(symbol, letters)
    return plain.encode("ascii", "backslashreplace").decode()


# ---------------------------------------------------------------- texts and names


def one_line(text: Any) -> str:
    """Format a token's text as one printable line."""
    return printable(text).replace("\n", "\\n")


def shorten(text: str, limit: int) -> str:
    """Return ``text``, cut to ``limit`` characters with an ellipsis at the end if it is longer."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten_middle(text: str, limit: int) -> str:
    """Return ``text``, with its middle replaced by an ellipsis if it is longer than ``limit`` characters."""
    kept = max(limit - 1, 0)
    return text if len(text) <= limit else f"{text[: kept // 2]}…{text[len(text) - (kept - kept // 2) :]}"


def in_few_words(names: Sequence[str]) -> str:
    """List up to four names, or the first two, the last and the number of more."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]} … {names[-1]} ({len(names)})"


def steps_near(steps: Iterable[int], wanted: int) -> str:
    """List up to twelve steps, or the first, the last, their number, and the two nearest to ``wanted``; "none" without
    any.
    """
    there = sorted(steps)
    if len(there) <= 12:
        return ", ".join(map(str, there)) or "none"
    near = sorted(sorted(there, key=lambda step: abs(step - wanted))[:2])
    return f"{there[0]} … {there[-1]} ({len(there)}), the nearest {near[0]} and {near[1]}"


def without_shared_folder(names: Sequence[str]) -> list[str]:
    """Strip the folders that all names have in common."""
    shared = commonprefix(list(names)).rpartition("/")[0]  # noqa: RUF071, ends at a whole folder
    return [name.removeprefix(f"{shared}/") if shared else name for name in names]
