"""Execution of a study of lineage: its runs, the runs that continue them, then every test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rich.console import Console

from ...report.terminal import bar
from ..outputs import Outputs, end_study
from ..request import StudyRequest
from ..runner import Failure, run_as_asked, run_trials
from ..trials import Planned, check_stored
from .figure import draw_lineage
from .file import read_lineage_study
from .lineage_page import lineage_page
from .pairs import study_models
from .results import compare_pairs, tests_by_probe
from .table import markdown, print_summary, write_csv
from .trials import lineage_trials


def plan_lineage(request: StudyRequest) -> Planned:
    """Plan the runs that others continue."""
    request.refuse_arms("lineage")
    study = read_lineage_study(request.file).at(request.scale)
    out = request.folder(study.name)
    return Planned(study.name, out, lineage_trials(study, out, request.overrides_in(out)).bases)


def run_lineage(request: StudyRequest) -> list[Failure]:
    """Bring every run to its last step, test all pairs of models, and write tables and pictures.

    Returns:
        The runs that failed.

    Raises:
        UsageError: the request, the file or a run is impossible, or a folder holds another run; found before any run.
    """
    request.refuse_arms("lineage")
    study = read_lineage_study(request.file).at(request.scale)
    out = request.folder(study.name)
    trials = lineage_trials(study, out, request.overrides_in(out))
    console = Console()
    failures = run_as_asked(request, out, trials.bases, console)
    if request.trial is not None:
        return failures  # one base; what builds on the bases is left to a call for all
    if not request.summary:
        ready = trials.ready()
        for trial in ready:
            check_stored(trial)
        failures += run_trials(ready, request.jobs, console, out, retries=request.retries)
    study, models = trials.study, study_models(trials)
    outputs = None
    if models:
        with bar("hidden states", len(models) * len(tests_by_probe(study)), quiet=False) as advance:
            results = compare_pairs(study, models, Path(trials.bases[0].config.data.cache_dir), advance)
        outputs = Outputs(
            show=partial(print_summary, study, results),
            table=partial(markdown, study, results),
            write_csv=partial(write_csv, study, results),
            draw=partial(draw_lineage, study, results),
            page=partial(lineage_page, study, results),
        )
    end_study(request, out, [*trials.bases, *trials.continued], console, outputs, "run")
    return failures
