"""Audit report for people: lines and tables, JSON, and a page with the curve along the steps and the matrix of
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..files import strict, write_text
from ..findings.formatting import in_few_words, shorten
from ..metrics.weight_kinship import FEWEST_TENSORS, LEAST_COSINE
from ..report.charts.chart_page import Block, Fold, Panels, Prose, render_page
from ..report.charts.specs import CurvePanel, MatrixPanel, PageRun, Series
from ..report.csv_files import check_data_folder, data_folder, write_csv_files
from ..report.table import Cell, Column, Table
from ..report.terminal import say
from .audit import Audit
from .checkpoint import Judged, listed
from .training_order import Place, at_step

# ---------------------------------------------------------------- lines and JSON


def sentence(found: Audit) -> str:
    """Write the answer in a sentence."""
    n, wrong = len(found.judged), sum(bool(one.findings) for one in found.judged)
    if n > 1 and all(one.content is None for one in found.judged):
        return f"none of {n} checkpoints can be read"
    if n == 1:
        return "one checkpoint, beside no other: " + ("it is not what it says" if wrong else "nothing is wrong with it")
    if not wrong and (unknown := len(found.of_unknown_birth)):
        those = "they share a birth" if unknown == n else f"{unknown} of them share{'s' * (unknown == 1)} their birth"
        why = f"fewer than {FEWEST_TENSORS} tensors can be compared"
        return f"{n} checkpoints: nothing is wrong with them, but whether {those} cannot be told: {why}"
    if not wrong:
        known = found.direction is None or found.direction.towards != "unknown"
        but = "" if known else ", but whether they stand in the order of training or in the reverse cannot be told"
        return f"{n} checkpoints of one birth: nothing is wrong with them{but}"
    says = "is not what it says" if wrong == 1 else "are not what they say"
    return f"{wrong} of {n} checkpoints {says}" + (f"; {found.overwritten}" if found.overwritten else "")


def notes_of_suite(found: Audit) -> list[str]:
    """List notes on the suite that are not faults, and undecided questions with the reason, in a line each."""
    lines = list(found.notes)
    if unknown := found.of_unknown_birth:
        lines.append(f"birth unknown: fewer than {FEWEST_TENSORS} tensors can be compared of {listed(unknown)}")
    if found.direction is not None and found.direction.towards == "unknown":
        lines.append(f"direction unknown: {found.direction.why}")
    return lines


def as_json(found: Audit) -> dict[str, Any]:
    """Return the whole audit as JSON; values that are not numbers are null."""
    members = [
        {
            "name": one.member.name,
            "stage": None if one.member.place is None else one.member.place.stage_words or None,
            "ingredient": None if one.member.place is None else one.member.place.ingredient or None,
            "step": one.member.step,
            "verdict": "wrong" if one.findings else one.verdict,
            "findings": [{"kind": finding.kind, "what": finding.what} for finding in one.findings],
            "notes": one.notes,
            "digest": None if one.content is None else one.content.sampled.digest,
            "bytes_sampled": None if one.content is None else one.content.sampled.bytes_read,
            "bytes": None if one.content is None else one.content.sampled.n_bytes,
            "cosine_with_first": one.cosine_with_first,
            "distance_from_previous": one.distance_from_previous,
        }
        for one in found.judged
    ]
    answer: dict[str, Any] = strict(
        {
            "sentence": sentence(found),
            "checkpoints": members,
            "births": [[one.member.name for one in group] for group in found.births],
            "birth_unknown": [one.member.name for one in found.of_unknown_birth],
            "order": [one.member.name for one in found.order],
            "notes": found.notes,
            "direction": None if found.direction is None else found.direction._asdict(),
        }
    )
    return answer


def print_audit(found: Audit, console: Console) -> None:
    """Print the sentence, a row for each checkpoint, and the faults below."""
    say(console, sentence(found))
    _checkpoints(found).without("evidence").print(console)
    for line in notes_of_suite(found):
        say(console, f"note: {line}")
    names: dict[str, list[str]] = {}
    for one in found.judged:
        for text in (*(finding.what for finding in one.findings), *(f"note: {note}" for note in one.notes)):
            names.setdefault(text, []).append(one.name)
    for text, of_text in names.items():
        say(console, f"{in_few_words(of_text)}: {text}")


def _checkpoints(found: Audit) -> Table:
    columns = [
        Column("checkpoint", "name"),
        Column("step"),
        Column("cosine with first", format=".3f", key="cosine_with_first"),
        Column("from previous", format=".3f", key="distance_from_previous"),
        Column("verdict", "text"),
        Column("evidence", "prose"),
    ]
    rows = []
    for one in found.judged:
        look = "red" if one.findings else "yellow" if one.is_open else "green"
        verdict = Cell(one.verdict, look=look, strong=bool(one.findings))
        numbers = (one.member.step, one.cosine_with_first, one.distance_from_previous)
        rows.append([one.name, *numbers, verdict, tuple(finding.what for finding in one.findings)])
    return Table(columns, rows)


# ---------------------------------------------------------------- the page
# The answer with its evidence, the curve along the steps, and the matrix of weights.

_RESTS = (
    "Rests on a thousandth of the values of each tensor, the same places in every checkpoint. No model was run. "
    "Between seeds the cosine of weights is 0 on average, trained or not."
)
_COLOURS = (
    f"Colour begins at {LEAST_COSINE:g}, which kin need, and is full at 1. In the order of steps; ✗ marks a finding."
)

#: The two kinds of curves, each with its colour.
_LINES = [PageRun("checkpoints"), PageRun("with a finding")]


def write_audit_page(out: Path, title: str, found: Audit) -> None:
    """Write the page of an audit, and the CSV files of its numbers beside it.

    Args:
        out: the HTML file.
        title: title of the suite.
        found: the audit.

    Raises:
        UsageError: something else is in the place of the CSV files.
    """
    blocks: list[Block] = [
        Prose(f"{_capital(sentence(found))}."),
        *_curves(found),
        _checkpoints(found),
    ]
    notes = [f"{_capital(line)}." for line in notes_of_suite(found)]
    notes += [f"{one.name}: {note}." for one in found.judged for note in one.notes]
    if notes:
        blocks.append(
            Fold("What is worth knowing and not wrong", [Prose(note, note=True) for note in notes], open=True)
        )
    if len(found.compared) > 1:
        blocks.append(Panels([_matrix(found)], wide=True))
    blocks.append(Prose(_RESTS, note=True))
    folder = data_folder(out)
    check_data_folder(folder)
    page = render_page(title, blocks, runs=_LINES, about="Birthmark audit", data=folder.name)
    write_csv_files(folder, {"checkpoints.csv": _checkpoints(found).csv(), "pairs.csv": _pairs(found).csv()})
    write_text(out, page)


def _capital(line: str) -> str:
    return line[:1].upper() + line[1:]


def _by_place(one: Judged) -> tuple[bool, Place]:
    return one.member.place is None, one.member.place or at_step(0)


def _curves(found: Audit) -> list[Panels]:
    """Draw alignment and drift for those of the largest birth that have a step."""
    with_step = [one for one in found.judged if one.member.place is not None and np.isfinite(one.cosine_with_first)]
    shown = sorted(with_step, key=_by_place)
    if len(shown) < 2:
        return []
    trainings = [one.member.place.chain for one in shown if one.member.place is not None]
    parts = [[i for i, own in enumerate(trainings) if own == training] for training in dict.fromkeys(trainings)]
    steps = np.array([one.member.step for one in shown])
    alignment, drift = [one.cosine_with_first for one in shown], [one.distance_from_previous for one in shown]
    quantities = [
        ("alignment", "Cosine with the first", "Over steps. Falls slowly, with no jump. Orange: a finding.", alignment),
        ("drift", "Distance from the one before", "Over steps. In units of the weights' own size.", drift),
    ]
    panels = []
    for name, title, caption, found_values in quantities:
        values = np.array(found_values)
        # A line for each training: steps begin again in each stage.
        series = [Series(values[part], {"step": steps[part].tolist()}, run=0) for part in parts]
        # Each is a line of one point: a line through several would say that they belong together.
        wrong = [i for i, one in enumerate(shown) if one.findings]
        series += [Series(values[[i]], {"step": [int(steps[i])]}, run=1) for i in wrong]
        panels.append(CurvePanel(name, title, series, caption=caption, csv="checkpoints.csv"))
    return [Panels(panels, wide=True)]


def _matrix(found: Audit) -> MatrixPanel:
    order = sorted(range(len(found.compared)), key=lambda i: (_by_place(found.compared[i]), i))
    ordered = [found.compared[i] for i in order]
    numbers = [str(place + 1) for place in range(len(ordered))]
    rows = [
        f"{number}  {shorten(one.name, 40)}{' ✗' if one.findings else ''}"
        for number, one in zip(numbers, ordered, strict=True)
    ]
    values = found.cosine_MM[np.ix_(order, order)].copy()
    np.fill_diagonal(values, np.nan)
    tips = [[f"{a.name}\n{b.name}" for b in ordered] for a in ordered]
    return MatrixPanel(
        "weights", "Cosine of the weights of every two", rows, numbers, values,
        pale=LEAST_COSINE, full=1.0, format=".3f", legend=_COLOURS, csv="pairs.csv", tips=tips,
    )  # fmt: skip


def _pairs(found: Audit) -> Table:
    names, n = [one.member.name for one in found.compared], len(found.compared)
    rows = [[names[a], names[b], float(found.cosine_MM[a, b])] for a in range(n) for b in range(a + 1, n)]
    return Table([Column("a"), Column("b"), Column("cosine")], rows)
