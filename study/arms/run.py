"""Execution of a study of arms: its runs, then their results side by side."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from ..outputs import Outputs, end_study
from ..request import StudyRequest
from ..runner import Failure, leaves_results, run_as_asked
from ..trials import Planned
from .arms_page import arms_page
from .ends_compared import write_comparison
from .figure import draw_study
from .file import ArmStudy, read_arm_study
from .results import read_results
from .table import markdown, print_results, write_csv
from .trials import arm_trials


def _read(request: StudyRequest) -> ArmStudy:
    study = read_arm_study(request.file).at(request.scale)
    return study if request.arms is None else study.only(request.arms)


def plan_arms(request: StudyRequest) -> Planned:
    """Plan the runs of the study, seed by seed."""
    study = _read(request)
    out = request.folder(study.name)
    return Planned(study.name, out, arm_trials(study, out, request.overrides_in(out)))


def run_arms(request: StudyRequest) -> list[Failure]:
    """Run every arm from every seed, and lay the arms side by side.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or an arm is impossible, or a folder holds another run; found before any run.
    """
    study, (_, out, trials) = _read(request), plan_arms(request)
    console = Console()
    failures = run_as_asked(request, out, trials, console)
    if leaves_results(request, trials):
        return failures
    results = read_results(study, trials)
    outputs = Outputs(
        show=partial(print_results, study, results),
        table=partial(markdown, study, results),
        write_csv=partial(write_csv, results),
        draw=partial(draw_study, study, results),
        page=partial(arms_page, study, results, trials, out),
        write_more=partial(write_comparison, study, trials, out),
    )
    end_study(request, out, trials, console, outputs if results else None, "run")
    return failures
