"""The tables of docs/run-directory.md, of declarations: ``python -m birthmark.launch.reference.run_directory``.

The page is written by hand around them.
"""

from __future__ import annotations

import re
from pathlib import Path

from ...files import write_text
from ...metrics.quantities import LOGGED, MEASURED
from ...metrics.quantity import AXES, CSV_COLUMNS, Quantity
from .generated_tables import Tables, markdown_rows, regenerated

FILE = Path(__file__).parents[2] / "docs" / "run-directory.md"


def _meaning(quantity: Quantity) -> str:
    """Definition, control and condition."""
    parts = [quantity.definition]
    if isinstance(quantity.control, str):
        level = f"`{quantity.control}`"
        parts.append(f"Judged against {level} ({quantity.control_label}).")
    elif quantity.control is not None:
        parts.append(f"Judged against {quantity.control:g} ({quantity.control_label}).")
    if quantity.when:
        parts.append(f"Only where {quantity.when}.")
    return re.sub(r"definitions (§\d+)", r"[\1](definitions.md)", " ".join(parts))


def logged() -> str:
    """Keys of metrics.jsonl."""
    scalars = ["`bias/NAME`, `bias_text/NAME`", "", "the scalars of a snapshot, below"]
    rows = [[f"`{q.name}`", q.unit or "–", _meaning(q)] for q in LOGGED.values()]
    return markdown_rows(["key", "unit", "meaning"], [*rows, scalars])


def scalars() -> str:
    """Keys of ``bias`` in summary.json."""
    found = [q for q in MEASURED.values() if q.has_scalar]
    return markdown_rows(
        ["name", "unit", "section", "meaning"],
        ([f"`{q.name}`", q.unit or "–", q.section, _meaning(q)] for q in found),
    )


def arrays() -> str:
    """Names in arrays.safetensors."""
    found = [q for q in MEASURED.values() if q.has_array]
    return markdown_rows(
        ["name", "shape", "unit", "meaning"],
        ([f"`{q.name}`", f"`{q.shape}`", q.unit or "–", _meaning(q)] for q in found),
    )


def axes() -> str:
    """Dimensions of arrays."""
    return markdown_rows(
        ["axis", "length", "indices"], ([f"`{k}`", f"`{a.letter}`", a.meaning] for k, a in AXES.items())
    )


def columns() -> str:
    """Columns of CSV files."""
    return markdown_rows(["column", "meaning"], ([f"`{name}`", meaning] for name, meaning in CSV_COLUMNS.items()))


TABLES: Tables = {
    "logged": logged,
    "scalars": scalars,
    "arrays": arrays,
    "axes": axes,
    "columns": columns,
}

if __name__ == "__main__":
    write_text(FILE, regenerated(FILE.read_text(encoding="utf-8"), TABLES))
