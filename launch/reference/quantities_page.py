"""The tables of docs/quantities.md, from declarations: ``python -m birthmark.launch.reference.quantities_page``.

The page is written by hand around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...files import write_text
from ...findings.formatting import in_prose
from ...findings.glossary import TERMS
from ...findings.thresholds import THRESHOLDS
from ...metrics.quantities import LOGGED, MEASURED, SECTIONS
from ...metrics.quantity import Quantity
from .generated_tables import Tables, markdown_rows, regenerated

FILE = Path(__file__).parents[2] / "docs" / "quantities.md"

#: The heading of a table's section names it.
_CITATION = re.compile(r" \(definitions §\d+\)|, definitions §\d+(?=\))")


def _meaning(quantity: Quantity) -> str:
    """Return the definition with its control and condition."""
    parts = [_CITATION.sub("", quantity.definition)]
    if isinstance(quantity.control, str):
        parts.append(f"Judged against `{quantity.control}` ({quantity.control_label}).")
    elif quantity.control is not None:
        parts.append(f"Judged against {quantity.control:g} ({quantity.control_label}).")
    if quantity.when:
        parts.append(f"Only where {quantity.when}.")
    return " ".join(parts)


def measured(section: str) -> str:
    """List the quantities of a section of the pages, with the shape of the array and the reduction to a scalar."""
    rows = (
        [
            f"`{q.name}`",
            f"`{q.shape}`".replace(" ", "\N{NO-BREAK SPACE}") if q.has_array else "–",
            q.scalar or "yes" if q.has_scalar else "–",
            f"{_meaning(q)} Unit: {q.unit}." if q.unit else _meaning(q),
        ]
        for q in MEASURED.values()
        if q.section == section
    )
    return markdown_rows(["name", "array", "scalar", "meaning"], rows)


def logged() -> str:
    """List the keys of metrics.jsonl."""
    rows = [[f"`{q.name}`", q.unit or "–", _meaning(q)] for q in LOGGED.values()]
    return markdown_rows(
        ["key", "unit", "meaning"], [*rows, ["`bias/NAME`, `bias_text/NAME`", "", "The scalars of a snapshot, above."]]
    )


def thresholds() -> str:
    """List the thresholds between sentences."""
    rows = (
        [f"`{name}`", re.sub(r"\.?0+$", "", in_prose(t.value)), t.meaning, t.source] for name, t in THRESHOLDS.items()
    )
    return markdown_rows(["name", "value", "what it divides", "source"], rows)


def terms() -> str:
    """List every word with its meaning and the section of the definitions."""
    rows = ([f"**{name}**", term.meaning, f"§{term.section}" if term.section else "–"] for name, term in TERMS.items())
    return markdown_rows(["word", "meaning", "defined in"], rows)


_DECLARED = {q.section for q in MEASURED.values()}
_SECTION_TABLES: dict[str, Callable[[], str]] = {
    section: partial(measured, section) for section in SECTIONS if section in _DECLARED
}

TABLES: Tables = {**_SECTION_TABLES, "logged": logged, "thresholds": thresholds, "terms": terms}

if __name__ == "__main__":
    write_text(FILE, regenerated(FILE.read_text(encoding="utf-8"), TABLES))
