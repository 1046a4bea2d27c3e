"""Starts of a trial that failed, kept beside its folder: the table tells of them, whichever process made them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import RunError
from ..trials import Trial

#: Exit status of a wrong request, which another try would not mend.
WRONG_REQUEST = 2


class Failed(NamedTuple):
    """A start of a trial that did not come to its last step."""

    status: int
    """Exit status of its process; below 0, the signal that killed it."""
    reason: str
    """The last line of its output."""


def tries_file(trial: Trial) -> Path:
    """Where a trial's failed starts stand: a line of JSON for each, beside its folder."""
    return trial.run.path.with_suffix(".failed.jsonl")


def add_failure(trial: Trial, failed: Failed) -> None:
    """Keep a failed start; the caller has claimed the trial."""
    line = json.dumps(failed._asdict(), ensure_ascii=False) + "\n"
    with tries_file(trial).open("a", encoding="utf-8") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def failures_of(trial: Trial) -> list[Failed]:
    """A trial's failed starts, the first first.

    Raises:
        RunError: the file is damaged; it names file and line.
    """
    file, found = tries_file(trial), []
    if not file.is_file():
        return []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            content = json.loads(line)
            found.append(Failed(int(content["status"]), str(content["reason"])))
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{file}: line {number} is damaged; delete the line") from None
    return found


def told(trials: Sequence[Trial]) -> str:
    """Which runs failed how often, and how it ended, as a sentence for tables and pages; "" where none did."""
    parts = []
    for trial in {trial.label: trial for trial in trials}.values():
        if failed := failures_of(trial):
            times = "once" if len(failed) == 1 else f"{len(failed)} times"
            end = "then finished" if trial.finished else "not finished"
            parts.append(f"{trial.label} {times}, {end} (last: {failed[-1].reason})")
    return f"Failed starts: {'; '.join(parts)}." if parts else ""
