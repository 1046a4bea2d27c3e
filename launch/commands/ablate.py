"""`birthmark ablate`: run a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.by_name.shipped_configs import find_config
from ...trainer.config_parser import Parser
from ...urls import hide_credentials
from ..options import add_overrides, read_overrides, tell

if TYPE_CHECKING:
    from ...study.study_file import StudyRequest

SUMMARY = "Run a study: every arm from every seed, then one table and one figure."


def add_options(parser: Parser) -> None:
    """Add the options that name the study and select its runs."""
    parser.add_argument(
        "study",
        type=str,
        metavar="STUDY",
        help="YAML file of a study (docs/studies.md), or the name of one of `birthmark configs`.",
    )
    parser.add_argument("--scale", type=str | None, metavar="NAME", help="One of the file's scales: another base.")
    parser.add_argument("--out", type=str | None, metavar="DIR", help="By default studies/NAME or studies/NAME-SCALE.")
    parser.add_argument("--arms", type=str | None, metavar="A,B", help="These arms alone; by default all.")
    add_overrides(parser, "Change the base of every arm.")
    parser.add_argument(
        "--jobs",
        type=int | None,
        metavar="N",
        help="Runs at a time, by default 1; they share the cores. With an array: tasks at a time, by default all.",
    )
    parser.add_argument(
        "--retries", type=int, default=1, metavar="N", help="How often a run that failed is started again."
    )
    parser.add_argument(
        "--trial",
        type=str | None,
        metavar="NAME",
        help="This run of the study alone, by its name (ARM/seed-N) or its number from 0; the last to finish "
        "writes the tables.",
    )
    parser.add_argument(
        "--launcher",
        type=Literal["local", "slurm", "wandb"],
        default="local",
        help="Who starts the runs: this command; slurm, for which it writes an array (array.sbatch); or agents of W&B "
        "(sweep.yaml).",
    )
    parser.add_argument(
        "--sbatch",
        type=str,
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="Options of sbatch for each task of the array, as in gpus=1 time=2:00:00.",
    )
    parser.add_argument("--submit", action="store_true", help="Give the array to sbatch, too.")
    parser.add_argument("--summary", action="store_true", help="Run nothing: table and figure of the runs on disk.")


def run(options: Namespace) -> int:
    """Run the study here or hand it to a launcher; return 1 if one of its runs failed."""
    from ...study.study_file import SET_BY_STUDY, StudyRequest
    from ...study.table import run_study

    _check(options)
    request = StudyRequest(
        file=find_config(options.study, "study"),
        scale=options.scale,
        out=Path(options.out) if options.out else None,
        arms=None if options.arms is None else tuple(arm.strip() for arm in options.arms.split(",")),
        overrides=read_overrides(options["set"], SET_BY_STUDY, "the study sets it for every run, leave it out"),
        jobs=1 if options.jobs is None else options.jobs,
        summary=options.summary,
        trial=options.trial,
        retries=options.retries,
    )
    if options.launcher != "local":
        return _hand_over(options, request)
    failures = run_study(request)
    for failure in failures:
        tell(f"birthmark: error: {failure.trial.label}: {failure.reason} ({failure.trial.log})")
    return 1 if failures else 0


def _check(options: Namespace) -> None:
    """Raise UsageError for options that are impossible, alone or together."""
    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: give at least 1")
    if options.retries < 0:
        raise UsageError(f"--retries {options.retries}: give at least 0")
    if options.trial is not None and options.summary:
        raise UsageError(f"--trial {options.trial}: --summary runs nothing; leave one of them out")
    if options.launcher != "slurm" and (options.submit or options.sbatch):
        raise UsageError(
            f"{'--submit' if options.submit else '--sbatch'}: only --launcher slurm reads it; leave it out"
        )
    if options.launcher != "local" and (options.summary or options.trial is not None):
        which = "--summary" if options.summary else "--trial"
        raise UsageError(f"{which}: --launcher {options.launcher} hands over all runs; leave one of them out")
    if options.launcher == "wandb" and options.jobs is not None:
        raise UsageError(f"--jobs {options.jobs}: as many runs of a sweep go at a time as it has agents; leave it out")


def _hand_over(options: Namespace, request: StudyRequest) -> int:
    """Write the launcher's file, and print the next steps."""
    from ...study.table import plan_study
    from ..job_arrays import LAUNCHERS, Asked, make_grid

    asked = Asked(tuple(options.sbatch), options.submit)
    planned = plan_study(request)
    # Whoever runs them may stand in another folder.
    words = ["ablate", str(request.file.absolute()), f"--out={planned.out.absolute()}", f"--retries={options.retries}"]
    words += [f"--{name}={options[name]}" for name in ("scale", "arms") if options[name] is not None]
    words += ["--set", *map(hide_credentials, options["set"])] if options["set"] else []
    grid = make_grid(planned.name, planned.out, planned.trials, words, options.jobs)
    if not grid.missing:
        print(f"all {len(grid.trials)} runs are finished: the same command without --launcher writes the tables")
        return 0
    for line in LAUNCHERS[options.launcher](grid, asked):
        print(line)
    return 0
