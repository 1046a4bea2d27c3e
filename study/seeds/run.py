"""Running a study of seeds: its runs, then whose doing their differences are."""

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
from .figure import draw_seeds
from .file import SeedsStudy, read_seeds_study
from .results import read_seeds_results
from .seeds_page import seeds_page
from .table import markdown, print_results, write_csv
from .trials import seeds_trials


def _read(request: StudyRequest) -> SeedsStudy:
    request.refuse_arms("seeds")
    return read_seeds_study(request.file).at(request.scale)


def plan_seeds(request: StudyRequest) -> Planned:
    """The runs of the study."""
    study = _read(request)
    out = request.folder(study.name)
    return Planned(study.name, out, seeds_trials(study, out, request.overrides_in(out)))


def run_seeds(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, and write what the seeds decide.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or the base is impossible, or a folder holds another run; found before any
            run.
    """
    study, (_, out, trials) = _read(request), plan_seeds(request)
    console = Console()
    failures = run_as_asked(request, out, trials, console)
    if leaves_results(request, trials):
        return failures
    results = read_seeds_results(study, trials)
    if results:
        print_results(results, console)
        with alone(out):
            write_outputs(
                out,
                markdown(study, results),
                partial(write_csv, study, results),
                partial(draw_seeds, study, results),
                seeds_page(study, results, trials),
                console,
                told(trials),
            )
    elif request.summary:
        raise UsageError(f"{out}: no finished run of {study.file} in it yet")
    return failures
