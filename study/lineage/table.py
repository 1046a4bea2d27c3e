"""The tables of a study of lineage: for people, for papers and for programs."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...files import atomic_path, write_text
from ...metrics.seedprint import LEVEL, Fingerprint
from ...report.text import format_value
from .file import Lineage
from .results import Row, Tally, describe, probes, tally
from .trials import TABLES

_NUMBERS = {"statistic": ("mean ρ", "mean τ", ".4f"), "z": ("z", "z", ".2f"), "log10_p": ("log₁₀ p", "log₁₀ p", ".1f")}
"""Column → its heading by the default nulls, by the published ones, and how it is printed."""


def _heads(study: Lineage, test: str) -> list[str]:
    published = not study.tests[test].recipe.null.startswith("dimensions")
    heads = [heads[published] for heads in _NUMBERS.values()]
    return [f"{test}: {heads[0]}", *heads[1:], "k", "verdict"]


def _cells(found: Fingerprint, expected: str) -> list[str]:
    numbers = [format_value(getattr(found, name), spec) for name, (*_, spec) in _NUMBERS.items()]
    wrong = found.verdict not in (expected, "undefined")
    return [*numbers, str(found.k), f"**{found.verdict}**" if wrong else found.verdict]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]], n_words: int) -> list[str]:
    """A table whose first columns are words and whose others are numbers."""
    rule = ["---"] * n_words + ["---:"] * (len(titles) - n_words)
    return [_line(titles), "|" + "|".join(rule) + "|", *map(_line, rows), ""]


def _told(found: Tally) -> str:
    """How many are called kin, of those that had a test, and the range of z."""
    undefined = found.verdicts["undefined"]
    told = f"{found.verdicts['kin']} of {found.n - undefined} kin"
    if undefined < found.n:
        ends = [format_value(end, ".1f") for end in (found.low, found.high)]
        told += f", z {ends[0] if ends[0] == ends[1] else ' to '.join(ends)}"
    return told + (f"; {undefined} undefined" if undefined else "")


def _summary(study: Lineage, rows: Sequence[Row], tests: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Titles and rows: what every one of ``tests`` says of each table."""
    found = [tally(rows, test) for test in tests]
    lines = [
        [f"{first.table + 1}. {TABLES[first.table].title}", first.expected, str(first.n), *map(_told, same)]
        for same in zip(*found, strict=True)
        for first in same[:1]
    ]
    return ["table", "in truth", "pairs", *tests], lines


def _notes(rows: Sequence[Row], tests: Sequence[str]) -> list[str]:
    """Why tests were not possible, and what is to be said against a test of any pair."""
    notes: dict[str, None] = {}
    for test in tests:
        found = [row.found[test] for row in rows]
        notes |= dict.fromkeys(f"{test}, undefined: {f.reason}" for f in found if f.reason)
        notes |= dict.fromkeys(w for f in found[:1] for w in f.warnings if all(w in other.warnings for other in found))
    return list(notes)


def markdown(study: Lineage, rows: Sequence[Row]) -> str:
    """All of ``table.md``: per probe a summary, then the tables, pair by pair."""
    lines = [
        f"# {study.name}",
        "",
        f"Births from init_seeds {', '.join(map(str, study.init_seeds))}, trained on the same data in the same order. "
        f"`kin`: p < {LEVEL:g} and z > 0; `undefined`: no test was possible. **Bold**: not what the pair is in truth.",
        "",
    ]
    for probe, tests in probes(study).items():
        notes = _notes(rows, tests)
        lines += [f"## {describe(probe)}", ""]
        lines += _markdown(*_summary(study, rows, tests), 2)
        for i, table in enumerate(TABLES):
            pairs = [
                [row.a.label, row.b.label, row.expected]
                + [cell for test in tests for cell in _cells(row.found[test], row.expected)]
                for row in sorted(rows, key=lambda row: row.expected)  # kin first
                if row.table == i
            ]
            if pairs:
                heads = ["A", "B", "in truth", *(head for test in tests for head in _heads(study, test))]
                lines += [f"### {i + 1}. {table.title}", "", *_markdown(heads, pairs, 3)]
        lines += [*(f"- {note}" for note in notes), *([""] if notes else [])]
    return "\n".join(lines)


def write_csv(study: Lineage, rows: Sequence[Row], path: Path) -> None:
    """Everything for programs: a row per table, pair and test; numbers of an undefined test are empty."""
    titles = ["table", "a", "b", "a_seed", "a_step", "a_continuation", "b_seed", "b_step", "b_continuation", "in_truth"]
    titles += ["test", "probe", "null", "statistic", "z", "log10_p", "k", "n_inputs", "verdict", "reason"]
    with atomic_path(path) as new, new.open("w", newline="", encoding="utf-8") as f:
        table = csv.writer(f)
        table.writerow(titles)
        for row in rows:
            pair = [row.table + 1, row.a.label, row.b.label]
            pair += [value for m in (row.a, row.b) for value in (m.seed, m.step, m.continuation)]
            for test, found in row.found.items():
                numbers = (found.statistic, found.z, found.log10_p)
                table.writerow(
                    [*pair, row.expected, test, study.tests[test].probe.kind, found.null]
                    + ["" if math.isnan(number) else repr(number) for number in numbers]
                    + [found.k, found.n_inputs, found.verdict, found.reason]
                )


def report_lineage(study: Lineage, rows: Sequence[Row], out: Path, console: Console) -> None:
    """Write tables and pictures into ``out``, and print what every test says of each table."""
    write_text(out / "table.md", markdown(study, rows))
    write_csv(study, rows, out / "table.csv")
    for probe, tests in probes(study).items():
        titles, lines = _summary(study, rows, tests)
        shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=describe(probe))
        for title in titles:
            shown.add_column(title, overflow="fold", justify="right" if title == "pairs" else "left")
        for line in lines:
            shown.add_row(*map(Text, line))
        console.print(shown)
    written = "table.md table.csv"
    if importlib.util.find_spec("matplotlib"):
        from .figure import draw_lineage

        written += f" {' '.join(draw_lineage(study, rows, out))}"
    else:
        written += " (no pictures: pip install 'birthmark[plots]')"
    console.print(f"{out}: {written}", highlight=False, soft_wrap=True)
