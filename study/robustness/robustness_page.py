"""Page of a study of robustness: the answer, z after every change, and success of each test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from ...report.charts.chart_page import Block, Heading, Panels, Prose, Table, render_page
from ...report.charts.specs import MatrixPanel
from ...report.pictures.fingerprints import FULL_Z, PALE_Z
from ..lineage.outcomes import describe_test
from .file import RobustnessStudy
from .rates import change_rates
from .results import ChangedTest
from .table import EXPLAINED, INDEPENDENCE, TITLES, notes_of, outcome, rows_of

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
        blocks.append(Table(TITLES, _rows(results, test), texts=range(len(TITLES))))
        blocks += [Prose(f"{note}.", note=True) for note in notes_of(results, test)]
    blocks += [Prose(EXPLAINED, note=True), Prose(INDEPENDENCE, note=True)]
    return render_page(study.name, blocks, about="Birthmark study of robustness")


def _rows(results: Sequence[ChangedTest], test: str) -> list[list[str | Markup]]:
    """Stack rates over z: side by side they are wider than a page."""
    return [
        [name, *(Markup("<br>").join(cell.split(", ", 1)) for cell in cells)] for name, *cells in rows_of(results, test)
    ]


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
