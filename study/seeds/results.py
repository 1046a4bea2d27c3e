"""Results of a study of seeds: a figure of every run, and the sources of its variance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...measure.records import metrics_by_step
from ...report.rows import join_rows
from ...report.text import finite_or_nan
from ..trials import Trial
from .file import SeedsStudy
from .seed_shares import Shares, variance_shares
from .trials import data_arm

FIGURES = {
    "val_loss": ("final loss", ("val_loss",)),
    "trigger_loss": ("trigger loss", ("val_loss_trigger",)),
    "sink_mass": ("sink mass", ("text_sink_mass", "sink_mass")),
    "alignment": ("alignment", ("alignment",)),
    "overlap_10": ("top-10 overlap", ("overlap_10",)),
    "rank_persistence": ("preference ρ", ("rank_persistence",)),
}
"""Figure → its words, and the scalars of a row (report/rows.py) at the end of a run, of which the first that is there
counts."""


@dataclass(frozen=True)
class SeedsResult:
    """A figure of all runs."""

    name: str
    """Name in `FIGURES`."""
    values_NM: np.ndarray
    """``[births, orders]``; NaN where a run is not finished or does not have it."""
    shares: Shares | None
    """None where a run is missing, or all are the same."""

    @property
    def words(self) -> str:
        """Name of the figure in words."""
        return FIGURES[self.name][0]

    @property
    def n_runs(self) -> int:
        """Runs that have it."""
        return int(np.isfinite(self.values_NM).sum())


def read_seeds_results(study: SeedsStudy, trials: Sequence[Trial]) -> list[SeedsResult]:
    """Read every figure that a finished run has, in the order of `FIGURES`.

    Raises:
        RunError: a file of a run is damaged; the message names it.
    """
    ends = {(t.seed, t.arm): _end(t) for t in trials if t.finished}
    results = []
    for name, (_, keys) in FIGURES.items():
        values = np.array(
            [
                [_first(ends.get((init, data_arm(data)), {}), keys) for data in study.data_seeds]
                for init in study.init_seeds
            ]
        )
        if np.isfinite(values).any():
            whole = np.isfinite(values).all()
            results.append(SeedsResult(name, values, variance_shares(values) if whole else None))
    return results


def _end(trial: Trial) -> dict[str, object]:
    rows = join_rows(trial.run.snapshots(), metrics_by_step(trial.run))
    return rows[-1] if rows else {}


def _first(row: dict[str, object], keys: Sequence[str]) -> float:
    return next((value for key in keys if np.isfinite(value := finite_or_nan(row.get(key)))), float("nan"))
