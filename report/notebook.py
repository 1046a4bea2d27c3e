"""Runs and snapshots as HTML fragments for a notebook: a table and the main pictures, with nothing to fetch.

A fragment has its own colours and fonts, and a light background: a notebook has neither the page's style sheet nor a
known theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from markupsafe import Markup

from ..findings.formatting import format_value, without_shared_folder
from ..findings.run_history import RunHistory, read_runs
from ..measure.model_pairs import Compared
from ..measure.records import RunDir, Snapshot
from .charts.specs import ChartPanel
from .charts.stills import still
from .compared_models import compared_sentence, model_matrices
from .html_page import render
from .pictures.style import GRID, INK, MUTED, RUN_COLOURS, THEME
from .sections.declared import Link
from .sections.preference import PERSISTENCE, PREFERENCE
from .sections.section import Section
from .sections.seed_mark import DIRECTION
from .sections.sink import SINK
from .sections.snapshot_view import SnapshotView
from .sections.training import LOSS
from .sections.training_view import TrainingView
from .sections.value_aggregation import AGGREGATION
from .snapshot_table import table_columns, table_of_snapshots
from .table import Table
from .verdicts import (
    MARKS,
    KeyFigure,
    Verdict,
    legend_of_marks,
    run_figures,
    snapshot_figures,
    snapshot_verdicts,
    verdicts,
)

#: Sections whose first picture represents a run, and a snapshot.
_OF_RUN = (LOSS, SINK, DIRECTION, PERSISTENCE)
_OF_SNAPSHOT = (AGGREGATION, SINK, DIRECTION, PREFERENCE)

Captioned = tuple[ChartPanel, str]
"""A panel and its caption."""

#: Pairs of models that are written out.
_MOST_PAIRS = 6


def run_html(run: RunDir) -> str:
    """Render a run over training: sentences, table of snapshots, main curves.

    Raises:
        RunError: a file of the run is damaged; the message names it.
    """
    (history,) = read_runs([run])
    view = TrainingView([history])

    def section(link: Link, shown: Section) -> None:
        link.over_training(view, shown)

    return _render(
        history.name,
        run_figures(history),
        _first_pictures(_OF_RUN, section, view) if history.snapshots or history.metrics else [],
        sentences=[verdict for verdict in verdicts(history) if verdict.headline],
        table=table_of_snapshots(history.rows, table_columns(history.rows, view.quantities)),
    )


def snapshot_html(snapshot: Snapshot, name: str = "") -> str:
    """Render one snapshot: sentences, key figures, main pictures.

    Args:
        snapshot: the measurement.
        name: name of the model.
    """
    history = RunHistory.of_snapshot(snapshot)
    view = SnapshotView(name, snapshot, history.start)

    def section(link: Link, shown: Section) -> None:
        link.in_snapshot(view, shown)

    title = " · ".join(filter(None, [name, history.start.step_in_words(snapshot.step)]))
    pictures = _first_pictures(_OF_SNAPSHOT, section, view)
    return _render(title, snapshot_figures(snapshot), pictures, sentences=snapshot_verdicts(history))


def comparison_html(compared: Compared) -> str:
    """Render compared models: CKA and divergences of the first pairs, the matrices of all."""
    names, pairs = without_shared_folder(compared.pairs.names), compared.pairs
    cka_AA, kl_AA = pairs.last_cka(), pairs.mean_kl()
    shown = list(combinations(range(len(names)), 2))[:_MOST_PAIRS]
    strip = [
        (
            f"{names[a]} – {names[b]}",
            f"CKA {format_value(cka_AA[a, b], '.3f')}",
            f"KL {format_value(kl_AA[a, b], '.3g')}, back {format_value(kl_AA[b, a], '.3g')} nats",
        )
        for a, b in shown
    ]
    pictures = [(panel, panel.title) for panel in model_matrices(names, cka_AA, kl_AA)]
    sentence = compared_sentence(compared)
    return _render("Between models", strip, pictures, sentences=[sentence] if sentence else [])


def object_html(
    title: str,
    sentences: Sequence[Verdict | str],
    figures: Sequence[KeyFigure],
    table: Table | None = None,
    pictures: Sequence[Captioned] = (),
) -> str:
    """Render any object: its sentences, few figures, a table and pictures."""
    return _render(title, figures, pictures, sentences=sentences, table=table, may_draw=False)


def snapshots_html(run: RunDir) -> str:
    """Render the snapshots of a run: sentences and a row for each.

    Raises:
        RunError: a file of the run is damaged; the message names it.
    """
    (history,) = read_runs([run])
    found = [verdict for verdict in verdicts(history) if verdict.headline]
    table = table_of_snapshots(history.rows, table_columns(history.rows, TrainingView([history]).quantities))
    return _render(f"Snapshots of {history.name}", [], [], sentences=found, table=table, may_draw=False)


def _first_pictures(links: Iterable[Link], fill: Any, view: TrainingView | SnapshotView) -> list[Captioned]:
    """Return the first picture of each link that has one."""
    found = []
    for link in links:
        section = Section(link.id, link.title, "")
        fill(link, section)
        for picture in section.in_words_of(view.start).pictures[:1]:
            if (panel := view.panel(picture)) is not None:
                found.append((panel, picture.caption))
    return found


def _render(
    title: str,
    figures: Sequence[KeyFigure],
    pictures: Sequence[Captioned],
    *,
    sentences: Sequence[Verdict | str] = (),
    table: Table | None = None,
    may_draw: bool = True,
) -> str:
    shown = [(panel.unit, Markup(_resolved(still(panel, caption))), caption) for panel, caption in pictures]
    return render(
        "notebook.html.j2",
        title=title,
        strip=figures,
        pictures=shown,
        colours={"ink": INK, "muted": MUTED, "grid": GRID},
        legend=legend_of_marks(said for said in sentences if not isinstance(said, str)),
        sentences=[("", said) if isinstance(said, str) else (MARKS[said.tone][0], said.sentence) for said in sentences],
        table=table,
        may_draw=may_draw,
    )


#: Looks of a picture's parts, which a page has from its style sheet.
_LOOKS = {
    'class="g"': f'stroke="{GRID}"',
    'class="l"': 'fill="none" stroke-width="1.6" stroke-linejoin="round"',
    'class="keys"': f'style="display:flex;flex-wrap:wrap;gap:.1rem .9rem;font-size:.75rem;color:{MUTED}"',
    'class="scale"': f'style="display:flex;align-items:center;gap:.4rem;font-size:.75rem;color:{MUTED}"',
    'class="maps"': 'style="display:flex;gap:.6rem;align-items:flex-end"',
    'class="when"': f'style="margin:0;font-size:.75rem;color:{MUTED}"',
    'class="cells"': 'style="font-size:.75rem;border-collapse:collapse;background:#ffffff"',
    '<td style="': '<td style="padding:.25rem .6rem;text-align:center;',
    '<th scope="': '<th style="padding:.25rem .6rem;font-weight:500" scope="',
    '<i style="background': '<i style="display:inline-block;width:8rem;height:.55rem;background',
}
#: Looks of the keys of lines: a stroke, unless another one is named; ``{}`` is its colour.
_STROKE = "border-top:2px solid {}"
_KEYS = {
    "dashed": "border-top:2px dashed {}",
    "control": "border-top:2px dashed {}",
    "dotted": "border-top:2px dotted {}",
    "faint": "border-top:1px solid {};opacity:.6",
    "dot": "box-sizing:border-box;width:.75em;height:.75em;border-radius:50%;background:{}",
    "band": "height:.7em;background:{};opacity:.3",
}
_COLOURS = {name: light for name, (light, _) in THEME.items()}
_COLOURS |= {"--matrix-plus": RUN_COLOURS[0], "--matrix-minus": RUN_COLOURS[1]}


def _resolved(picture: str) -> str:
    """Write colours and looks into a picture, for an output without the style sheet."""
    picture = re.sub(r'<text( class="name")?', _letters, picture)
    for part, look in _LOOKS.items():
        picture = picture.replace(part, look)
    picture = re.sub(r'<i class="(\w*)" style="--c:([^";]*)([^"]*)">', _key, picture)
    return re.sub(r"var\((--[\w-]+)\)", lambda found: _COLOURS.get(found[1], found[0]), picture)


def _key(found: re.Match[str]) -> str:
    look = _KEYS.get(found[1], _STROKE).format(found[2])
    return f'<i style="display:inline-block;width:1.1em;vertical-align:middle;margin-right:.4em;{look}{found[3]}">'


def _letters(found: re.Match[str]) -> str:
    return f'<text font-family="sans-serif" font-size="10" fill="{INK if found[1] else MUTED}"'
