"""The page of a study of seeds: sources of each figure's variance, in sentences, a table, and every run."""

from __future__ import annotations

from collections.abc import Sequence

from ...report.charts.chart_page import Block, Fold, Heading, Prose, Table, render_page
from ..taking.tries import told
from ..trials import Trial
from .file import SeedsStudy
from .results import SeedsResult
from .table import EXPLAINED, TITLES, grid_of, outcome, rows_of


def seeds_page(study: SeedsStudy, results: Sequence[SeedsResult], trials: Sequence[Trial]) -> str:
    """Render the page; it fetches nothing."""
    blocks: list[Block] = [*(Prose(sentence) for sentence in outcome(results))]
    blocks += [Heading("shares", "Whose doing is the variance?"), Table(TITLES, rows_of(results))]
    blocks += [Prose(note, note=True) for note in (EXPLAINED, told(trials)) if note]
    blocks.append(Heading("runs", "Every run"))
    blocks += [Fold(result.words, [Table(*grid_of(study, result))]) for result in results]
    return render_page(study.name, blocks, about="Birthmark study of seeds")
