"""Numbers and lists in the form for sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence


def in_prose(value: float, decimals: int = 3) -> str:
    """Write a number for a sentence, without the zero before its point."""
    # A small negative number rounds to -.000, which says nothing that .000 does not.
    return re.sub(r"^(-?)0\.", r"\1.", re.sub(r"^-(0\.?0*)$", r"\1", f"{value:,.{decimals}f}"))


def enumerated(parts: Sequence[str]) -> str:
    """Join parts of a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_PLAIN = {ord(high): low for low, high in zip("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹", strict=True)}


def p_in_prose(log10_p: float) -> str:
    """Write a chance for a sentence, never smaller than it is: ``p .004``, ``p < 10⁻³⁰``."""
    if log10_p > -3:
        return f"p {in_prose(math.ceil(10 ** (log10_p + 3)) / 1000)}"
    return f"p < 10{str(math.floor(log10_p) + 1).translate(_SUPERSCRIPT)}"


_IN_ASCII = {"→": "->", "–": "-", "σ²": "var", "p̄": "p", "‖": "||", "ε": "epsilon"}


def in_ascii(sentence: str) -> str:
    """Write a sentence for a terminal that supports only ASCII."""
    plain = re.sub(r"10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda found: "1e" + found[1].translate(_PLAIN), sentence)
    for symbol, letters in _IN_ASCII.items():
        plain = plain.replace(symbol, letters)
    return plain.encode("ascii", "backslashreplace").decode()
