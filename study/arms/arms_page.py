"""The page of a study of arms: sinks and learning of the arms, in sentences, a scatter, curves and a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup, escape

from ...findings.thresholds import threshold
from ...findings.wording import in_prose
from ...report.charts.chart_page import Block, Fold, Heading, Html, Panels, Prose, Table, render_page
from ...report.charts.specs import CurvePanel, PageRun, Point, ScatterPanel, Series
from ...report.pictures.style import RUN_COLOURS
from ...report.text import format_value
from ..taking.tries import told
from ..trials import Trial
from .figure import Family, families
from .file import ArmStudy
from .results import ArmResult, Spread, task_loss
from .table import notes, titles_and_rows

#: Colour of the first arm, which every family's panel shows.
_FIRST_COLOUR = 0
_TIMES = "Time of a step: mean (range) over seeds of each run's median. Compare only runs that had a machine alone."


def arms_page(study: ArmStudy, results: Sequence[ArmResult], trials: Sequence[Trial], out: Path) -> str:
    """Render the page; it fetches nothing, and links to the runs' own reports below ``out``."""
    grouped = families(study, results)
    first = next((result for result in results if result.arm == next(iter(study.arms))), None)
    titles, rows = titles_and_rows(study, results)
    *answers, rests_on = outcome(study, results)
    blocks: list[Block] = [
        *(Prose(sentence) for sentence in answers),
        Prose(rests_on, note=True),
        Panels([_scatter(results, grouped, first)], wide=True),
        Html(_legend(grouped, first)),
        Heading("training", "Sink mass over training", f"Mean over the seeds of each arm. {_common(first)}"),
        Panels(_curves(grouped, first)),
        Heading("table", "All figures"),
        _table(titles, rows, results),
        *(Prose(note, note=True) for note in (notes(study, results), _TIMES, told(trials)) if note),
        Fold("Runs", [Table(["arm", *(f"seed {seed}" for seed in study.init_seeds)], _links(study, trials, out))]),
    ]
    return render_page(study.name, blocks, runs=[PageRun(result.arm) for result in results], about="Birthmark study")


# ── in sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(study: ArmStudy, results: Sequence[ArmResult]) -> list[str]:
    """Name the arms with a sink, and those without one that learn as well as the first arm; then the basis of this."""
    known = [r for r in results if r.sink.n and math.isfinite(r.uniform) and r.uniform > 0]
    if not known:
        return ["No arm has a sink mass yet: nothing can be compared."]
    sink = [r for r in known if r.sink.min >= threshold("sink") * r.uniform]
    none = [r for r in known if r.sink.max < threshold("no_sink") * r.uniform]
    between = [r for r in known if r not in sink and r not in none]
    first = next(iter(study.arms))
    learned, worse, unknown = _by_loss(none, results, first)
    within = f"within {in_prose(threshold('learned'), 2)} nats of the loss of {first}"
    parts = [
        ("With a sink in every seed", sink),
        (f"Without a sink, and {within}", learned),
        (f"Without a sink, but not {within}", worse),
        ("Without a sink; their loss cannot be compared", unknown),
        ("In between, or not the same in every seed", between),
    ]
    said = [f"{words}: {', '.join(r.arm for r in arms)}." for words, arms in parts if arms]
    return [*said, _rests_on(known)]


def _rests_on(known: Sequence[ArmResult]) -> str:
    least, most = min(r.sink.n for r in known), max(r.sink.n for r in known)
    seeds = f"{least}" if least == most else f"{least} to {most}"
    alone = "; with one seed, a difference between arms may be chance" if least == 1 else ""
    return (
        f"A sink is at least {threshold('sink'):g} times the uniform share of attention on the first position at the "
        f"end, none is less than {threshold('no_sink'):g} times. Seeds of an arm: {seeds}{alone}."
    )


def _by_loss(
    arms: Sequence[ArmResult], results: Sequence[ArmResult], first: str
) -> tuple[list[ArmResult], list[ArmResult], list[ArmResult]]:
    """Divide arms into those whose every seed comes near the first arm's mean loss, those whose seeds do not, and those
    without a loss.
    """
    name = task_loss(results)
    reference = next((r.figures[name] for r in results if r.arm == first and r.figures[name].n), None)
    near: list[ArmResult] = []
    far: list[ArmResult] = []
    unknown: list[ArmResult] = []
    for arm in arms:
        loss = arm.figures[name]
        if reference is None or not loss.n:
            unknown.append(arm)
        else:
            (near if loss.max <= reference.mean + threshold("learned") else far).append(arm)
    return near, far, unknown


# ── in pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _scatter(results: Sequence[ArmResult], grouped: Sequence[Family], first: ArmResult | None) -> ScatterPanel:
    name = task_loss(results)
    places = {arm.arm: place for place, family in enumerate(grouped) for arm in family.arms}
    points = [
        Point(
            r.sink.mean,
            r.figures[name].mean,
            r.arm,
            tip=f"{r.sink.n} seed{'' if r.sink.n == 1 else 's'}, step {r.step:,}",
            colour=_colour(places[r.arm]) if r.arm in places else _FIRST_COLOUR,
            hollow=_is_hollow(places.get(r.arm, 0)),
            x_error=_ends(r.sink),
            y_error=_ends(r.figures[name]),
        )
        for r in results
        if r.sink.n and r.figures[name].n
    ]
    losses = [point.y for point in points]
    return ScatterPanel(
        "arms",
        "Lower left: no sink, and the task is learned",
        points,
        "sink mass at the end",
        "loss on trigger positions (nats)" if name == "trigger_loss" else "validation loss (nats)",
        y_log=bool(losses) and min(losses) > 0 and max(losses) > 4 * min(losses),
        caption="A point is the mean over an arm's seeds, a bar their range.",
        csv="table.csv",
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], results: Sequence[ArmResult]) -> Table:
    """Build the table, with the time of a step after the number of steps."""
    place = titles.index("step") + 1
    timed = [[*row[:place], _step_time(r), *row[place:]] for row, r in zip(rows, results, strict=True)]
    return Table([*titles[:place], "ms a step", *titles[place:]], timed)


def _step_time(result: ArmResult) -> str:
    """Write milliseconds: the mean over seeds, and their range."""
    mean, low, high = (format_value(1000 * seconds, ".3g") for seconds in result.step_s[:1] + result.step_s[2:4])
    return f"{mean} ({low}–{high})" if result.step_s.n > 1 else mean


def _ends(spread: Spread) -> tuple[float, float] | None:
    return (spread.min, spread.max) if spread.n > 1 else None


def _colour(family: int, arm: int = 0) -> int:
    """Colour of a family; its arms continue from it if they have separate lines. None is the first arm's."""
    return 1 + (family + arm) % (len(RUN_COLOURS) - 1)


def _is_hollow(family: int) -> bool:
    """Return True if the points of a family are rings, with which the colours start again."""
    return family // (len(RUN_COLOURS) - 1) % 2 == 1


def _legend(grouped: Sequence[Family], first: ArmResult | None) -> Markup:
    """Draw the families' symbols."""
    entries = [
        (family.title or "arms", _colour(place), "ring" if _is_hollow(place) else "dot")
        for place, family in enumerate(grouped)
    ]
    inside = {arm.arm for family in grouped for arm in family.arms}
    if first is not None and first.arm not in inside:
        entries.insert(0, (first.arm, _FIRST_COLOUR, "dot"))
    spans = (
        f'<span><i class="{look}" style="--c:var(--run-{colour})"></i>{escape(title)}</span>'
        for title, colour, look in entries
    )
    return Markup(f'<div class="keys">{"".join(spans)}</div>')


def _common(first: ArmResult | None) -> str:
    return "" if first is None else f"{first.arm} stands in every panel, dashed."


def _curves(grouped: Sequence[Family], first: ArmResult | None) -> list[CurvePanel]:
    """Draw a panel per family."""
    panels = []
    for number, family in enumerate(grouped or [Family("", [])]):
        colours = {arm.arm: _colour(number, i) for i, arm in enumerate(family.arms)}
        shown = [first, *family.arms] if first is not None and first not in family.arms else family.arms
        series = [
            Series(
                r.sinks.mean(0),
                {"step": r.steps},
                colours.get(r.arm, _FIRST_COLOUR),
                r.arm,
                "dashed" if r is first else "solid",
            )
            for r in shown
            if r.steps
        ]
        level = next((r for r in shown if r.steps and np.isfinite(r.uniform)), None)
        if level is not None:
            uniform = np.full(len(level.steps), level.uniform)
            series.append(Series(uniform, {"step": level.steps}, None, "uniform", "control"))
        panels.append(CurvePanel(f"family-{number}", family.title or "arms", series))
    return panels


def _links(study: ArmStudy, trials: Sequence[Trial], out: Path) -> list[list[str | Markup]]:
    """Build a row of links per arm, to its runs' reports."""
    rows: list[list[str | Markup]] = []
    for arm in study.arms:
        cells: list[str | Markup] = [arm]
        for seed in study.init_seeds:
            run = next((trial.run for trial in trials if (trial.arm, trial.seed) == (arm, seed)), None)
            there = run is not None and run.report.is_file() and run.report.resolve().is_relative_to(out.resolve())
            if run is None or not there:
                cells.append("–")
                continue
            link = run.report.resolve().relative_to(out.resolve()).as_posix()
            cells.append(Markup('<a href="{}">report</a>').format(link))
        rows.append(cells)
    return rows
