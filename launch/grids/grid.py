"""The runs of a study, for a launcher outside this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...study.trials import Trial, each_once


@dataclass(frozen=True)
class Grid:
    """The study as a launcher gets it."""

    name: str
    """The study's."""
    out: Path
    """Folder of the study."""
    trials: Sequence[Trial]
    """The runs, each once: the index of a run is its number."""
    words: Sequence[str]
    """`birthmark ablate` of this study, without ``birthmark``; with ``--trial`` it makes one run. Its paths hold in any
    folder."""
    jobs: int | None
    """Runs at a time; None: any number."""

    @property
    def missing(self) -> list[int]:
        """Numbers of the runs that are not finished."""
        return [number for number, trial in enumerate(self.trials) if not trial.finished]


def make_grid(name: str, out: Path, trials: Sequence[Trial], words: Sequence[str], jobs: int | None) -> Grid:
    """See `Grid`; trials that share a run count once."""
    return Grid(name, out, each_once(trials), words, jobs)
