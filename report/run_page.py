"""Self-contained HTML page of one run over training, or of several side by side; and the same rows as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import strict
from ..findings.compared_runs import compare_configs
from ..findings.history import start_of_all
from ..measure.records import RunDir
from ..metrics.quantities import LOGGED
from ..metrics.quantity import Quantity
from .charts.chart_page import Panels, render_page
from .charts.from_numbers import panel_of_numbers
from .charts.specs import ChartPanel
from .html_page import navigation, write_page
from .key_figures import of_run
from .run_blocks import page_runs, story
from .run_history import RunHistory, read_runs
from .sections.chain import sections_over_training
from .sections.preference import favourites
from .sections.section import Section
from .sections.training_view import PICTURED, TrainingView
from .snapshot_page import build_snapshot_page, snapshot_page
from .snapshot_table import shown_columns
from .text import printable, step_in_words
from .verdicts import verdicts


def build_report(runs: Sequence[RunDir], out: Path) -> None:
    """Write the report of ``runs`` to ``out``: one HTML page that fetches nothing; the same input gives the same bytes.

    A folder beside it holds the numbers of its pictures. If ``out`` is the one run's own report, the page of its newest
    snapshot is written too.

    Raises:
        RunError: a file of a run is damaged; the message names it.
        UsageError: no run was given, matplotlib is missing, or something is in the place of the numbers.
    """
    histories = read_runs(runs)
    view = TrainingView(histories)
    sections = sections_over_training(view)
    if len(runs) == 1 and out == runs[0].report and histories[0].snapshots:
        newest = histories[0].last or histories[0].first
        assert newest is not None
        build_snapshot_page(runs[0].snapshot(newest.step))
    moments = [snapshot for _, snapshot in histories[0].moments] if len(histories) == 1 else []
    comparison = compare_configs(histories)
    blocks, hidden, nothing = story(histories, comparison)
    live = {section.id: _live(section, [run.name for run in histories], view.quantities) for section in sections}
    chain, mark = navigation(sections, moments)
    values: dict[str, Any] = {
        "runs": page_runs(histories, comparison),
        "histories": histories,
        "sections": sections,
        "strips": [of_run(run) for run in histories],
        "columns": shown_columns([row for run in histories for row in run.rows], view.quantities),
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
        "start": start_of_all(run.start for run in histories),
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


def _said(runs: Sequence[RunHistory]) -> dict[str, str]:
    """Collect the sections' sentences that the first screen of one run's page lacks, by section."""
    found: dict[str, list[str]] = {}
    for verdict in verdicts(runs[0]) if len(runs) == 1 else []:
        if not verdict.headline:
            found.setdefault(verdict.section, []).append(verdict.sentence)
    return {section: " ".join(sentences) for section, sentences in found.items()}


def _live(section: Section, runs: Sequence[str], declared: Mapping[str, Quantity]) -> list[ChartPanel | None]:
    """Build the live panel of each picture of a section."""
    return [
        panel_of_numbers(f"{picture.file.removesuffix('.csv')}-{i}", "", picture.numbers, runs, {**declared, **LOGGED})
        for i, picture in enumerate(section.pictures)
    ]


def _pages(run: RunHistory, out: Path) -> list[tuple[str, str]]:
    """Return (name, link) of the pages of single snapshots below the folder of ``out``."""
    links = []
    for snapshot in run.snapshots:
        page = snapshot_page(run.folder.snapshot(snapshot.step)).resolve()
        if page.is_file() and page.is_relative_to(out.resolve().parent):
            links.append(
                (
                    step_in_words(snapshot.step, run.start) or "snapshot",
                    page.relative_to(out.resolve().parent).as_posix(),
                )
            )
    return links


def summarise(runs: Sequence[RunDir]) -> dict[str, Any]:
    """Return the content of the report as JSON: per run its identity, verdicts and rows; a value that is not finite is
    None.
    """
    return {
        "runs": [
            {
                "path": str(run.folder.path),
                "name": run.name,
                "digest": run.birth.get("digest"),
                "init_seed": run.birth.get("init_seed"),
                "data_seed": run.birth.get("data_seed"),
                "probe_seed": run.birth.get("probe_seed"),
                "n_params": run.birth.get("n_params"),
                "corpus": run.birth.get("data"),
                "final_step": max([*run.metrics, *(s.step for s in run.snapshots)], default=0),
                "verdicts": [verdict.as_json() for verdict in verdicts(run)],
                "rows": strict(run.rows),
            }
            for run in read_runs(runs)
        ]
    }


def _certificate(run: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of the birth certificate, flat, without missing entries; without a certificate, of the
    measured model.
    """
    birth = run.birth
    if not birth:
        summary = run.snapshots[-1].summary
        return [(name, printable(_flat(summary[name]))) for name in ("source", "model", "probe") if name in summary]
    named = ("digest", "init_from" if birth.get("init_from") else "init_seed", "data_seed", "probe_seed", "created")
    lines = {key: birth.get(key) for key in named}
    lines["parameters"] = birth.get("n_params")
    lines |= {group: birth.get(group) for group in ("model", "data", "versions", "code")}
    return [(name, printable(_flat(value))) for name, value in lines.items() if value is not None]


def _flat(value: Any) -> str:
    """Write a value of a certificate in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_flat, value))
    large = isinstance(value, int) and abs(value) >= 100_000
    return f"{value:,}" if large else str(value)
