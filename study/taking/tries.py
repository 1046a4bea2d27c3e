"""Failed starts of a trial, kept beside its folder and reported in the table, for any process that made them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from ...errors import RunError
from ...files import parse_json, read_text, write_text
from ...schema import SchemaError, checked
from ..trials import Trial

#: Exit status of a wrong request, which another try would not mend.
WRONG_REQUEST = 2


class Failed(NamedTuple):
    """A start of a trial that did not reach its last step."""

    status: int
    """Exit status of its process; below 0, the signal that killed it."""
    reason: str
    """The last line of its output."""


class _Line(TypedDict):
    """A line of the file."""

    status: int
    reason: str


def tries_file(trial: Trial) -> Path:
    """Return the file of a trial's failed starts: a line of JSON for each, beside its folder."""
    return trial.run.path.with_suffix(".failed.jsonl")


def add_failure(trial: Trial, failed: Failed) -> None:
    """Record a failed start; the caller has claimed the trial."""
    failures = [*failures_of(trial), failed]
    write_text(tries_file(trial), "".join(json.dumps(one._asdict()) + "\n" for one in failures))


def failures_of(trial: Trial) -> list[Failed]:
    """Read a trial's failed starts, the oldest first.

    Raises:
        RunError: the file is damaged; the message names file and line.
    """
    file, found = tries_file(trial), []
    if not file.exists():
        return []
    for number, line in enumerate(read_text(file).rstrip("\n").split("\n"), start=1):
        try:
            found.append(Failed(**checked(parse_json(line), _Line)))
        except (SchemaError, ValueError) as error:
            raise RunError(f"{file}: line {number} is damaged ({error}); delete the line") from None
    return found


def told(trials: Sequence[Trial]) -> str:
    """List in a sentence, for tables and pages, the runs that failed, how often and with which outcome; "" if
    none did.
    """
    parts = []
    for trial in {trial.label: trial for trial in trials}.values():
        if failed := failures_of(trial):
            times = "once" if len(failed) == 1 else f"{len(failed)} times"
            end = "then finished" if trial.finished else "not finished"
            parts.append(f"{trial.label} {times}, {end} (last: {failed[-1].reason})")
    return f"Failed starts: {'; '.join(parts)}." if parts else ""
