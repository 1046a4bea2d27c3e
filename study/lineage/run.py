"""Running a study of lineage: its runs, those that continue them, every test, then pictures and the page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...metrics.seedprint import Fingerprint
from ...report.charts.chart_page import Block, Fold, Heading, Panels, Prose, render_page
from ...report.charts.specs import CurvePanel, Look, PageRun, Series
from ...report.pictures.axes import count_formatter
from ...report.pictures.saving import save_both
from ...report.pictures.several_models import draw_matrix
from ...report.pictures.style import (
    INK,
    MUTED,
    REFERENCE,
    RUN_COLOURS,
    add_legend,
    in_figure_style,
    legend_line,
    new_figure,
)
from ...report.terminal import bar
from ..runner import Failure, Outputs, end_study, run_as_asked, run_trials, study_console
from ..study_file import StudyRequest
from ..trials import Planned, check_stored
from .answer import kinship_matrix
from .comparison import describe_probe
from .results import PairResult, compare_pairs, markdown, pair_tables, print_summary, summary, tests_by_probe, write_csv
from .trials import LineageStudy, LineageTrials, last_step, lineage_trials, read_lineage_study, study_models

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---------------------------------------------------------------- pictures
# Births and their descendants over training, and all models side by side.

_COLUMNS = 3
_DOTS = {True: "o", False: "^"}
"""Marker of a pair with (True) or without (False) a birth."""
_LOOKS: dict[str, dict[str, Any]] = {
    "kin": {"color": RUN_COLOURS[0], "linewidth": 1.1},
    "stranger": {"color": RUN_COLOURS[1]},
}


def draw_lineage(study: LineageStudy, results: Sequence[PairResult], out: Path) -> list[str]:
    """Write ``figure`` and, if there is a pair, ``matrix`` of the first test, each as PNG and SVG; return the files'
    names.
    """
    drawn = {"figure": over_training(study, results)}
    if results:
        test = next(iter(study.tests))
        title = f"{test}: {describe_probe(study.tests[test].probe)}"
        drawn["matrix"] = draw_matrix(*_of_all_models(results, test), title)
    return [file for name, figure in drawn.items() for file in save_both(figure, out, name)]


def _of_all_models(results: Sequence[PairResult], test: str) -> tuple[list[str], list[tuple[int, int, Fingerprint]]]:
    """Return the names of births, last checkpoints and ends of continued runs, and their tests by index."""
    there = dict.fromkeys(model for result in results for model in (result.a, result.b))
    last = last_step(there)
    place = {model: i for i, model in enumerate(m for m in there if m.step in (0, last) or m.continuation)}
    tests = [(place[r.a], place[r.b], r.fingerprints[test]) for r in results if r.a in place and r.b in place]
    return [model.label for model in place], tests


@in_figure_style
def over_training(study: LineageStudy, results: Sequence[PairResult]) -> Figure:
    """Draw z of all pairs by the age of the younger model, a panel per test.

    Blue: one birth; orange: two. Circles: a birth and another model; triangles: two trained models. Filled: kin by the
    test.
    """
    n = len(study.tests)
    columns = min(n, _COLUMNS)
    figure, grid = new_figure(
        60 + 150 * columns,
        20 + 140 * -(-n // columns),
        -(-n // columns),
        columns,
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axes, test in zip(grid.flat, study.tests, strict=False):
        _panel(axes, results, test)
    for axes in list(grid.flat)[n:]:
        axes.set_visible(False)
    low, high = grid[0][0].get_ylim()
    grid[0][0].set_ylim(min(low, -4), max(high, 12))
    for axes in grid[:, 0]:
        axes.set_ylabel("z")
    for place, axes in enumerate(grid.flat):
        if place + columns >= n:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("optimizer steps since birth")
    dot: dict[str, Any] = {"linestyle": "none", "markersize": 3.2}
    entries = [
        ("a model and its birth", legend_line(**_LOOKS["kin"], marker="o", markersize=3.2)),
        ("another birth", legend_line(**dot, marker="o", **_LOOKS["stranger"])),
        ("two trained models", legend_line(**dot, marker="^", color=MUTED)),
        ("not called kin", legend_line(**dot, marker="o", color=INK, markerfacecolor="none")),
    ]
    if study.continuations:
        entries.append(("end of the base", legend_line(**REFERENCE)))
    add_legend(figure, entries)
    return figure


def _panel(axes: Axes, results: Sequence[PairResult], test: str) -> None:
    axes.set_title(test)
    axes.set_yscale("symlog", linthresh=3, linscale=0.8)
    axes.set_yticks([0, 3, 10, 30, 100, 300], labels=["0", "3", "10", "30", "100", "300"])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(count_formatter())
    axes.locator_params(axis="x", nbins=5)
    axes.axhline(0, color=MUTED, linewidth=0.6, zorder=1)
    paths: dict[tuple[int, str], list[tuple[float, float]]] = {}
    aside = 0.03 * max((result.b.age for result in results), default=0)
    for result in results:
        found = result.fingerprints[test]
        if found.verdict == "undefined":
            continue
        newborn, colour = result.a.step == 0, _LOOKS[result.expected]["color"]
        age = float(result.b.age) if newborn else result.b.age + aside
        axes.plot(
            age, found.z, _DOTS[newborn], color=colour, markersize=3.2, zorder=3 if result.expected == "kin" else 2,
            markerfacecolor=colour if found.verdict == "kin" else "none", markeredgewidth=0.7,
        )  # fmt: skip
        if result.expected == "kin" and newborn:
            paths.setdefault((result.a.seed, result.b.continuation), []).append((age, found.z))
    for (seed, continuation), points in paths.items():
        before = paths.get((seed, ""), [])[-1:] if continuation else []
        axes.plot(*zip(*before, *points, strict=True), **_LOOKS["kin"], zorder=2)
    for end in {result.b.began_at for result in results if result.b.continuation}:
        axes.axvline(end, **REFERENCE, zorder=1)


# ---------------------------------------------------------------- the page


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
        matrix = kinship_matrix(*_of_all_models(results, first), csv="table.csv")
        blocks += [Heading("models", "All models", title), Panels([matrix], wide=True)]
    for probe, tests in tests_by_probe(study).items():
        blocks += [Heading("", "Verdicts", describe_probe(probe)), summary(results, tests)]
        for title, table in pair_tables(study, results, tests):
            pairs = "1 pair" if len(table.rows) == 1 else f"{len(table.rows)} pairs"
            note = f"{pairs}; bold: not what the pair is in truth"
            blocks.append(Fold(title, [table], note=note))
    runs = [PageRun(f"seed {seed}") for seed in seeds]
    return render_page(study.name, blocks, runs=runs, about="Birthmark study of lineage")


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
    number = list(results[0].fingerprints).index(test) if results else 0
    return CurvePanel(f"z-{number}", f"z, {test}", series, csv="table.csv")


# ---------------------------------------------------------------- the run


def _plan(request: StudyRequest) -> tuple[Path, LineageTrials]:
    request.refuse_arms("lineage")
    study = read_lineage_study(request.file).at(request.scale)
    out = request.folder(study.name)
    return out, lineage_trials(study, out, request.overrides_in(out))


def plan_lineage(request: StudyRequest) -> Planned:
    """Plan the runs that others continue."""
    out, trials = _plan(request)
    return Planned(trials.study.name, out, trials.bases)


def run_lineage(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, test all pairs of models, and write tables and pictures.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or a run is impossible, or a folder holds another run; found before any run.
    """
    out, trials = _plan(request)
    console = study_console(out)
    failures = run_as_asked(request, out, trials.bases, console)
    if request.trial is not None:
        return failures  # one base; what builds on the bases is left to a call for all
    if not request.summary:
        ready = trials.ready()
        for trial in ready:
            check_stored(trial)
        failures += run_trials(ready, request.jobs, console, out, retries=request.retries)
    study, models = trials.study, study_models(trials)
    outputs = None
    if models:
        with bar("hidden states", len(models) * len(tests_by_probe(study)), quiet=False) as advance:
            results = compare_pairs(study, models, Path(trials.bases[0].config.data.cache_dir), advance)
        outputs = Outputs(
            show=partial(print_summary, study, results),
            table=partial(markdown, study, results),
            write_csv=partial(write_csv, study, results),
            draw=partial(draw_lineage, study, results),
            page=partial(lineage_page, study, results),
        )
    end_study(request, out, [*trials.bases, *trials.continued], console, outputs, "run")
    return failures
