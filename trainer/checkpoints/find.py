"""Search for a run's checkpoint by its step."""

from __future__ import annotations

from pathlib import Path

from ...errors import UsageError
from ...measure.records import RunDir


def find_checkpoint(run: RunDir, step: int | None) -> Path:
    """Find the checkpoint after ``step`` steps, by default the last; UsageError names the existing ones."""
    there = run.checkpoints_by_step()
    if not there:
        raise UsageError(f"{run.path}: has no checkpoint yet")
    if step is None:
        return there[max(there)]
    if step not in there:
        raise UsageError(f"--step {step}: {run.path} has checkpoints of steps {', '.join(map(str, there))}")
    return there[step]
