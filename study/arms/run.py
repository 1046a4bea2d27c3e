"""Running a study of arms: its runs, then their results side by side."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from ...errors import UsageError
from ..outputs import write_outputs
from ..request import StudyRequest
from ..runner import Failure, leaves_results, run_as_asked
from ..taking.claims import alone
from ..taking.tries import told
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
    """The runs of the study, seed by seed."""
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
    if results:
        print_results(study, results, console)
        with alone(out):
            write_outputs(
                out,
                markdown(study, results),
                partial(write_csv, results),
                partial(draw_study, study, results),
                arms_page(study, results, trials, out),
                console,
                told(trials),
            )
            write_comparison(study, trials, out, console)
    elif request.summary:
        raise UsageError(f"{out}: no run of {study.file} in it yet")
    return failures
