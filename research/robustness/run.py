"""Running a study of robustness: its runs, every change of them with its tests, then tables, picture and page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from ...files import write_text
from ...findings.formatting import format_value
from ...metrics.seedprint import LEVEL, level_z
from ...report.charts.chart_page import Block, Heading, Panels, Prose, render_page
from ...report.charts.specs import MatrixPanel
from ...report.pictures.saving import save_both
from ...report.pictures.several_models import FULL_Z, PALE_Z
from ...report.pictures.style import MUTED, REFERENCE, RUN_COLOURS, add_legend, in_figure_style, legend_line, new_figure
from ...report.table import Column, Table
from ...report.terminal import bar, say
from ...study.lineage.answer import FINGERPRINT_COLUMNS, describe_test, fingerprint_cells
from ...study.lineage.calibration import KinRate
from ...study.runner import Failure, Outputs, end_study, run_as_asked
from ...study.study_file import StudyRequest
from ...study.table import Kind
from ...study.trials import Planned
from .results import ChangedTest, ChangeRates, ZRange, change_rates, compare_changed, strangers_of_all
from .treatments import Base, text_of
from .trials import UNCHANGED, RobustnessStudy, read_robustness_study, robustness_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---------------------------------------------------------------- tables for people, for papers and for programs

TITLES = ("change", "its own trained model", "its own birth", "strangers", "the other model")
EXPLAINED = (
    f"Cells: how many tests call the pair kin (p < {LEVEL:g}, z > 0), with the 95 % interval of Clopper and Pearson in "
    "per cent, then z, its median and its range. A changed model is held against the end of the run that it was made "
    "from, against the birth of that run, and against ends and births of all other seeds, its strangers. The other "
    "model is the one that was merged in, of which the changed model is partly, or the one that a birth of another "
    "seed was taught by, of which it is none."
)
INDEPENDENCE = (
    "Intervals take pairs for independent. Pairs of strangers that share a model are not quite, so theirs are a little "
    "too narrow."
)


def outcome(results: Sequence[ChangedTest], test: str) -> str:
    """Summarise a test over all changes in a sentence."""
    rates = [r for r in change_rates(results, test) if r.change != UNCHANGED]
    kept = [r.change for r in rates if r.trained.rate.n_defined and r.trained.rate.n_kin == r.trained.rate.n_defined]
    lost = [r.change for r in rates if r.trained.rate.n_defined and r.change not in kept]
    strangers = strangers_of_all(results, test).rate
    missed = f"; not after {', '.join(lost)}" if lost else ""
    return (
        f"Under the test {test} every changed model is kin of what it was made from after {len(kept)} of "
        f"{len(kept) + len(lost)} changes{missed}. It calls {rate_in_words(strangers)} pairs of strangers kin."
    )


def rate_in_words(rate: KinRate) -> str:
    """Write a rate: ``8 of 8 (63–100 %)``; below 10 % with a decimal."""
    if not rate.n_defined:
        return "–"
    low, high = (f"{100 * end:.{0 if end >= 0.1 else 1}f}".removesuffix(".0") for end in rate.interval)
    undefined = f"; {rate.n_undefined} undefined" if rate.n_undefined else ""
    return f"{rate.n_kin} of {rate.n_defined} ({low}–{high} %){undefined}"


def _cell(found: ZRange) -> str:
    if not found.rate.n:
        return "–"
    if not found.values:
        return f"{found.rate.n_undefined} undefined"
    middle, low, high = (format_value(z, ".1f") for z in (found.median, found.least, found.most))
    return f"{rate_in_words(found.rate)}, z {middle} ({low} to {high})"


def _short(found: ZRange) -> str:
    """Write counts and the median of z for a narrow terminal."""
    if not found.values:
        return "–" if not found.rate.n else "undefined"
    return f"{found.rate.n_kin}/{found.rate.n_defined}  {format_value(found.median, '.1f')}"


def _second(rates: ChangeRates) -> str:
    if not rates.role:
        return "–"
    partly = f"partly: {rate_in_words(rates.partly)}" if rates.role == "merged" else rate_in_words(rates.second.rate)
    middle, low, high = (format_value(z, ".1f") for z in (rates.second.median, rates.second.least, rates.second.most))
    return f"{partly}, z {middle} ({low} to {high})"


def table_of(results: Sequence[ChangedTest], test: str) -> Table:
    """Build the table of a test, a row for each change; pages stack rates over z."""
    rows = []
    for r in change_rates(results, test):
        cells = (_cell(r.trained), _cell(r.birth), _cell(r.strangers), _second(r))
        rows.append([r.change, *(tuple(cell.split(", ", 1)) for cell in cells)])
    return Table([Column(title, "text") for title in TITLES], rows)


def notes_of(results: Sequence[ChangedTest], test: str) -> list[str]:
    """List the reasons why pairs could not be tested, and the tests' warnings, each with its changes."""
    notes: dict[str, dict[str, None]] = {}
    for r in results:
        if r.test == test:
            for note in (f"undefined: {r.found.reason}",) if r.found.reason else ():
                notes.setdefault(note, {})[r.change] = None
    return [f"{', '.join(changes)}: {note}" for note, changes in notes.items()]


def markdown(study: RobustnessStudy, results: Sequence[ChangedTest]) -> str:
    """Write all of ``table.md``: a table per test."""
    seeds = sorted({r.seed for r in results})
    lines = [f"# {study.name}", "", f"Births from init_seeds {', '.join(map(str, seeds))}. {EXPLAINED} {INDEPENDENCE}"]
    for test, comparison in study.tests.items():
        title = f"{test}: {describe_test(comparison.probe, comparison.recipe)}"
        lines += ["", f"## {title}", "", outcome(results, test), ""]
        lines += [table_of(results, test).markdown()]
        lines += ["", *(f"- {note}" for note in notes_of(results, test))]
    return "\n".join(lines).rstrip() + "\n"


def write_csv(results: Sequence[ChangedTest], path: Path) -> None:
    """Write everything for programs: a row per changed model, base and test; numbers of an undefined test are empty."""
    titles = ("change", "birth_seed", "other_seed", "other_is", "reference", "reference_seed", "in_truth")
    rows = []
    for r in results:
        pair = [r.change, r.own, r.second, r.role, r.reference, r.seed, in_truth(r)]
        rows.append([*pair, r.test, r.found.null, *fingerprint_cells(r.found)])
    write_text(path, Table([*map(Column, (*titles, "test", "null")), *FINGERPRINT_COLUMNS], rows).without("p").csv())


def in_truth(result: ChangedTest) -> str:
    """Return the true relation of a pair: ``kin``, ``partly`` or ``stranger``."""
    if result.group == "second":
        return "partly" if result.role == "merged" else "stranger"
    return "kin" if result.group == "own" else "stranger"


def print_tables(study: RobustnessStudy, results: Sequence[ChangedTest], console: Console) -> None:
    """Print a table per test, in short."""
    columns = [Column(title, "number" if i else "name") for i, title in enumerate(TITLES)]
    for test in study.tests:
        rows = [
            [r.change, *map(_short, (r.trained, r.birth, r.strangers, r.second))] for r in change_rates(results, test)
        ]
        Table(columns, rows).print(console, title=f"{test}: called kin, median z")
        say(console, outcome(results, test), wrapped=True)


# ---------------------------------------------------------------- the picture
# Z after every change, of kin and of strangers.

_DOT: dict[str, Any] = {"linestyle": "none", "markersize": 3.4, "markeredgewidth": 0.8}
_LOOKS: dict[str, tuple[str, dict[str, Any]]] = {
    "stranger": ("strangers", {"color": RUN_COLOURS[1], "marker": "o", "markersize": 2.2, "alpha": 0.5}),
    "birth": ("own birth", {"color": RUN_COLOURS[0], "marker": "o", "markerfacecolor": "none"}),
    "trained": ("what it was made from", {"color": RUN_COLOURS[0], "marker": "o"}),
    "merged": ("what was merged in", {"color": RUN_COLOURS[2], "marker": "D"}),
    "teacher": ("its teacher", {"color": RUN_COLOURS[3], "marker": "^"}),
}
"""Relation of a pair → its words and its marker, those in front last."""


def draw_robustness(study: RobustnessStudy, results: Sequence[ChangedTest], out: Path) -> list[str]:
    """Write ``figure`` as PNG and SVG; return the files' names."""
    return save_both(z_by_change(study, results), out, "figure")


@in_figure_style
def z_by_change(study: RobustnessStudy, results: Sequence[ChangedTest]) -> Figure:
    """Draw a row for each change, a panel for each test, a dot for each pair of models."""
    changes = list(dict.fromkeys(r.change for r in results))
    figure, grid = new_figure(
        130 + 230 * len(study.tests),
        70 + 13 * len(changes),
        1,
        len(study.tests),
        squeeze=False,
        sharex=True,
        sharey=True,
    )
    for axes, test in zip(grid[0], study.tests, strict=True):
        _panel(axes, [r for r in results if r.test == test], changes, level_z(study.tests[test].recipe.null))
        axes.set_title(test)
    grid[0][0].set_yticks(range(len(changes)), labels=changes, parse_math=False)
    grid[0][0].set_ylim(len(changes) - 0.4, -0.6)
    shown = {_look(r) for r in results}
    entries = [(words, legend_line(**{**_DOT, **look})) for name, (words, look) in _LOOKS.items() if name in shown]
    add_legend(figure, [*reversed(entries), ("p = .01", legend_line(**REFERENCE))])
    return figure


def _look(result: ChangedTest) -> str:
    if result.group == "own":
        return result.reference
    if result.group == "second":
        return result.role if result.reference == "trained" else ""
    return "stranger"


def _panel(axes: Axes, results: Sequence[ChangedTest], changes: Sequence[str], level: float) -> None:
    axes.set_xscale("symlog", linthresh=3, linscale=0.8)
    axes.set_xticks([-30, -10, -3, 0, 3, 10, 30, 100], labels=["−30", "−10", "−3", "0", "3", "10", "30", "100"])
    axes.minorticks_off()
    axes.set_xlabel("z")
    axes.axvline(0, color=MUTED, linewidth=0.6, zorder=1)
    axes.axvline(level, **REFERENCE, zorder=1)
    for front, (name, (_, look)) in enumerate(_LOOKS.items()):
        points = [
            (r.found.z, changes.index(r.change)) for r in results if _look(r) == name and r.found.verdict != "undefined"
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **{**_DOT, **look}, zorder=2 + front)


# ---------------------------------------------------------------- the page

_COLUMNS = ("own", "birth", "strangers", "other")
_LEGEND = (
    "Medians of z against the model that it was made from, its own birth, strangers, and the other model that went "
    "into it. Colour begins at z 3, which one pair of strangers in a thousand passes by chance; below −3 it is orange."
)


def robustness_page(study: RobustnessStudy, results: Sequence[ChangedTest]) -> str:
    """Render the page; it fetches nothing."""
    blocks: list[Block] = [Prose(outcome(results, test)) for test in study.tests]
    blocks.append(Panels([_medians(results, test) for test in study.tests], wide=True))
    for test, comparison in study.tests.items():
        blocks.append(Heading("", test, describe_test(comparison.probe, comparison.recipe)))
        blocks.append(table_of(results, test))
        blocks += [Prose(f"{note}.", note=True) for note in notes_of(results, test)]
    blocks += [Prose(EXPLAINED, note=True), Prose(INDEPENDENCE, note=True)]
    return render_page(study.name, blocks, about="Birthmark study of robustness")


def _medians(results: Sequence[ChangedTest], test: str) -> MatrixPanel:
    rates = change_rates(results, test)
    groups = [(r.trained, r.birth, r.strangers, r.second) for r in rates]
    return MatrixPanel(
        f"z-{list(dict.fromkeys(r.test for r in results)).index(test)}",
        f"{test}: median z",
        [r.change for r in rates],
        _COLUMNS,
        np.array([[found.median for found in row] for row in groups]),
        pale=PALE_Z,
        full=FULL_Z,
        format=".1f",
        legend=_LEGEND,
        csv="table.csv",
    )


# ---------------------------------------------------------------- the run

#: Fewer have no stranger beside the model that is changed and the one that is merged in.
_FEWEST = 3


def plan_robustness(request: StudyRequest) -> Planned:
    """Plan the runs that are changed."""
    request.refuse_arms("robustness")
    study = read_robustness_study(request.file).at(request.scale)
    out = request.folder(study.name)
    return Planned(study.name, out, robustness_trials(study, out, request.overrides_in(out)).bases)


def run_robustness(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, change each of them in every way, and write tables and pictures.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or a run is impossible, or a folder holds another run; found before any run.
        RunError: a change cannot be trained.
    """
    request.refuse_arms("robustness")
    study = read_robustness_study(request.file).at(request.scale)
    out = request.folder(study.name)
    trials = robustness_trials(study, out, request.overrides_in(out))
    study = trials.study
    console = Console()
    failures = run_as_asked(request, out, trials.bases, console)
    if request.trial is not None:
        return failures  # one base; what is done to the bases is left to a call for all
    outputs = None
    bases = [Base(trial) for trial in trials.bases if trial.finished]
    if len(bases) >= _FEWEST:
        n_models = len(bases) * (1 + len(study.changes))
        with bar("changed models", n_models, quiet=False) as advance:
            results = compare_changed(study, bases, text_of(bases[0].trial), out, advance, only_read=request.summary)
        if results:
            outputs = Outputs(
                show=partial(print_tables, study, results),
                table=partial(markdown, study, results),
                write_csv=partial(write_csv, results),
                draw=partial(draw_robustness, study, results),
                page=partial(robustness_page, study, results),
            )
    end_study(request, out, trials.bases, console, outputs, "changed model")
    return failures


#: The kind of study that ``study.yaml`` names.
ROBUSTNESS = Kind(run_robustness, plan_robustness)
