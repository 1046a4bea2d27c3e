"""`birthmark ablate`: a study by the kind that its file says it is."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from pathlib import Path

from jsonargparse import Namespace
from rich.console import Console

from ..errors import UsageError
from .lineage_command import lineage
from .parsing import resolve
from .study import check_buildable, check_stored, common_flags, read_fields, read_study, trials
from .study_runs import Failure, run_trials
from .study_table import read_results, report_study


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


#: What is done with a study file by its ``kind``; a file without one has arms.
KINDS: dict[str, Callable[[Namespace], list[Failure]]] = {"arms": arms, "lineage": lineage}


def kind_of(file: Path) -> str:
    """The kind of a study file; UsageError if there is none of that name."""
    kind = read_fields(file).get("kind", "arms")
    if not isinstance(kind, str) or kind not in KINDS:
        close = difflib.get_close_matches(str(kind), KINDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(KINDS)}"
        raise UsageError(f"{file}: kind is {kind!r}: no such kind; {hint}")
    return kind


def ablate(parsed: Namespace) -> int:
    """Run the study in a file; the exit status."""
    if parsed.jobs < 1:
        raise UsageError(f"--jobs {parsed.jobs}: give at least 1")
    failures = KINDS[kind_of(Path(parsed.study))](parsed)
    for failure in failures:
        print(f"birthmark: error: {failure.trial.label}: {failure.reason} ({failure.trial.log})", file=sys.stderr)
    return 1 if failures else 0
