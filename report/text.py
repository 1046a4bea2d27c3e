"""Texts as people read them: in tables, pages, captions and on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from ..files import finite_or_nan as finite_or_nan
from ..findings.history import Start
from ..findings.numbers import MISSING as MISSING
from ..findings.numbers import counted as counted
from ..findings.numbers import format_p as format_p
from ..findings.numbers import format_value as format_value


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
