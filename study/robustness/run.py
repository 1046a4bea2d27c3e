"""Execution of a study of robustness: its runs, then every change of them with its tests."""

from __future__ import annotations

from functools import partial

from rich.console import Console

from ...report.terminal import bar
from ..outputs import Outputs, end_study
from ..request import StudyRequest
from ..runner import Failure, run_as_asked
from ..trials import Planned
from .bases import Base, text_of
from .figure import draw_robustness
from .file import read_robustness_study
from .results import compare_changed
from .robustness_page import robustness_page
from .table import markdown, print_tables, write_csv
from .trials import robustness_trials

#: Fewer have no stranger beside the model that is changed and the one that is merged in.
_FEWEST = 3


def plan_robustness(request: StudyRequest) -> Planned:
    """Plan the runs that are changed."""
    request.refuse_arms("robustness")
    study = read_robustness_study(request.file).at(request.scale)
    out = request.folder(study.name)
    return Planned(study.name, out, robustness_trials(study, out, request.overrides_in(out)).bases)


def run_robustness(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, change each of them in every way, and write tables and pictures.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or a run is impossible, or a folder holds another run; found before any run.
        RunError: a change cannot be trained.
    """
    request.refuse_arms("robustness")
    study = read_robustness_study(request.file).at(request.scale)
    out = request.folder(study.name)
    trials = robustness_trials(study, out, request.overrides_in(out))
    study = trials.study
    console = Console()
    failures = run_as_asked(request, out, trials.bases, console)
    if request.trial is not None:
        return failures  # one base; what is done to the bases is left to a call for all
    outputs = None
    bases = [Base(trial) for trial in trials.bases if trial.finished]
    if len(bases) >= _FEWEST:
        n_models = len(bases) * (1 + len(study.changes))
        with bar("changed models", n_models, quiet=False) as advance:
            results = compare_changed(study, bases, text_of(bases[0].trial), out, advance, only_read=request.summary)
        if results:
            outputs = Outputs(
                show=partial(print_tables, study, results),
                table=partial(markdown, study, results),
                write_csv=partial(write_csv, results),
                draw=partial(draw_robustness, study, results),
                page=partial(robustness_page, study, results),
            )
    end_study(request, out, trials.bases, console, outputs, "changed model")
    return failures
