"""Execution of a study of seeds: its runs, then the sources of their differences."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from ..outputs import Outputs, end_study
from ..request import StudyRequest
from ..runner import Failure, leaves_results, run_as_asked
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
    """Plan the runs of the study."""
    study = _read(request)
    out = request.folder(study.name)
    return Planned(study.name, out, seeds_trials(study, out, request.overrides_in(out)))


def run_seeds(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, and write the shares of the seeds.

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
    outputs = Outputs(
        show=partial(print_results, results),
        table=partial(markdown, study, results),
        write_csv=partial(write_csv, study, results),
        draw=partial(draw_seeds, study, results),
        page=partial(seeds_page, study, results, trials),
    )
    end_study(request, out, trials, console, outputs if results else None, "finished run")
    return failures
