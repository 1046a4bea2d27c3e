"""A record of measurements that grows row by row: a JSON file, and the same as tables in Markdown.

A record has parts. Each says what machine it was measured on, which of its cases are done, and their rows. Both files
are written anew after every row, so that what was measured outlives a process that is killed. Starting a part again
replaces its rows and leaves the other parts alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Statuses of a row; all but ``ok`` and ``failed`` are no error.
OK, FAILED, SKIPPED, NOT_REACHED, NOT_INSTALLED = "ok", "failed", "skipped", "not reached", "not installed"
#: Columns of a table that come last, in this order.
_LAST = ("limit", "verdict", "status", "note")


class Record:
    """The files ``PATH.json`` and ``PATH.md``.

    Args:
        path: path of both files, without a suffix.
        title: the page's heading.
    """

    def __init__(self, path: Path, title: str) -> None:
        # A card's name may have a dot.
        self.json_file, self.md_file = path.parent / f"{path.name}.json", path.parent / f"{path.name}.md"
        self.content: dict[str, Any] = {"title": title, "parts": {}}
        if self.json_file.is_file():
            self.content["parts"] = json.loads(self.json_file.read_text())["parts"]

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        """Content by part."""
        return self.content["parts"]

    def begin(self, part: str, command: str, machine: Mapping[str, str], cases: list[str]) -> None:
        """Start a part from nothing."""
        self.parts[part] = {"command": command, "machine": dict(machine), "cases": cases, "done": [], "rows": []}
        self.write()

    def add(self, part: str, row: Mapping[str, Any]) -> None:
        """Add one row: its ``table`` and ``case``, then its columns."""
        self.parts[part]["rows"].append({"status": OK, **row})
        self.write()

    def done(self, part: str, case: str) -> None:
        """Mark a case as done, whatever its result."""
        self.parts[part]["done"].append(case)
        self.write()

    def left(self, part: str) -> list[str]:
        """Return the cases of a part that are not done."""
        known = self.parts.get(part, {"cases": [], "done": []})
        return [case for case in known["cases"] if case not in known["done"]]

    def failures(self, part: str) -> list[dict[str, Any]]:
        """Return the rows of a part that failed."""
        return [row for row in self.parts.get(part, {"rows": []})["rows"] if row["status"] == FAILED]

    def write(self) -> None:
        """Write both files."""
        self.json_file.parent.mkdir(parents=True, exist_ok=True)
        for file, text in (
            (self.json_file, json.dumps(self.content, indent=1, ensure_ascii=False) + "\n"),
            (self.md_file, self.markdown()),
        ):
            # Never half a file, not even of a process that is killed.
            new = file.with_name(f".{file.name}.new")
            new.write_text(text, encoding="utf-8")
            new.replace(file)

    def markdown(self) -> str:
        """Return the page as Markdown."""
        lines = [f"# {self.content['title']}"]
        for name, part in self.parts.items():
            machine = "; ".join(f"{key} {value}" for key, value in part["machine"].items())
            lines += ["", f"## {name}", "", f"    {part['command']}", "", f"{machine}."]
            tables: dict[str, list[dict[str, Any]]] = {}
            for row in part["rows"]:
                tables.setdefault(row.get("table", ""), []).append(row)
            for title, rows in tables.items():
                lines += ["", *([f"### {title}", ""] if title else []), *_table(rows)]
        return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("table", "trace")))
    columns = [name for name in names if name not in _LAST] + [name for name in _LAST if name in names]
    if all(row["status"] == OK for row in rows):
        columns.remove("status")
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(_shown(row.get(name)) for name in columns) + " |" for row in rows]


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if math.isfinite(value) else str(value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def limit(value: float | None, bound: float, *, at_most: bool) -> dict[str, str]:
    """Return the columns ``limit`` and ``verdict`` of a row; without a value the limit stays open."""
    wanted = f"{'≤' if at_most else '≥'} {bound:g}"
    if value is None:
        return {"limit": wanted, "verdict": "open"}
    return {"limit": wanted, "verdict": "pass" if (value <= bound if at_most else value >= bound) else "FAIL"}
