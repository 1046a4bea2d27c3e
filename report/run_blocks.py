"""Beginning of the page of runs: models and data, findings, and the story in interactive panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup, escape

from ..findings.compared_runs import Comparison, Difference, paired_differences
from ..findings.history import Start, start_of_all
from ..findings.inactive_sections import nothing_here
from .charts.chart_page import Block, Controls, Finding, Findings, Fold, Panels, Prose, Table
from .charts.run_panels import panels_of_runs
from .charts.specs import ChartPanel, CurvePanel, PageRun, RankingPanel
from .charts.stills import run_variable
from .run_history import RunHistory
from .text import MISSING, format_value, printable
from .verdicts import verdicts

_MOST_PAIRS = 6
"""Comparisons of two configs that a page shows."""
_OPEN_FINDINGS = 2
"""Runs whose verdicts stand open; those of more are folded, a line for each run."""


def page_runs(runs: Sequence[RunHistory], comparison: Comparison) -> list[PageRun]:
    """Return the runs with their names for the page's controls."""
    several = comparison.several_seeds
    return [
        PageRun(
            run.name,
            # A second run of one seed is no further seed: it stands for itself.
            group if group in several and is_first else "",
            {s.step: tokens for s in run.dated if isinstance(tokens := s.summary.get("tokens"), int)},
            run.start.at,
        )
        for run, group, is_first in zip(runs, comparison.groups, comparison.first_of_seed, strict=True)
    ]


def story(
    runs: Sequence[RunHistory], comparison: Comparison
) -> tuple[list[Block], dict[str, list[ChartPanel]], dict[str, str]]:
    """Build the blocks of the story; return also, by section, the panels that it leaves out, and why.

    Args:
        runs: runs of the page.
        comparison: comparison of their configs.
    """
    blocks: list[Block] = []
    if len(runs) == 1:
        blocks.append(Prose(about_run(runs[0]), note=True))
    else:
        blocks += _compared(runs, comparison)
    start = start_of_all(run.start for run in runs)
    panels = {
        section: [_in_words_of(start, panel) for panel in found] for section, found in panels_of_runs(runs).items()
    }
    nothing = {section: why for section in panels if (why := nothing_here(runs, section))}
    shown = {section: found for section, found in panels.items() if found and section not in nothing}
    places = {section: f"panel-{found[0].id}" for section, found in shown.items()}
    blocks += _findings(runs, places)
    if shown:
        blocks += [Controls(), Panels([panel for found in shown.values() for panel in found])]
    if len(runs) > 1:
        blocks += _paired(runs, comparison)
    return blocks, {section: panels[section] for section in nothing}, nothing


def _in_words_of(start: Start, panel: ChartPanel) -> ChartPanel:
    """Adapt a panel, written for a birth, to the words of another start."""
    if start.is_birth:
        return panel
    if isinstance(panel, RankingPanel):
        panel = replace(panel, headings=[start.says(heading) for heading in panel.headings], start=start.at)
    elif isinstance(panel, CurvePanel):
        panel = replace(panel, series=[replace(series, name=start.says(series.name)) for series in panel.series])
    return replace(panel, title=start.says(panel.title))


def about_run(run: RunHistory) -> str:
    """Describe model, data and start of a run in a line."""
    birth = run.birth
    model, data = birth.get("model") or {}, birth.get("data") or {}
    summary: Mapping[str, Any] = run.snapshots[-1].summary if run.snapshots else {}
    parts = []
    if isinstance(n := birth.get("n_params"), int):
        parts.append(f"{_counted(n)} parameters")
    layers, heads = model.get("n_layers", summary.get("n_layers")), model.get("n_heads", summary.get("n_heads"))
    if layers is not None:
        parts.append(_number_of(layers, "block") + (f" of {_number_of(heads, 'head')}" if heads is not None else ""))
    parts += [f"{word} {model[name]}" for name, word in (("d_model", "width"), ("mlp", "MLP")) if name in model]
    experts = model.get("experts") or {}
    if (n_experts := experts.get("n_experts")) is not None:
        parts.append(f"{_number_of(n_experts, 'expert')}, {experts.get('top_k')} for each token")
    if (vocab := summary.get("vocab_size") or model.get("vocab_size")) is not None:
        parts.append(f"vocabulary {vocab:,}")
    if data.get("path"):
        tokens = (data.get("tokens") or {}).get("train")
        named = data.get("sources") or data["path"]
        said = named if isinstance(named, str) else ", ".join(named)
        parts.append(f"data {said}" + (f" ({_counted(tokens)} tokens)" if isinstance(tokens, int) else ""))
    if birth.get("init_from"):
        parts.append(f"started from {birth['init_from']}")
    elif birth.get("init_seed") is not None:
        parts.append(f"init_seed {birth['init_seed']}")
    last = max([*run.metrics, *(s.step for s in run.dated)], default=0)
    if last > 0:
        seen = (run.last.summary.get("tokens") if run.last else None) or 0
        parts.append(f"{last:,} steps" + (f", {_counted(seen)} tokens seen" if seen else ""))
    if not_measured := run.folder.read_not_measured():
        step, reason = next(iter(not_measured.items()))
        others = f", and {_number_of(len(not_measured) - 1, 'step')} more" if len(not_measured) > 1 else ""
        parts.append(f"not measured: step {step:,} ({reason}){others}")
    return printable(" · ".join(parts))


def _number_of(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _counted(n: int) -> str:
    for size, word in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if n >= size:
            return f"{n / size:.3g}{word}"
    return str(n)


def _swatch(run: int) -> Markup:
    return Markup('<span class="swatch" style="background:{}"></span>').format(Markup(run_variable(run)))


def _compared(runs: Sequence[RunHistory], comparison: Comparison) -> list[Block]:
    """Show where the configs differ: a line for each run, or for each field if there are more fields than runs."""
    values = [[printable(value or MISSING) for value in row] for row in comparison.values]
    names = [_swatch(run.index) + escape(run.name) for run in runs]
    if len(comparison.fields) > max(len(runs), 4):
        fields = [[field, *column] for field, *column in zip(comparison.fields, *values, strict=True)]
        table = Table(["field", *(run.name for run in runs)], fields, texts=range(1 + len(runs)))
    else:
        rows = [[name, *row] for name, row in zip(names, values, strict=True)]
        table = Table(["run", *comparison.fields], rows, texts=range(1 + len(comparison.fields)))
    if max(len(runs), len(comparison.fields)) > 12:
        return [Fold("Where the configs differ", [table], note=f"{len(comparison.fields)} fields of {len(runs)} runs")]
    return [table]


def _findings(runs: Sequence[RunHistory], places: Mapping[str, str]) -> list[Block]:
    """Build the findings of every run, in sentences."""
    blocks: list[Block] = []
    for run in runs:
        found = [
            Finding(
                verdict.sentence,
                verdict.tone,
                verdict.values,
                verdict.control or (),
                places.get(verdict.section, verdict.section),
                run.index,
            )
            for verdict in verdicts(run)
            if verdict.headline
        ]
        if not found:
            continue
        if len(runs) == 1:
            blocks.append(Findings(found))
        elif len(runs) <= _OPEN_FINDINGS:
            blocks.append(Findings(found, run.name))
        else:
            blocks.append(Fold(f"What happened in {run.name}", [Findings(found)]))
    return blocks if len(blocks) <= 12 else [Fold("What happened in each run", blocks)]


def _paired(runs: Sequence[RunHistory], comparison: Comparison) -> list[Block]:
    """Show differences between configs over pairs of one seed."""
    found = paired_differences(runs, comparison.groups)
    blocks: list[Block] = []
    for a, b, differences in found[:_MOST_PAIRS]:
        steps = {difference.step for difference in differences}
        rows = [_cells(difference, with_step=len(steps) > 1) for difference in differences]
        when = "at their last common step" if len(steps) > 1 else f"at step {differences[0].step:,}"
        caption = f"{b} minus {a}, over pairs of runs of the same seed; Student's interval over the pairs."
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
        blocks.append(Table([when, a, b, "difference", "95 % interval", "pairs"], rows, caption=caption))
    if not blocks:
        return []
    left_out = len(found) - len(blocks)
    if left_out:
        blocks.append(Prose(f"{left_out} of {len(found)} comparisons are left out.", note=True))
    return [Fold("Paired differences: same seed, two configs", blocks, id="pairs", open=len(blocks) < 3)]


def _compared_name(difference: Difference) -> str:
    return difference.quantity.label + (f", {difference.probe} probe" if difference.probe else "")


def _cells(difference: Difference, *, with_step: bool) -> list[str]:
    """Return quantity, both means, their difference, its interval, and the number of pairs."""
    spec = difference.quantity.format
    name = _compared_name(difference) + (f", step {difference.step:,}" if with_step else "")
    ends = "one pair" if difference.n_pairs else MISSING
    if difference.interval is not None:
        ends = " to ".join(_signed(end, spec) for end in difference.interval)
    means = [format_value(value, spec) for value in (difference.first, difference.second)]
    return [name, *means, _signed(difference.mean, spec), ends, str(difference.n_pairs)]


def _signed(value: float, spec: str) -> str:
    told = format_value(value, spec)
    return f"+{told}" if value > 0 else told
