"""Single figures of a run over training by name, at a size for papers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..measure.records import RunDir
from .pictures.saving import FORMATS, save_sized
from .run_history import read_runs
from .sections.chain import sections_over_training
from .sections.training_view import TrainingView

if TYPE_CHECKING:
    pass

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
        runs: the runs to show.
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
    key = NAMES.get(name, name)
    pictures = [p for section in sections_over_training(TrainingView(read_runs(runs))) for p in section.pictures]
    wanted = [picture for picture in pictures if picture.name == key]
    if not wanted:
        raise UsageError(_no_such(name, [picture.name for picture in pictures]))
    if len(wanted) > 1:
        raise UsageError(f"{name}: a figure of one run and probe each; give one run (it has {len(wanted)} here)")
    save_sized(wanted[0].drawing.figure, out, width=width, height=height, font_size=font_size)


def _no_such(name: str, there: Sequence[str]) -> str:
    names = list(dict.fromkeys([*(short for short, key in NAMES.items() if key in there), *there]))
    if not names:
        return f"{name}: the runs have no figures yet; they come with the first snapshot after birth"
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{name}: no such figure; {hint}there are: {', '.join(names)}"
