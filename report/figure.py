"""One figure of a run over training by its name, at the size that a paper has room for."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..measure.records import RunDir
from .csv_files import LabelledArray
from .pictures.saving import FORMATS, save_sized
from .run_history import read_runs
from .sections.chain import fill_over_training
from .sections.section import Section
from .sections.training_view import TrainingView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    "loss": "loss-loss",
    "aggregation": "aggregation-discrepancy",
    "neurons": "neurons-count",
    "dominance": "dominance-ratio",
    "lock": "lock-cosine",
    "sink": "sink-mass",
    "direction": "direction-alignment",
    "contraction": "contraction-inter",
    "preference": "preference-ranks",
    "persistence": "persistence-correlation",
    "lineage": "lineage-z",
}
"""Short names of figures: the one of each section that says most. All others have the name of their CSV file."""


@dataclass(frozen=True)
class _Collected(Section):
    """A section that keeps its figures instead of making them part of a page."""

    figures: list[tuple[str, Figure]] = field(default_factory=list)
    """Name and figure, in the order of the page."""

    def add(
        self, figure: Figure, key: str, caption: str, numbers: Sequence[LabelledArray], index: int | None = None
    ) -> None:
        """Keep a figure."""
        self.figures.append((f"{self.id}-{key}", figure))

    @property
    def is_full(self) -> bool:
        """Every figure is wanted."""
        return False


def save_figure(
    runs: Sequence[RunDir],
    name: str,
    out: Path,
    *,
    width: float = 5.0,
    height: float | None = None,
    font_size: float | None = None,
) -> None:
    """Write one figure of ``runs`` to ``out``, whose ending decides the format; the same input gives the same bytes.

    Args:
        runs: what it shows.
        name: a section's (``sink``), or the one of a CSV file (``sink-map``).
        out: ends in .pdf, .svg or .png.
        width: inches.
        height: inches; by default as the page has it.
        font_size: points; by default 8.5.

    Raises:
        UsageError: there is no such figure, or it cannot be written so; the message lists those that there are.
        RunError: a file of a run is damaged; the message names it.
    """
    if out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out {out}: a figure is written as {', '.join(FORMATS)}")
    found = _figures(runs, NAMES.get(name, name))
    wanted = [figure for key, figure in found if key == NAMES.get(name, name)]
    if not wanted:
        raise UsageError(_no_such(name, [key for key, _ in found]))
    if len(wanted) > 1:
        raise UsageError(f"{name}: a figure of one run and probe each; give one run (it has {len(wanted)} here)")
    save_sized(wanted[0], out, width=width, height=height, font_size=font_size)


def _figures(runs: Sequence[RunDir], wanted: str) -> list[tuple[str, Figure]]:
    """Figures of the runs' page: of the section that has the wanted one, or of all where none has."""
    view = TrainingView(read_runs(runs))
    every: list[tuple[str, Figure]] = []
    for section in fill_over_training(view, _Collected, lambda id_: wanted.startswith(id_)):
        every += section.figures
    if any(name == wanted for name, _ in every):
        return every
    return [pair for section in fill_over_training(view, _Collected, lambda id_: True) for pair in section.figures]


def _no_such(name: str, there: Sequence[str]) -> str:
    names = list(dict.fromkeys([*(short for short, key in NAMES.items() if key in there), *there]))
    if not names:
        return f"{name}: the runs have no figures yet; they come with the first snapshot after birth"
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{name}: no such figure; {hint}there are: {', '.join(names)}"
