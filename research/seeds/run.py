"""Running a study of seeds: its runs, then tables, picture and page of the shares of both seeds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from ...files import write_text
from ...findings.formatting import MISSING, format_value
from ...report.charts.chart_page import Block, Fold, Heading, Prose, render_page
from ...report.pictures.saving import save_both
from ...report.pictures.style import INK, MUTED, RUN_COLOURS, add_legend, in_figure_style, legend_line, new_figure
from ...report.table import Column, Table
from ...study.runner import Failure, Outputs, end_study, leaves_results, run_as_asked
from ...study.study_file import StudyRequest
from ...study.table import Kind
from ...study.trial_lock import failed_runs
from ...study.trials import Planned, Trial
from .results import SeedsResult, SeedsStudy, Share, read_seeds_results, read_seeds_study, seeds_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ---------------------------------------------------------------- tables for people, for papers and for programs

#: Level of the F tests, below which an effect is reported.
_LEVEL = 0.05
TITLES = ["figure", "runs", "mean ± sd", "init", "data", "rest", "p (init)", "p (data)"]
EXPLAINED = (
    "Shares of the variance over runs, in percent, with 95 % intervals: init, what the birth's seed decides; data, "
    "what the data's seed decides; rest, what is left, with their interaction. Two random factors, one run for each "
    "pair: moments of the analysis of variance, generalised confidence intervals, and F tests. Few seeds tell little: "
    "read the intervals."
)


def _percent(share: Share | None) -> str:
    if share is None:
        return MISSING
    return f"{100 * share.value:.0f} ({100 * share.low:.0f}–{100 * share.high:.0f})"


def _p(value: float | None) -> str:
    if value is None:
        return MISSING
    return "< 0.001" if value < 0.001 else format_value(value, ".3f")


def table_of(results: Sequence[SeedsResult]) -> Table:
    """Build the table of the shares, a row per figure."""
    rows = []
    for result in results:
        seen = result.values_NM[np.isfinite(result.values_NM)]
        sd = format_value(float(seen.std(ddof=1)), ".3g") if len(seen) > 1 else MISSING
        found = result.shares
        rows.append(
            [
                result.words,
                f"{result.n_runs}/{result.values_NM.size}",
                f"{format_value(float(seen.mean()), '.3g')} ± {sd}",
                *(_percent(share) for share in (found[:3] if found else [None] * 3)),
                _p(found.p_init if found else None),
                _p(found.p_data if found else None),
            ]
        )
    return Table([Column(TITLES[0], "name"), *map(Column, TITLES[1:])], rows)


def outcome(results: Sequence[SeedsResult]) -> list[str]:
    """Say in sentences which seed decides each figure, if an F test finds one."""
    said = []
    for result in results:
        if result.shares is None:
            missing = result.values_NM.size - result.n_runs
            why = f"{missing} runs are not finished" if missing else "it is the same in all runs"
            said.append(f"{result.words.capitalize()}: no shares, {why}.")
            continue
        init, data, _, *ps = result.shares
        effects = zip(("init", "data"), (init, data), ps, strict=True)
        found = [f"{seed} {_percent(share)} %" for seed, share, p in effects if p < _LEVEL]
        words = " and ".join(found) if found else "no effect of either seed is seen"
        said.append(f"{result.words.capitalize()}: {words}.")
    return said


def grid_of(study: SeedsStudy, result: SeedsResult) -> Table:
    """Build the table of one figure over all runs, a row per birth."""
    columns = [Column("birth", "name"), *(Column(f"data {seed}", format=".4g") for seed in study.data_seeds)]
    rows = zip(study.init_seeds, result.values_NM.tolist(), strict=True)
    return Table(columns, [[f"init {seed}", *values] for seed, values in rows])


def markdown(study: SeedsStudy, results: Sequence[SeedsResult]) -> str:
    """Write all of ``table.md``: the shares, then every run."""
    lines = [f"# {study.name}", "", *(f"- {sentence}" for sentence in outcome(results)), ""]
    lines += [table_of(results).markdown(), "", EXPLAINED]
    for result in results:
        lines += ["", f"## {result.words}", "", grid_of(study, result).markdown()]
    return "\n".join(lines) + "\n"


def write_csv(study: SeedsStudy, results: Sequence[SeedsResult], path: Path) -> None:
    """Write the table for programs: a row per run, a column per figure."""
    rows = [
        [init, data, *(float(result.values_NM[i, j]) for result in results)]
        for i, init in enumerate(study.init_seeds)
        for j, data in enumerate(study.data_seeds)
    ]
    titles = ("init_seed", "data_seed", *(result.name for result in results))
    write_text(path, Table(list(map(Column, titles)), rows).csv())


def print_results(results: Sequence[SeedsResult], console: Console) -> None:
    """Print the shares."""
    table_of(results).print(console)


# ---------------------------------------------------------------- the picture
# Every figure's shares with their intervals, and every run.

_OF = ("init", "data", "rest")
_COLOURS = (RUN_COLOURS[0], RUN_COLOURS[1], MUTED)


def draw_seeds(study: SeedsStudy, results: Sequence[SeedsResult], out: Path) -> list[str]:
    """Write ``figure`` as PNG and SVG; return the files' names."""
    return save_both(seeds_figure(study, results), out, "figure")


@in_figure_style
def seeds_figure(study: SeedsStudy, results: Sequence[SeedsResult]) -> Figure:
    """Draw a row for each figure: left its values, a column of dots per birth; right the shares of its variance."""
    figure, grid = new_figure(540, 40 + 92 * len(results), len(results), 2, squeeze=False, width_ratios=[1.2, 1])
    for (values, shares), result in zip(grid, results, strict=True):
        _values(values, study, result)
        _shares(shares, result)
    for axes in grid[:-1, 1]:
        axes.set_xticklabels([])
    grid[-1, 0].set_xlabel("init_seed")
    grid[-1, 1].set_xlabel("share of the variance (%)")
    entries = [(f"data_seed {seed}", legend_line(**_dot(place))) for place, seed in enumerate(study.data_seeds)]
    add_legend(figure, entries)
    return figure


def _dot(place: int) -> dict[str, Any]:
    colour = RUN_COLOURS[place % len(RUN_COLOURS)]
    return {"linestyle": "none", "marker": "osD^vPXph*"[place % 10], "markersize": 3.6, "color": colour}


def _values(axes: Axes, study: SeedsStudy, result: SeedsResult) -> None:
    places = np.arange(len(study.init_seeds))
    n = len(study.data_seeds)
    for number in range(n):
        # Beside one another: equal values would hide each other.
        axes.plot(places + 0.5 * (number - (n - 1) / 2) / n, result.values_NM[:, number], **_dot(number))
    axes.set_xticks(places, labels=[str(seed) for seed in study.init_seeds])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_title(result.words, loc="left")


def _shares(axes: Axes, result: SeedsResult) -> None:
    axes.set_yticks(range(len(_OF)), labels=_OF)
    axes.set_ylim(len(_OF) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    if result.shares is None:
        axes.text(50, 1, "no shares: runs are missing", ha="center", va="center", color=MUTED, fontsize=7)
        return
    for place, (share, colour) in enumerate(zip(result.shares[:3], _COLOURS, strict=True)):
        axes.barh(place, 100 * share.value, height=0.6, color=colour, alpha=0.55)
        axes.plot([100 * share.low, 100 * share.high], [place, place], color=INK, linewidth=1.0, solid_capstyle="butt")


# ---------------------------------------------------------------- the page


def seeds_page(study: SeedsStudy, results: Sequence[SeedsResult], trials: Sequence[Trial]) -> str:
    """Render the page; it fetches nothing."""
    blocks: list[Block] = [*(Prose(sentence) for sentence in outcome(results))]
    blocks += [Heading("shares", "Whose doing is the variance?"), table_of(results)]
    blocks += [Prose(note, note=True) for note in (EXPLAINED, failed_runs(trials)) if note]
    blocks.append(Heading("runs", "Every run"))
    blocks += [Fold(result.words, [grid_of(study, result)]) for result in results]
    return render_page(study.name, blocks, about="Birthmark study of seeds")


# ---------------------------------------------------------------- the run


def _read(request: StudyRequest) -> SeedsStudy:
    request.refuse_arms("seeds")
    return read_seeds_study(request.file).at(request.scale)


def plan_seeds(request: StudyRequest) -> Planned:
    """Plan the runs of the study."""
    study = _read(request)
    out = request.folder(study.name)
    return Planned(study.name, out, seeds_trials(study, out, request.overrides_in(out)))


def run_seeds(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, and write the shares of the seeds.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or the base is impossible, or a folder holds another run; found before any
            run.
    """
    study, (_, out, trials) = _read(request), plan_seeds(request)
    console = Console()
    failures = run_as_asked(request, out, trials, console)
    if leaves_results(request, trials):
        return failures
    results = read_seeds_results(study, trials)
    outputs = Outputs(
        show=partial(print_results, results),
        table=partial(markdown, study, results),
        write_csv=partial(write_csv, study, results),
        draw=partial(draw_seeds, study, results),
        page=partial(seeds_page, study, results, trials),
    )
    end_study(request, out, trials, console, outputs if results else None, "finished run")
    return failures


#: The kind of study that ``study.yaml`` names.
SEEDS = Kind(run_seeds, plan_seeds)
