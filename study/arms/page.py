"""The tables and the page of a study of arms: the arms that have a sink and those that learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from markupsafe import Markup, escape
from rich.console import Console

from ...files import write_text
from ...findings.formatting import MISSING, format_value, in_prose
from ...findings.thresholds import threshold
from ...measure.config import SnapshotConfig
from ...metrics.quantities import MEASURED
from ...report.charts.chart_page import Block, Fold, Heading, Html, Panels, Prose, render_page
from ...report.charts.specs import CurvePanel, PageRun, Point, ScatterPanel, Series
from ...report.charts.stills import mark_of
from ...report.table import Column, Table, broken
from ..trial_lock import failed_runs
from ..trials import Trial
from .figure import Family, Look, families, looks_of
from .results import SCALARS, ArmResult, Spread, spread, task_loss, uniform_levels
from .trials import ArmStudy

_DISCREPANCY = MEASURED["variance_discrepancy"].label
_COLUMNS = {name: figure.label for name, figure in SCALARS.items()} | {
    "sink_key": "sink at key",
    "sink_key_importance": "its importance",
    "birth": f"{_DISCREPANCY} at birth",
    "end": f"{_DISCREPANCY} at the end",
}
_OUTLIERS = ("largest_value", "kurtosis")
_Detail = Literal["range", "sd", "mean"]
_NARROW = ("sink_mass", "sink_mass_normalised", "trigger_loss", "val_loss", "end")


def _shown(results: Sequence[ArmResult]) -> list[str]:
    """Choose the columns of the table. Figures that only some studies measure, and sinks at keys other than the first,
    appear only where an arm has them.
    """
    hidden = {name for name, one in SCALARS.items() if one.is_optional and not any(r.figures[name].n for r in results)}
    if not any(_sink_is_elsewhere(r) for r in results):
        hidden |= {"sink_key", "sink_key_importance"}
    own = dict.fromkeys(key for result in results for key in result.own)
    return [*(name for name in _COLUMNS if name not in hidden), *own]


def _sink_is_elsewhere(result: ArmResult) -> bool:
    """Return True if a key other than the first is above the sink rate's threshold in a seed."""
    none = spread([])
    key, importance = (result.figures.get(name, none) for name in ("sink_key", "sink_key_importance"))
    return key.n > 0 and key.max > 0 and importance.max > SnapshotConfig.sink_epsilon


def _cell(result: ArmResult, column: str, detail: _Detail) -> str:
    if column not in ("birth", "end"):
        return _format_spread(result.figures.get(column, spread([])), _format(column), detail, result.n_runs)
    layers = result.layers(column)
    if len(layers) == 1:
        return _format_spread(layers[0], ".3g", detail, result.n_runs)
    return ", ".join(format_value(layer.mean, ".3g") for layer in layers) or MISSING


def _format(column: str) -> str:
    if column in SCALARS:
        return SCALARS[column].format or SCALARS[column].quantity.format
    return ".3g" if column == "sink_key" else ".3f"


def _format_spread(value: Spread, spec: str, detail: _Detail, n_runs: int) -> str:
    """Write mean ± sd (min–max), or the part of it that ``detail`` asks for, only the mean for one seed; and the number
    of seeds if others have no finite figure.
    """
    mean, sd, low, high = (format_value(part, spec) for part in value[:4])
    some = f", {value.n} of {n_runs}" if 0 < value.n < n_runs else ""
    if value.n < 2 or detail == "mean":
        return mean + some
    return (f"{mean} ± {sd} ({low}–{high})" if detail == "range" else f"{mean} ± {sd}") + some


def _table(study: ArmStudy, results: Sequence[ArmResult], columns: Sequence[str], detail: _Detail = "range") -> Table:
    """Build the table of some columns: a row per arm."""
    rows = [
        [
            result.arm,
            f"{result.n_runs}/{len(study.init_seeds)}",
            result.step,
            *(_cell(result, column, detail) for column in columns),
        ]
        for result in results
    ]
    leading = [Column("arm", "name"), Column("runs"), Column("step", format=",d")]
    return Table([*leading, *(Column(broken(_title(column, results)), key=column) for column in columns)], rows)


def table_of(study: ArmStudy, results: Sequence[ArmResult]) -> Table:
    """Build the whole table."""
    return _table(study, results, _shown(results))


def _title(column: str, results: Sequence[ArmResult]) -> str:
    return _COLUMNS.get(column) or next(result.own[column] for result in results if column in result.own)


def notes(study: ArmStudy, results: Sequence[ArmResult]) -> str:
    """Explain the table's figures."""
    of_kinds = {"": False, "on a document's first token ": True}
    found = {where: [r for r in results if r.of_documents is kind] for where, kind in of_kinds.items()}
    uniform = "; ".join(where + _levels(arms) for where, arms in found.items() if arms) or MISSING
    about_outliers = ""
    if any(result.figures[name].n for result in results for name in _OUTLIERS):
        about_outliers = "∞-norm and kurtosis: on that text, behind the block where they are largest. "
    return (
        f"Mean ± sd (min–max) over init_seeds {', '.join(map(str, study.init_seeds))}. Sink mass: mean attention on "
        f"position 0 on held-out text of the task (uniform attention: {uniform}). Losses in nats per token. "
        f"{_about_learning(results)}{about_outliers}{_DISCREPANCY}: variance of what enters the output projection at "
        "position 0 over its mean in the later half, random tokens"
        + ("; one figure per block." if any(len(r.layers("end")) > 1 for r in results) else ".")
    )


def _levels(results: Sequence[ArmResult]) -> str:
    return ", ".join(sorted({format_value(level, ".3f") for level in uniform_levels(results)})) or MISSING


def markdown(study: ArmStudy, results: Sequence[ArmResult]) -> str:
    """Write the table in Markdown."""
    return f"{table_of(study, results).markdown()}\n\n{notes(study, results)}\n"


def write_csv(results: Sequence[ArmResult], path: Path) -> None:
    """Write the table for programs: a row per arm, ``FIGURE_mean``, ``_sd``, ``_min``, ``_max`` and ``_n`` per
    figure.
    """
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    titles = ["arm", "runs", "step", *(f"{name}_{part}" for name in names for part in Spread._fields)]
    rows = []
    for result in results:
        figures = [value for name in names for value in result.figures.get(name, spread([]))]
        rows.append([result.arm, result.n_runs, result.step, *figures])
    write_text(path, Table(list(map(Column, titles)), rows).csv())


def print_results(study: ArmStudy, results: Sequence[ArmResult], console: Console) -> None:
    """Print the widest form of the table that fits the console."""
    wide = _shown(results)
    narrow = [column for column in _NARROW if column in wide]
    loss = "trigger_loss" if "trigger_loss" in narrow else "val_loss"
    narrowest = [column for column in narrow if column == loss or column.startswith("sink_mass")]
    forms: tuple[tuple[list[str], _Detail], ...] = (
        (wide, "sd"),
        (narrow, "sd"),
        (narrowest, "sd"),
        (narrow, "mean"),
        (narrowest, "mean"),
    )
    narrower = [_table(study, results, columns, detail) for columns, detail in forms]
    table_of(study, results).print(console, narrower=narrower, all_columns="table.csv has every column")


# ---------------------------------------------------------------- the page: sentences, a scatter, curves and a table

_TIMES = "Time of a step: mean (range) over seeds of each run's median. Compare only runs that had a machine alone."


def arms_page(study: ArmStudy, results: Sequence[ArmResult], trials: Sequence[Trial], out: Path) -> str:
    """Render the page; it fetches nothing, and links to the runs' own reports below ``out``."""
    grouped = families(study, results)
    looks = looks_of(study, grouped)
    first = next((result for result in results if result.arm == next(iter(study.arms))), None)
    *answers, rests_on = outcome(study, results)
    blocks: list[Block] = [
        *(Prose(sentence) for sentence in answers),
        Prose(rests_on, note=True),
        Panels([_scatter(results, grouped, looks)], wide=True),
        *([Html(_legend(grouped, looks))] if len({family.title for family in grouped}) > 1 else []),
        Heading("training", "Sink mass over training", _about_curves(results, first)),
        Panels(_curves(results, grouped, first, looks)),
        Heading("table", "All figures"),
        _with_times(table_of(study, results), results),
        *(Prose(note, note=True) for note in (notes(study, results), _TIMES, failed_runs(trials)) if note),
        Fold("Runs", [_links(study, trials, out)]),
    ]
    return render_page(study.name, blocks, runs=_page_runs(results), about="Birthmark study")


# ── in sentences ─────────────────────────────────────────────────────────────────────────────────────────────────────


def outcome(study: ArmStudy, results: Sequence[ArmResult]) -> list[str]:
    """Name the arms with a sink, and those without one that learn as well as the first arm; then the basis of this."""
    finished = [r for r in results if r.is_finished]
    judged = finished or results
    known = [r for r in judged if r.sink.n and math.isfinite(r.uniform) and r.uniform > 0]
    if not known:
        return ["No arm has a sink mass yet: nothing can be compared."]
    left = [_listed("Sink mass at the end not known", [r for r in judged if r not in known])]
    underway = ", ".join(f"{r.arm} (step {r.step:,})" for r in results if not r.is_finished)
    if underway:
        left.append(f"Without a finished run, and {'not judged' if finished else 'judged at this step'}: {underway}.")
    rests_on = [*filter(None, left), _rests_on(known)]
    sink = [r for r in known if r.sink.min >= threshold("sink") * r.uniform]
    none = [r for r in known if r.sink.max < threshold("no_sink") * r.uniform]
    between = [r for r in known if r not in sink and r not in none]
    first = next(iter(study.arms))
    name = task_loss(results)
    if any(r.learned(name) is False for r in known if r.arm == first):
        return [*_nothing_learned(known, (sink, none, between), first, name), *rests_on]
    learned, worse, unknown = _by_loss(none, judged, first)
    within = f"within {in_prose(threshold('learned'), 2)} nats of the loss of {first}"
    parts = [
        ("With a sink in every seed", sink),
        (f"Without a sink, and {within}", learned),
        (f"Without a sink, but not {within}", worse),
        ("Without a sink; their loss cannot be compared", unknown),
        ("In between, or not the same in every seed", between),
    ]
    return [*filter(None, (_listed(words, arms) for words, arms in parts)), *rests_on]


def _listed(words: str, arms: Sequence[ArmResult]) -> str:
    """Name arms behind ``words``; "" without any."""
    return f"{words}: {', '.join(r.arm for r in arms)}." if arms else ""


def _nothing_learned(
    known: Sequence[ArmResult], by_sink: tuple[list[ArmResult], list[ArmResult], list[ArmResult]], first: str, name: str
) -> list[str]:
    """Say that the arm with which others are compared has not learned: no arm can be said to learn as well as it."""
    reference = next(r for r in known if r.arm == first)
    end, birth = reference.figures[name], reference.figures.get(f"{name}_birth", spread([]))
    loss = "loss on triggers" if name == "trigger_loss" else "validation loss"
    beside = f", {in_prose(birth.mean, 2)} at birth" if birth.n else ""
    said = [
        f"{first} has not learned: its {loss} is {in_prose(end.mean, 2)} nats{beside}. This is a first look: nothing "
        "can be said yet of arms that learn without a sink."
    ]
    sink, none, between = by_sink
    parts = (
        ("With a sink in every seed", sink),
        ("Without a sink so far", none),
        ("In between, or not the same in every seed", between),
        ("Learned", [r for r in known if r.learned(name)]),
    )
    return [*said, *filter(None, (_listed(words, arms) for words, arms in parts))]


def _about_learning(results: Sequence[ArmResult]) -> str:
    """Explain when an arm counts as having learned."""
    if task_loss(results) == "trigger_loss":
        return f"An arm has learned if its trigger loss is at most {threshold('learned_triggers'):g} of that at birth. "
    return (
        f"An arm has learned if its validation loss is {in_prose(threshold('learned'), 2)} nats below the entropy of "
        "token frequencies. "
    )


def _rests_on(known: Sequence[ArmResult]) -> str:
    least, most = min(r.sink.n for r in known), max(r.sink.n for r in known)
    seeds = f"{least}" if least == most else f"{least} to {most}"
    alone = "; with one seed, a difference between arms may be chance" if least == 1 else ""
    place = "the first position"
    if any(r.of_documents for r in known):
        place += " (of a document where documents see themselves alone)"
    return (
        f"A sink is at least {threshold('sink'):g} times the uniform share of attention on {place} at the "
        f"end, none is less than {threshold('no_sink'):g} times. Seeds of an arm: {seeds}{alone}."
    )


def _by_loss(
    arms: Sequence[ArmResult], results: Sequence[ArmResult], first: str
) -> tuple[list[ArmResult], list[ArmResult], list[ArmResult]]:
    """Divide arms into those whose every seed comes near the first arm's mean loss, those whose seeds do not, and those
    whose loss, or that of a seed, cannot be compared.
    """
    name = task_loss(results)
    reference = next((r.figures[name] for r in results if r.arm == first and r.figures[name].n), None)
    near: list[ArmResult] = []
    far: list[ArmResult] = []
    unknown: list[ArmResult] = []
    most = math.nan if reference is None else reference.mean + threshold("learned")
    for arm in arms:
        {True: near, False: far, None: unknown}[arm.all_reach(name, most)].append(arm)
    return near, far, unknown


# ── in pictures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _scatter(results: Sequence[ArmResult], grouped: Sequence[Family], looks: Mapping[str, Look]) -> ScatterPanel:
    name = task_loss(results)
    titles = {arm.arm: family.title for family in grouped for arm in family.arms}
    points = [
        Point(
            r.sink.mean,
            r.figures[name].mean,
            r.arm,
            tip="\n".join(
                filter(None, [titles.get(r.arm), f"{r.sink.n} seed{'' if r.sink.n == 1 else 's'}, step {r.step:,}"])
            ),
            colour=looks[r.arm].place,
            marker=looks[r.arm].marker,
            x_error=_ends(r.sink),
            y_error=_ends(r.figures[name]),
        )
        for r in results
        if r.sink.n and r.figures[name].n
    ]
    losses = [point.y for point in points]
    return ScatterPanel(
        "arms",
        "Lower left: no sink, and the task is learned"
        if any(r.learned(name) for r in results) or all(r.learned(name) is None for r in results)
        else "Sink and loss: no arm has learned yet",
        points,
        "sink mass at the end",
        "loss on trigger positions (nats)" if name == "trigger_loss" else "validation loss (nats)",
        y_log=bool(losses) and min(losses) > 0 and max(losses) > 4 * min(losses),
        caption="A point is the mean over an arm's seeds, a bar their range.",
        csv="table.csv",
    )


def _with_times(table: Table, results: Sequence[ArmResult]) -> Table:
    """Add the time of a step after the number of steps."""
    place = 1 + [column.key for column in table.columns].index("step")
    rows = [[*row[:place], _step_time(r), *row[place:]] for row, r in zip(table.rows, results, strict=True)]
    return Table([*table.columns[:place], Column("ms a step"), *table.columns[place:]], rows)


def _step_time(result: ArmResult) -> str:
    """Write milliseconds: the mean over seeds, and their range."""
    mean, low, high = (format_value(1000 * seconds, ".3g") for seconds in result.step_s[:1] + result.step_s[2:4])
    return f"{mean} ({low}–{high})" if result.step_s.n > 1 else mean


def _ends(spread: Spread) -> tuple[float, float] | None:
    return (spread.min, spread.max) if spread.n > 1 else None


def _legend(grouped: Sequence[Family], looks: Mapping[str, Look]) -> Markup:
    """Draw the families' markers."""
    markers = {family.title: looks[family.arms[0].arm].marker for family in grouped}
    spans = (f"<span>{mark_of(marker, 'var(--ink)')}{escape(title)}</span>" for title, marker in markers.items())
    return Markup(f'<div class="keys">{"".join(spans)}</div>')


def _about_curves(results: Sequence[ArmResult], first: ArmResult | None) -> str:
    several = "Mean of the seeds of each arm; band: least to largest of them. "
    common = "" if first is None else f"Every panel has {first.arm}."
    return (several if any(r.n_runs > 1 for r in results) else "") + common


def _page_runs(results: Sequence[ArmResult]) -> list[PageRun]:
    """Return a run for each seed of each arm."""
    return [
        PageRun(f"{r.arm}, seed {seed}", r.arm) if r.n_runs > 1 else PageRun(r.arm) for r in results for seed in r.seeds
    ]


def _curves(
    results: Sequence[ArmResult], grouped: Sequence[Family], first: ArmResult | None, looks: Mapping[str, Look]
) -> list[CurvePanel]:
    """Draw a panel per family, with a line for each seed: the page shows their mean on a band."""
    panels = []
    names = [r.arm for r in results for _ in r.seeds]
    for number, family in enumerate(grouped or [Family("", [])]):
        shown = [first, *family.arms] if first is not None and first not in family.arms else family.arms
        series = [
            Series(sinks, {"step": r.steps}, names.index(r.arm) + i, r.arm, colour=looks[r.arm].place)
            for r in shown
            if r.steps
            for i, sinks in enumerate(r.sinks)
        ]
        levels = {r.uniform: r.steps for r in reversed(shown) if r.steps and np.isfinite(r.uniform)}
        for level, steps in levels.items():
            series.append(Series(np.full(len(steps), level), {"step": steps}, None, "uniform", "control"))
        panels.append(CurvePanel(f"family-{number}", family.heading or "arms", series, unit="share of attention"))
    return panels


def _links(study: ArmStudy, trials: Sequence[Trial], out: Path) -> Table:
    """Build the table of links to the runs' reports."""

    def link(arm: str, seed: int) -> Markup | None:
        run = next((trial.run for trial in trials if (trial.arm, trial.seed) == (arm, seed)), None)
        if run is None or not run.report.is_file() or not run.report.resolve().is_relative_to(out.resolve()):
            return None
        return Markup('<a href="{}">report</a>').format(run.report.resolve().relative_to(out.resolve()).as_posix())

    columns = [Column("arm", "name"), *(Column(f"seed {seed}") for seed in study.init_seeds)]
    return Table(columns, [[arm, *(link(arm, seed) for seed in study.init_seeds)] for arm in study.arms])
