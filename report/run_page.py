"""Self-contained HTML page of one run over training, or of several side by side; and the same rows as JSON."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from ..files import strict
from ..findings.compared_runs import (
    Comparison,
    Difference,
    compare_configs,
    comparison_in_words,
    paired_differences,
    signed,
)
from ..findings.formatting import MISSING, counted, format_value, number_of
from ..findings.inactive_sections import why_inactive
from ..findings.learning import skipped_in_words
from ..findings.run_history import RunHistory, read_runs
from ..measure.records import RunDir
from ..messages import printable
from .charts.chart_page import Block, Controls, Finding, Findings, Fold, Panels, Prose, render_page
from .charts.run_panels import panels_of_runs
from .charts.specs import PICTURED, ChartPanel, PageRun, colours_of, roles_of
from .html_page import colour_variable, navigation, write_page
from .sections.chain import sections_over_training
from .sections.preference import favourites
from .sections.section import csv_numbers
from .sections.training_view import TrainingView, steps_are_wide
from .snapshot_page import build_snapshot_page, lies_in_its_run, snapshot_page
from .snapshot_table import tables_of_runs
from .table import Column, Table
from .verdicts import Verdict, legend_of_marks, run_figures, verdicts

_MOST_PAIRS = 6
"""Comparisons of two configs that a page shows."""
_OPEN_FINDINGS = 2
"""Runs whose verdicts stand open; those of more are folded, a line for each run."""


def page_runs(runs: Sequence[RunHistory], comparison: Comparison) -> list[PageRun]:
    """Return the runs with their names for the page's controls."""
    several = comparison.several_seeds
    # A second run of one seed is no further seed: it stands for itself.
    groups = [
        group if group in several and is_first else ""
        for group, is_first in zip(comparison.groups, comparison.first_of_seed, strict=True)
    ]
    roles = roles_of([(run.series("val/loss")[1] or [nan])[-1] for run in runs], groups)
    return [
        PageRun(
            run.name,
            group,
            {s.step: tokens for s in run.dated if isinstance(tokens := s.summary.get("tokens"), int)},
            run.start.at,
            role,
        )
        for run, group, role in zip(runs, groups, roles, strict=True)
    ]


def story(
    view: TrainingView, comparison: Comparison, files: Container[str], colours: Sequence[int | None]
) -> tuple[list[Block], dict[str, list[ChartPanel]], dict[str, str]]:
    """Build the blocks of the story; return also, by section, the panels that it leaves out, and why.

    Args:
        view: runs of the page.
        comparison: comparison of their configs.
        files: names of the page's CSV files.
        colours: place of each run among the colours; None for a grey one.
    """
    runs = view.runs
    blocks: list[Block] = []
    if len(runs) == 1:
        blocks.append(Prose(about_run(runs[0]), note=True))
    else:
        blocks += [Prose(sentence) for sentence in comparison_in_words(runs, comparison.groups)]
        blocks += _compared(runs, comparison, colours)
    panels = panels_of_runs(runs, view.start, files)
    nothing = {section: why for section in panels if (why := why_inactive(runs, section))}
    shown = {section: found for section, found in panels.items() if found and section not in nothing}
    places = {section: f"panel-{found[0].id}" for section, found in shown.items()}
    blocks += _findings(runs, places, colours, x_log=steps_are_wide(runs))
    if shown:
        blocks += [Controls(), Panels([panel for found in shown.values() for panel in found])]
    if len(runs) > 1:
        blocks += _paired(runs, comparison)
    return blocks, {section: panels[section] for section in nothing}, nothing


def about_run(run: RunHistory) -> str:
    """Describe model, data and start of a run in a line."""
    birth = run.birth
    model, data = birth.get("model") or {}, birth.get("data") or {}
    summary: Mapping[str, Any] = run.snapshots[-1].summary if run.snapshots else {}
    parts = []
    if isinstance(n := birth.get("n_params"), int):
        parts.append(f"{counted(n)} parameters")
    layers, heads = model.get("n_layers", summary.get("n_layers")), model.get("n_heads", summary.get("n_heads"))
    if layers is not None:
        parts.append(number_of(layers, "block") + (f" of {number_of(heads, 'head')}" if heads is not None else ""))
    parts += [f"{word} {model[name]}" for name, word in (("d_model", "width"), ("mlp", "MLP")) if name in model]
    experts = model.get("experts") or {}
    if (n_experts := experts.get("n_experts")) is not None:
        parts.append(f"{number_of(n_experts, 'expert')}, {experts.get('top_k')} for each token")
    if (vocab := summary.get("vocab_size") or model.get("vocab_size")) is not None:
        parts.append(f"vocabulary {vocab:,}")
    if data.get("path"):
        tokens = (data.get("tokens") or {}).get("train")
        named = data.get("sources") or data["path"]
        said = named if isinstance(named, str) else ", ".join(named)
        parts.append(f"data {said}" + (f" ({counted(tokens)} tokens)" if isinstance(tokens, int) else ""))
    if birth.get("init_from"):
        parts.append(f"started from {birth['init_from']}")
    elif birth.get("init_seed") is not None:
        parts.append(f"init_seed {birth['init_seed']}")
    last = max([*run.metrics, *(s.step for s in run.dated)], default=0)
    if last > 0:
        seen = (run.last.summary.get("tokens") if run.last else None) or 0
        parts.append(number_of(last, "step") + (f", {counted(seen)} tokens seen" if seen else ""))
    if (skipped := skipped_in_words(run)) is not None:
        parts.append(f"{skipped} skipped (loss or gradient not finite)")
    if not_measured := run.not_measured:
        step, reason = next(iter(not_measured.items()))
        others = f", and {number_of(len(not_measured) - 1, 'step')} more" if len(not_measured) > 1 else ""
        parts.append(f"not measured: step {step:,} ({reason}){others}")
    return printable(" · ".join(parts))


def _swatch(colour: int | None) -> Markup:
    return Markup('<span class="swatch" style="background:{}"></span>').format(Markup(colour_variable(colour)))


def _compared(runs: Sequence[RunHistory], comparison: Comparison, colours: Sequence[int | None]) -> list[Block]:
    """Show where the configs differ: a line for each run, or for each field if there are more fields than runs."""
    values = [[printable(value or MISSING) for value in row] for row in comparison.values]
    names = [_swatch(colour) + escape(run.name) for run, colour in zip(runs, colours, strict=True)]
    if len(comparison.fields) > max(len(runs), 4):
        titles, rows = ["field", *(run.name for run in runs)], list(zip(comparison.fields, *values, strict=True))
    else:
        titles, rows = ["run", *comparison.fields], [(name, *row) for name, row in zip(names, values, strict=True)]
    table = Table([Column(title, "text") for title in titles], rows)
    if max(len(runs), len(comparison.fields)) > 12:
        return [
            Fold(
                "Where the configs differ",
                [table],
                note=f"{number_of(len(comparison.fields), 'field')} of {len(runs)} runs",
            )
        ]
    return [table]


def _findings(
    runs: Sequence[RunHistory], places: Mapping[str, str], colours: Sequence[int | None], *, x_log: bool
) -> list[Block]:
    """Build the findings of every run, in sentences."""
    blocks: list[Block] = []
    said: list[Verdict] = []
    for run, colour in zip(runs, colours, strict=True):
        shown = [verdict for verdict in verdicts(run) if verdict.headline]
        said += shown
        found = [
            Finding(
                verdict.sentence,
                verdict.tone,
                verdict.values,
                verdict.control or (),
                places.get(verdict.section, verdict.section),
                colour,
                verdict.steps,
                x_log,
            )
            for verdict in shown
        ]
        if not found:
            continue
        if len(runs) == 1:
            blocks.append(Findings(found))
        elif len(runs) <= _OPEN_FINDINGS:
            blocks.append(Findings(found, run.name))
        else:
            blocks.append(Fold(f"What happened in {run.name}", [Findings(found)]))
    if len(blocks) > 12:
        blocks = [Fold("What happened in each run", blocks)]
    return [*blocks, Prose(legend_of_marks(said), note=True)] if said else blocks


def _paired(runs: Sequence[RunHistory], comparison: Comparison) -> list[Block]:
    """Show differences between configs over pairs of one seed."""
    found = paired_differences(runs, comparison.groups)
    blocks: list[Block] = []
    for a, b, differences in found[:_MOST_PAIRS]:
        steps = {difference.step for difference in differences}
        # One pair has no interval, and says so once.
        with_interval = any(difference.n_pairs != 1 for difference in differences)
        rows = [_cells(d, with_step=len(steps) > 1, with_interval=with_interval) for d in differences]
        when = "at their last common step" if len(steps) > 1 else f"at step {differences[0].step:,}"
        over = "over pairs of runs of the same seed; Student's interval over the pairs"
        caption = f"{b} minus {a}, {over if with_interval else 'one pair of runs of the same seed: no interval'}."
        lost: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        for d in differences:
            lost.setdefault((d.step, tuple(d.missing)), []).append(_compared_name(d))
        said = [
            f"{', '.join(names)} of {', '.join(map(printable, missing))} at step {step:,}"
            for (step, missing), names in lost.items()
            if missing
        ]
        if said:
            caption += f" Not finite or not recorded, so that the pair is left out: {'; '.join(said)}."
        unlike: dict[str, list[str]] = {}
        for d in differences:
            unlike.setdefault(d.unlike, []).append(_compared_name(d))
        caption += "".join(f" {'; '.join(names).capitalize()}: {why}." for why, names in unlike.items() if why)
        titles = [a, b, "difference", *(["95 % interval", "pairs"] if with_interval else [])]
        blocks.append(Table([Column(when, "text"), *map(Column, titles)], rows, caption))
    if not blocks:
        return []
    left_out = len(found) - len(blocks)
    if left_out:
        blocks.append(Prose(f"{left_out} of {len(found)} comparisons are left out.", note=True))
    return [Fold("Paired differences: same seed, two configs", blocks, id="pairs", open=len(blocks) < 3)]


def _compared_name(difference: Difference) -> str:
    return difference.quantity.label + (f", {difference.probe} probe" if difference.probe else "")


def _cells(difference: Difference, *, with_step: bool, with_interval: bool) -> list[str]:
    """Return quantity, both means, their difference and, if wanted, its interval and the number of pairs."""
    spec = difference.quantity.format
    name = _compared_name(difference) + (f", step {difference.step:,}" if with_step else "")
    ends = MISSING
    if difference.interval is not None:
        ends = " to ".join(signed(end, spec) for end in difference.interval)
    means = [format_value(value, spec) for value in (difference.first, difference.second)]
    cells = [name, *means, signed(difference.mean, spec)]
    return [*cells, ends, str(difference.n_pairs)] if with_interval else cells


# ---------------------------------------------------------------- the page


def build_pages(runs: Sequence[RunDir], out: Path) -> list[RunHistory]:
    """Write the report of ``runs`` to ``out``; if that is the one run's own place, first the page of its newest
    snapshot, which the report links. See :func:`build_report`.
    """
    snapshots = runs[0].snapshot_folders() if len(runs) == 1 and out == runs[0].report else []
    # One that a link leads to has its page by `report RUN@STEP --out`: the run's page is wanted all the same.
    if snapshots and lies_in_its_run(snapshots[-1]):
        build_snapshot_page(snapshots[-1])
    return build_report(runs, out)


def build_report(runs: Sequence[RunDir], out: Path) -> list[RunHistory]:
    """Write the report of ``runs`` to ``out``: one HTML page that fetches nothing; the same input gives the same bytes.

    A folder beside it holds the numbers of its pictures.

    Returns:
        What was read of each run.

    Raises:
        RunError: a file of a run is damaged; the message names it.
        UsageError: no run was given, or something is in the place of the numbers.
    """
    histories = read_runs(runs)
    view = TrainingView(histories)
    sections = sections_over_training(view)
    moments = [snapshot for _, snapshot in histories[0].moments] if len(histories) == 1 else []
    comparison = compare_configs(histories)
    of_page = page_runs(histories, comparison)
    colours = colours_of(of_page)
    blocks, hidden, nothing = story(view, comparison, csv_numbers(sections), colours)
    live = {section.id: [view.panel(picture) for picture in section.pictures] for section in sections}
    chain, mark = navigation(sections, moments)
    values: dict[str, Any] = {
        "runs": of_page,
        "colours": colours,
        "histories": histories,
        "sections": sections,
        "strips": [run_figures(run) for run in histories],
        "tables": tables_of_runs(histories, view.quantities),
        "favourites": [favourites(run) for run in histories],
        "certificates": [_certificate(run) for run in histories],
        "chain": chain,
        "mark": mark,
        "headlines": {id_: headline for id_, _, headline in [*chain, *mark]},
        "hidden": {section: Panels(panels) for section, panels in hidden.items()},
        "live": live,
        "pictured": PICTURED,
        "nothing": nothing,
        "said": _said(histories),
        "start": view.start,
        "pages": [
            (name if len(histories) == 1 else f"{run.name}, {name}", link)
            for run in histories
            for name, link in _pages(run, out)
        ],
    }
    title = " · ".join(run.name for run in histories) if len(histories) <= 6 else f"{len(histories)} runs"
    further = [panel for panels in hidden.values() for panel in panels]
    further += [panel for panels in live.values() for panel in panels if panel is not None]
    write_page(
        out,
        sections,
        lambda data: render_page(title, blocks, data=data, template="report.html.j2", further=further, **values),
    )
    return histories


def _said(runs: Sequence[RunHistory]) -> dict[str, str]:
    """Collect the sections' sentences that the first screen of one run's page lacks, by section."""
    found: dict[str, list[str]] = {}
    for verdict in verdicts(runs[0]) if len(runs) == 1 else []:
        if not verdict.headline:
            found.setdefault(verdict.section, []).append(verdict.sentence)
    return {section: " ".join(sentences) for section, sentences in found.items()}


def _pages(run: RunHistory, out: Path) -> list[tuple[str, str]]:
    """Return (name, link) of the pages of single snapshots below the folder of ``out``."""
    links = []
    for snapshot in run.snapshots:
        page = snapshot_page(run.folder.snapshot(snapshot.step)).resolve()
        if page.is_file() and page.is_relative_to(out.resolve().parent):
            links.append(
                (
                    run.start.step_in_words(snapshot.step) or "snapshot",
                    page.relative_to(out.resolve().parent).as_posix(),
                )
            )
    return links


def compared_in_words(histories: Sequence[RunHistory]) -> list[str]:
    """Compare runs in sentences; none for one run."""
    if len(histories) < 2:
        return []
    return comparison_in_words(histories, compare_configs(histories).groups)


def summarise(runs: Sequence[RunDir]) -> dict[str, Any]:
    """Return the content of the report as JSON: per run its identity, verdicts and rows; a value that is not finite is
    None.
    """
    histories = read_runs(runs)
    return {
        "comparisons": compared_in_words(histories),
        "runs": [
            {
                "path": str(run.folder.path),
                "name": run.name,
                "digest": run.birth.get("digest"),
                "init_seed": run.birth.get("init_seed") if run.start.is_birth else None,
                "init_from": run.birth.get("init_from"),
                "data_seed": run.birth.get("data_seed"),
                "probe_seed": run.birth.get("probe_seed"),
                "n_params": run.birth.get("n_params"),
                "corpus": run.birth.get("data"),
                "final_step": max([*run.metrics, *(s.step for s in run.snapshots)], default=0),
                "verdicts": [verdict.as_json() for verdict in verdicts(run)],
                "rows": strict(run.rows),
            }
            for run in histories
        ],
    }


def _certificate(run: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of the birth certificate, flat, without missing entries; without a certificate, of the
    measured model.
    """
    birth = run.birth
    if not birth:
        summary = run.snapshots[-1].summary
        return [(name, _flat(summary[name])) for name in ("source", "model", "probe") if name in summary]
    named = ("digest", "init_from" if birth.get("init_from") else "init_seed", "data_seed", "probe_seed", "created")
    lines = {key: birth.get(key) for key in named}
    lines["parameters"] = birth.get("n_params")
    lines |= {group: birth.get(group) for group in ("model", "data", "versions", "code")}
    return [(name, _flat(value)) for name, value in lines.items() if value is not None]


def _flat(value: Any) -> str:
    """Write a value of a certificate in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_flat, value))
    large = isinstance(value, int) and abs(value) >= 100_000
    return f"{value:,}" if large else str(value)
