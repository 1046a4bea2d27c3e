"""The table of docs/verdicts.md, of the thresholds: ``python -m birthmark.launch.reference.verdicts_page``."""

from __future__ import annotations

import re
from pathlib import Path

from ...files import write_text
from ...findings.thresholds import THRESHOLDS
from ...findings.wording import in_prose
from .generated_tables import Tables, markdown_rows, regenerated

FILE = Path(__file__).parents[2] / "docs" / "verdicts.md"


def thresholds() -> str:
    """What divides one sentence from another."""
    rows = (
        [f"`{name}`", re.sub(r"\.?0+$", "", in_prose(t.value)), t.meaning, t.source] for name, t in THRESHOLDS.items()
    )
    return markdown_rows(["name", "value", "what it divides", "source"], rows)


TABLES: Tables = {"thresholds": thresholds}

if __name__ == "__main__":
    write_text(FILE, regenerated(FILE.read_text(encoding="utf-8"), TABLES))
