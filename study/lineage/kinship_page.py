"""Page of lineage tests: the answer, the matrix of models, and every test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from ...files import csv_text, write_text
from ...metrics.seedprint import Fingerprint
from ...report.charts.chart_page import Block, Fold, Panels, Prose, Table, render_page
from ...report.charts.specs import CurvePanel, MatrixPanel, Series
from ...report.csv_files import check_data_folder, data_folder, write_csv_files
from ...report.pictures.fingerprints import FULL_Z, PALE_Z, clustered
from ...report.text import format_p, format_value, shorten
from .answers import CANNOT_TELL, terms
from .compare import ComparedModels

_SCALE = (
    "Cells are pale below z 3, which one pair of strangers in a thousand passes by chance; from there colour grows "
    "with the logarithm up to 60. The diagonal is empty, and so is a test that could not be made."
)
#: Tests in the table of candidates: the rest stand in the CSV file.
_MOST_ROWS = 50


def write_kinship_page(out: Path, names: Sequence[str], compared: ComparedModels, answer: str, test: str) -> None:
    """Write the page of models that were compared, and the CSV of its tests beside it.

    Args:
        out: the HTML file.
        names: names of the models.
        compared: the tests.
        answer: the answer in a sentence.
        test: the basis of the answer in a line.

    Raises:
        UsageError: something else is in the place of the CSV file.
    """
    rows = [([names[pair.a], names[pair.b]], pair.fingerprint) for pair in compared.pairs]
    n = len(compared.strangers) // len(names)
    control = [([name, f"stranger {i + 1}"], compared.strangers[i * len(names) + m])
               for i in range(n) for m, name in enumerate(names)]  # fmt: skip
    blocks: list[Block] = [
        Prose(answer),
        Prose(CANNOT_TELL, note=True),
        Panels([kinship_matrix(names, [(p.a, p.b, p.fingerprint) for p in compared.pairs])], wide=True),
        Table(["A", "B", *_NUMBERS], [[*pair, *_cells(found)] for pair, found in rows], texts=(0, 1)),
        *_notes([found for _, found in rows]),
        Prose(terms(compared.pairs[0].fingerprint.null), note=True),
    ]
    if control:
        table = Table(["model", "", *_NUMBERS], [[*pair, *_cells(found)] for pair, found in control], texts=(0, 1))
        blocks.append(Fold("The control: every model against births of other seeds", [table], note=f"{n} strangers"))
    title = " · ".join(names) if len(names) < 4 else f"{len(names)} models"
    _write(out, title, blocks, test, {"pairs.csv": _csv(["a", "b"], [*rows, *control])})


def write_seeds_page(out: Path, name: str, ranked: Sequence[tuple[int, Fingerprint]], answer: str, test: str) -> None:
    """Write the page of candidate seeds, and the CSV of their tests beside it; arguments as in
    :func:`write_kinship_page`.
    """
    zs = np.array([found.z for _, found in ranked])
    curve = Series(zs, {"place": range(1, len(zs) + 1)}, run=0, name="candidates")
    panel = CurvePanel(
        "seeds", "z of every candidate, best first", [curve], x="place", csv="seeds.csv",
        caption="Strangers lie around 0 with a standard deviation of 1.",
    )  # fmt: skip
    rows = [([str(seed)], found) for seed, found in ranked]
    more = [Prose(f"{len(rows) - _MOST_ROWS} more in seeds.csv.", note=True)] if len(rows) > _MOST_ROWS else []
    blocks: list[Block] = [
        Prose(answer),
        Panels([panel], wide=True),
        Table(["seed", *_NUMBERS], [[*seed, *_cells(found)] for seed, found in rows[:_MOST_ROWS]], texts=()),
        *more,
        *_notes([found for _, found in rows]),
        Prose(f"{terms(ranked[0][1].null)} p counts all {len(rows)} candidates.", note=True),
    ]
    _write(out, name, blocks, test, {"seeds.csv": _csv(["seed"], rows)})


def kinship_matrix(
    names: Sequence[str], tests: Sequence[tuple[int, int, Fingerprint]], csv: str = "pairs.csv"
) -> MatrixPanel:
    """Draw z of every pair of models, kin side by side; colours begin above the strangers' range.

    Args:
        names: names of the models.
        tests: indices of two models, and their test.
        csv: the file that holds the numbers.
    """
    n = len(names)
    z_MM, tips = np.full((n, n), np.nan), [["the model itself"] * n for _ in range(n)]
    for a, b, found in tests:
        z_MM[a, b] = z_MM[b, a] = found.z
        p = f", p {format_p(found.log10_p)}" if found.verdict != "undefined" else f": {found.reason}"
        tips[a][b] = tips[b][a] = f"{names[a]}\n{names[b]}\n{found.verdict}{p}"
    order = clustered(z_MM).tolist() if n > 2 else list(range(n))
    letters = [ascii_uppercase[place] if n <= 26 else str(place + 1) for place in range(n)]
    rows = [f"{letter}  {shorten(names[i], 40)}" for letter, i in zip(letters, order, strict=True)]
    return MatrixPanel(
        "kinship", "z of every pair", rows, letters, z_MM[np.ix_(order, order)],
        pale=PALE_Z, full=FULL_Z, format=".1f", legend=_SCALE, csv=csv,
        tips=[[tips[i][j] for j in order] for i in order],
    )  # fmt: skip


_NUMBERS = ("statistic", "z", "p", "k", "N", "verdict")


def _cells(found: Fingerprint) -> list[str]:
    numbers = (format_value(found.statistic, ".4f"), format_value(found.z, ".2f"), format_p(found.log10_p))
    return [*numbers, str(found.k), str(found.n_inputs), found.verdict]


def _notes(found: Sequence[Fingerprint]) -> list[Prose]:
    notes = [f"Undefined: {test.reason}." for test in found if test.reason]
    notes += [f"Warning: {warning}." for test in found for warning in test.warnings]
    return [Prose(note, note=True) for note in dict.fromkeys(notes)]


def _csv(leading: Sequence[str], rows: Sequence[tuple[Sequence[str], Fingerprint]]) -> str:
    lines: list[list[object]] = [[*leading, "statistic", "z", "log10_p", "k", "n_inputs", "verdict"]]
    for names, found in rows:
        numbers = (None if value != value else value for value in (found.statistic, found.z, found.log10_p))
        lines.append([*names, *numbers, found.k, found.n_inputs, found.verdict])
    return csv_text(lines)


def _write(out: Path, title: str, blocks: Sequence[Block], test: str, texts: dict[str, str]) -> None:
    folder = data_folder(out)
    check_data_folder(folder)
    page = render_page(title, [*blocks, Prose(f"Rests on: {test}.", note=True)], about="Birthmark lineage",
                       data=folder.name)  # fmt: skip
    write_csv_files(folder, texts)
    write_text(out, page)
