"""Running a study of arms: its runs, then their results side by side."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console

from ...errors import UsageError
from ...trainer.config_file import resolve
from ..runner import Failure, run_trials
from ..trials import check_buildable, check_stored, common_flags
from .file import read_study
from .results import read_results
from .table import report_study
from .trials import trials


def arms(parsed: Namespace) -> list[Failure]:
    """Run every arm from every seed, and lay the arms side by side; runs that failed."""
    study = read_study(Path(parsed.study)).at(parsed.scale)
    if parsed.arms is not None:
        study = study.only([arm.strip() for arm in parsed.arms.split(",")])
    out = Path(parsed.out or f"studies/{study.name}")
    planned = trials(study, out, resolve, common_flags(parsed["set"]))
    for trial in planned:
        check_stored(trial)
    console = Console()
    failures: list[Failure] = []
    if not parsed.summary:
        check_buildable(planned)
        failures = run_trials(planned, parsed.jobs, console)
    results = read_results(study, planned)
    if results:
        report_study(study, results, out, console)
    elif parsed.summary:
        raise UsageError(f"{out}: no run of {study.file} in it yet")
    return failures
