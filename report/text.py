"""Numbers and texts as people read them: in tables, pages, captions and on the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from ..files import finite_or_nan as finite_or_nan
from ..findings.history import Start

MISSING = "–"
"""The mark in place of a missing number."""


def format_value(value: float | None, spec: str) -> str:
    """Format a number for tables; "–" for None and NaN.

    Args:
        value: the number.
        spec: a format specification, ``percent`` or ``ratio``.
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if spec == "percent":
        return f"{100 * value:.1f} %"
    if spec == "ratio":
        decimals = 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
        return f"{value:,.{decimals}f}"
    # A small negative number rounds to -0.000, which says nothing that 0.000 does not.
    return re.sub(r"^-(0\.?0*)$", r"\1", format(int(value) if spec.endswith("d") else value, spec))


def format_p(log10_p: float | None) -> str:
    """Format a probability by its power of ten, even one too small for a float; "–" for None and NaN."""
    if log10_p is None or math.isnan(log10_p):
        return MISSING
    exponent = math.floor(log10_p)
    digits = f"{10 ** (log10_p - exponent):.1f}"
    if digits == "10.0":
        digits, exponent = "1.0", exponent + 1
    return f"{10**log10_p:.3f}" if exponent >= -3 else f"{digits}e{exponent}"


def printable(text: Any) -> str:
    """Escape all characters that do not print: token texts and file names may hold anything."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(text))


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


def without_shared_folder(names: Sequence[str]) -> list[str]:
    """Strip the folders that all names have in common."""
    shared = commonprefix(list(names)).rpartition("/")[0]  # noqa: RUF071, ends at a whole folder
    return [name.removeprefix(f"{shared}/") if shared else name for name in names]


def step_in_words(step: int, start: Start) -> str:
    """Name a snapshot's step in words; "" for a negative one, which means unknown.

    Args:
        step: optimizer steps.
        start: the model that training began with.
    """
    return start.at if step == 0 else f"step {step:,}" if step > 0 else ""


def markdown_table(titles: Sequence[str], rows: Sequence[Sequence[str]], n_text: int) -> str:
    """Format a Markdown table whose first ``n_text`` columns are text, aligned left, and whose other columns are
    numbers, aligned right.

    Cells are not padded, so that a changed number changes its own row alone.
    """
    from tabulate import DataRow, TableFormat, tabulate

    rule = "|" + "|".join(["---"] * n_text + ["---:"] * (len(titles) - n_text)) + "|"
    row = DataRow("| ", " | ", " |")
    # tabulate's own "pipe" format pads cells to align them.
    layout = TableFormat(None, lambda widths, alignments: rule, None, None, row, row, 0, None)
    return tabulate(rows, titles, layout, disable_numparse=True, stralign=None, numalign=None)
