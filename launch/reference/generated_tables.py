"""Tables in pages, generated from the code, between ``<!-- table: NAME -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

Tables = Mapping[str, Callable[[], str]]
"""Tables of a page, by the name in their mark."""


def markdown_rows(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Format a Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def regenerated(page: str, tables: Tables) -> str:
    """Return the page with its tables generated anew."""
    return _TABLE.sub(lambda found: f"{found[1]}{found[2]}{tables[found[1]]()}", page)
