"""Random tokens that options ask for, as far as they can be measured and read."""

from __future__ import annotations

from ...errors import UsageError
from ...measure.config import SnapshotConfig


def check_probe(settings: SnapshotConfig, n_positions: int | None) -> None:
    """UsageError, by option, if the settings are impossible or a probe is longer than ``n_positions``; None: no end."""
    if problems := settings.problems():
        raise UsageError("; ".join(problem.replace("snapshot.", "--") for problem in problems))
    if n_positions is not None and settings.seq_len > n_positions:
        raise UsageError(
            f"--seq_len {settings.seq_len}: this model has {n_positions} positions; give at most {n_positions}"
        )
