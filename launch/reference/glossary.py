"""The table of docs/glossary.md, of the terms: ``python -m birthmark.launch.reference.glossary``."""

from __future__ import annotations

from pathlib import Path

from ...files import write_text
from ...findings.terms import TERMS
from .generated_tables import Tables, markdown_rows, regenerated

FILE = Path(__file__).parents[2] / "docs" / "glossary.md"


def terms() -> str:
    """Every word with its meaning and where it is defined."""
    rows = (
        [f"**{name}**", term.meaning, f"[§{term.section}](definitions.md)" if term.section else "–"]
        for name, term in TERMS.items()
    )
    return markdown_rows(["word", "meaning", "definition"], rows)


TABLES: Tables = {"terms": terms}

if __name__ == "__main__":
    write_text(FILE, regenerated(FILE.read_text(encoding="utf-8"), TABLES))
