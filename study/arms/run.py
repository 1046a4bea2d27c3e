"""Running a study of arms: its runs, then their results and their last models side by side."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from ...errors import RunError, UsageError
from ...files import read_json
from ...report.compared_models import as_json, write_folder
from ...report.terminal import bar, say
from ...trainer.by_name.comparison import Comparer
from ...trainer.by_name.loaded_model import load_named
from ..runner import Failure, Outputs, end_study, leaves_results, run_as_asked, study_console
from ..study_file import StudyRequest
from ..trials import Planned, Trial
from .figure import draw_study
from .page import arms_page, markdown, print_results, write_csv
from .results import read_results
from .trials import ArmStudy, arm_trials, read_arm_study

#: Sequences whose states CKA compares at a time.
_MINIBATCH = 256


def write_comparison(study: ArmStudy, trials: Sequence[Trial], out: Path, console: Console) -> None:
    """Compare the last checkpoints of all runs that are finished, and write ``out/compare``.

    Every model is shown the probe of the study's snapshots: random tokens, or with ``compare: text`` the validation
    text of the first run. Nothing is done again where the checkpoints are those of last time.

    Raises:
        UsageError: ``compare`` stands in the file, and two arms cannot read the same tokens.
    """
    # Arms of one config share their runs.
    ends = {trial.label: trial for trial in trials if trial.finished}
    if study.compare is None or len(ends) < 2:
        return
    settings = next(iter(ends.values())).config.snapshot
    probe: dict[str, Any] = {"kind": study.compare, "n_sequences": settings.n_sequences, "seq_len": settings.seq_len}
    probe |= {"probe_seed": settings.probe_seed, "checkpoints": {label: trial.step for label, trial in ends.items()}}
    folder = out / "compare"
    # A missing or damaged comparison is made again.
    with contextlib.suppress(RunError):
        if read_json(folder / "compare.json", dict[str, Any]).get("probe") == probe:
            return
    comparer = Comparer(
        settings,
        settings.seq_len,
        _MINIBATCH,
        text=study.compare == "text",
        open_model=lambda label: replace(load_named(f"{ends[label].run.path}@{ends[label].step}"), trained_here=True),
    )
    try:
        with bar("comparing", len(ends) + 1, quiet=False) as advance:
            found = [comparer.compared(list(ends), advance=advance)]
    except UsageError as error:
        raise UsageError(f"{study.file}: compare is {study.compare}: {error}") from None
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, found, as_json(found, probe), None)
    files = " ".join(sorted(file.name for file in folder.iterdir()))
    say(console, f"{folder}: {files}")


# ---------------------------------------------------------------- execution of a study of arms
# Its runs, then their results side by side.


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
    console = study_console(out)
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
