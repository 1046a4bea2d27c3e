"""Runs and snapshots as HTML fragments for a notebook: a table and the main pictures, with nothing to fetch.

A fragment has its own colours and fonts, and a light background: a notebook has neither the page's style sheet nor a
known theme.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from markupsafe import Markup

from ..findings.history import Start
from ..measure.model_pairs import Compared
from ..measure.records import RunDir, Snapshot
from .compared_models import compared_sentence
from .html_page import render
from .pictures.saving import later
from .pictures.several_models import draw_model_matrices
from .pictures.style import GRID, INK, MUTED
from .run_history import RunHistory, read_runs
from .sections.declared import Link
from .sections.preference import PERSISTENCE, PREFERENCE
from .sections.section import Picture, Section
from .sections.seed_mark import DIRECTION
from .sections.sink import SINK
from .sections.snapshot_view import SnapshotView
from .sections.training import LOSS
from .sections.training_view import TrainingView
from .sections.value_aggregation import AGGREGATION
from .snapshot_table import table_columns
from .text import format_value, step_in_words, without_shared_folder
from .verdicts import (
    MARKS,
    KeyFigure,
    Verdict,
    legend_of_marks,
    of_run,
    of_snapshot,
    snapshot_verdicts,
    verdicts,
)

#: Sections whose first picture represents a run, and a snapshot.
_OF_RUN = (LOSS, SINK, DIRECTION, PERSISTENCE)
_OF_SNAPSHOT = (AGGREGATION, SINK, DIRECTION, PREFERENCE)

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
        of_run(history),
        _first_pictures(_OF_RUN, section, history.start) if history.snapshots or history.metrics else [],
        sentences=[verdict for verdict in verdicts(history) if verdict.headline],
        columns=table_columns(history.rows, view.quantities),
        rows=history.rows,
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

    title = " · ".join(filter(None, [name, step_in_words(snapshot.step, history.start)]))
    pictures = _first_pictures(_OF_SNAPSHOT, section, history.start)
    return _render(title, of_snapshot(snapshot), pictures, sentences=snapshot_verdicts(history))


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
    pictures = []
    if importlib.util.find_spec("matplotlib") is not None:
        drawing = later(draw_model_matrices, names, cka_AA, kl_AA)
        pictures.append(
            Picture(drawing, "models", "CKA of the last states; KL(row ‖ column) in nats per token", "models.csv", [])
        )
    sentence = compared_sentence(compared)
    return _render("Between models", strip, pictures, sentences=[sentence] if sentence else [])


def object_html(
    title: str,
    sentences: Sequence[Verdict | str],
    figures: Sequence[KeyFigure],
    table: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ()),
    pictures: Sequence[Picture] = (),
) -> str:
    """Render any object: its sentences, few figures, a table and pictures; pictures only where matplotlib is there."""
    drawn = pictures if importlib.util.find_spec("matplotlib") is not None else []
    headings, cells = table
    return _render(title, figures, drawn, sentences=sentences, headings=headings, cells=cells, may_draw=bool(pictures))


def snapshots_html(run: RunDir) -> str:
    """Render the snapshots of a run: sentences and a row for each.

    Raises:
        RunError: a file of the run is damaged; the message names it.
    """
    (history,) = read_runs([run])
    found = [verdict for verdict in verdicts(history) if verdict.headline]
    columns = table_columns(history.rows, TrainingView([history]).quantities)
    title = f"Snapshots of {history.name}"
    return _render(title, [], [], sentences=found, columns=columns, rows=history.rows, may_draw=False)


def _first_pictures(links: Iterable[Link], fill: Any, start: Start) -> list[Picture]:
    """Return the first picture of each link that has one; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    found = []
    for link in links:
        section = Section(link.id, link.title, "")
        fill(link, section)
        found += section.in_words_of(start).pictures[:1]
    return found


def _render(
    title: str,
    figures: Sequence[KeyFigure],
    pictures: Sequence[Picture],
    *,
    sentences: Sequence[Verdict | str] = (),
    **table: Any,
) -> str:
    shown = [(Markup(_resolved(picture.svg)), picture.caption) for picture in pictures]
    page = render(
        "notebook.html.j2",
        title=title,
        strip=figures,
        pictures=shown,
        colours={"ink": INK, "muted": MUTED, "grid": GRID},
        legend=legend_of_marks(said for said in sentences if not isinstance(said, str)),
        sentences=[("", said) if isinstance(said, str) else (MARKS[said.tone][0], said.sentence) for said in sentences],
        **{"columns": [], "rows": [], "headings": [], "cells": [], "may_draw": True, **table},
    )
    # Ids of a notebook's outputs share one page.
    digest = hashlib.sha256(page.encode()).hexdigest()[:8]
    return re.sub(r'((?:\bid="|href="#|url\(#))', rf"\g<1>bm{digest}-", page)


def _resolved(svg: str) -> str:
    """Replace the style sheet's variables in a picture by plain colours and fonts."""
    plain = re.sub(r"var\(--[\w-]+,(#[0-9a-f]{6})\)", r"\1", svg)
    return plain.replace("var(--sans)", "sans-serif").replace("var(--mono)", "monospace")
