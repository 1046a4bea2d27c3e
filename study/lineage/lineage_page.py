"""Page of a study of lineage: success of each test, z over training, and all models side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from ...report.charts.chart_page import Block, Fold, Heading, Panels, Prose, Table, render_page
from ...report.charts.specs import CurvePanel, Look, MatrixPanel, PageRun, Series
from .comparison import describe_probe
from .file import LineageStudy
from .kinship_page import kinship_matrix
from .pairs import StudyModel, last_step
from .results import PairResult, tests_by_probe
from .table import pair_rows, summary


def lineage_page(study: LineageStudy, results: Sequence[PairResult]) -> str:
    """Render the page; it fetches nothing."""
    first = next(iter(study.tests))
    seeds = sorted({model.seed for result in results for model in (result.a, result.b)})
    blocks: list[Block] = [
        *(Prose(outcome(results, test)) for test in study.tests),
        Panels([_over_training(results, test, seeds) for test in study.tests]),
        Prose("Solid: a model against its own birth. Dashed: the largest z against another's birth.", note=True),
    ]
    if results:
        title = f"{first}: {describe_probe(study.tests[first].probe)}"
        blocks += [Heading("models", "All models", title), Panels([_all_models(results, first)], wide=True)]
    for probe, tests in tests_by_probe(study).items():
        titles, rows = summary(study, results, tests)
        blocks += [Heading("", "Verdicts", describe_probe(probe)), Table(titles, rows, texts=range(len(titles)))]
        for title, headings, pairs in pair_rows(study, results, tests):
            blocks.append(
                Fold(
                    title,
                    [Table(headings, [list(map(_cell, row)) for row in pairs], texts=(0, 1, 2))],
                    note=f"{len(pairs)} pairs; bold: not what the pair is in truth",
                )
            )
    runs = [PageRun(f"seed {seed}") for seed in seeds]
    return render_page(study.name, blocks, runs=runs, about="Birthmark study of lineage")


def _cell(text: str) -> str | Markup:
    """Convert a cell of the Markdown table to HTML, bold if the test was wrong."""
    wrong = text.startswith("**")
    return Markup("<strong>{}</strong>").format(text.strip("*")) if wrong else text


def outcome(results: Sequence[PairResult], test: str) -> str:
    """Describe in a sentence the number of right answers of a test."""
    parts = []
    for expected, words in (("kin", "of one birth"), ("stranger", "of two births")):
        found = [r.fingerprints[test] for r in results if r.expected == expected]
        defined = [f for f in found if f.verdict != "undefined"]
        left = f" ({len(found) - len(defined)} more could not be tested)" if len(found) > len(defined) else ""
        kin = sum(f.verdict == "kin" for f in defined)
        parts.append(f"{kin} of {len(defined)} pairs {words}{left}")
    return f"The test {test} calls kin {parts[0]}, and {parts[1]}."


def _over_training(results: Sequence[PairResult], test: str, seeds: Sequence[int]) -> CurvePanel:
    """Draw z of the models of every seed against births, over the steps of their bases."""
    series = []
    for place, seed in enumerate(seeds):
        looks: tuple[tuple[Look, bool], ...] = (("solid", True), ("dashed", False))
        for look, own in looks:
            by_step: dict[int, list[float]] = {}
            for r in results:
                from_birth = r.a.step == 0 < r.b.step and not r.b.continuation
                if from_birth and r.b.seed == seed and (r.a.seed == seed) == own:
                    by_step.setdefault(r.b.step, []).append(r.fingerprints[test].z)
            if by_step:
                steps = sorted(by_step)
                values = np.array([max(by_step[step]) for step in steps])
                name = f"seed {seed}, {'own birth' if own else 'strangers, largest'}"
                series.append(Series(values, {"step": steps}, place, name, look))
    return CurvePanel(f"z-{list(results[0].fingerprints).index(test) if results else 0}", test, series, csv="table.csv")


def _all_models(results: Sequence[PairResult], test: str) -> MatrixPanel:
    """Draw births, last checkpoints and ends of continued runs."""
    there = dict.fromkeys(model for result in results for model in (result.a, result.b))
    last = last_step(there)
    models: list[StudyModel] = [m for m in there if m.step in (0, last) or m.continuation]
    place = {model: i for i, model in enumerate(models)}
    tests = [(place[r.a], place[r.b], r.fingerprints[test]) for r in results if r.a in place and r.b in place]
    return kinship_matrix([model.label for model in models], tests, csv="table.csv")
