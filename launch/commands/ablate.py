"""`birthmark ablate`: run a study."""

from __future__ import annotations

import sys
from pathlib import Path

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.by_name.shipped_configs import find_config
from ...trainer.config_parser import Parser
from ..overrides import add_overrides, read_overrides

SUMMARY = "Run a study: every arm from every seed, then one table and one figure."


def add_options(parser: Parser) -> None:
    """The study, and what of it to run."""
    parser.add_argument(
        "study",
        type=str,
        metavar="STUDY",
        help="YAML file of a study: of arms, lineage or robustness (docs/studies.md); or one of `birthmark configs`.",
    )
    parser.add_argument("--scale", type=str | None, metavar="NAME", help="One of the file's scales: another base.")
    parser.add_argument("--out", type=str | None, metavar="DIR", help="By default studies/NAME or studies/NAME-SCALE.")
    parser.add_argument("--arms", type=str | None, metavar="A,B", help="These arms alone; by default all.")
    add_overrides(parser, "Change the base of every arm.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Runs at a time; they share the cores.")
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
    parser.add_argument("--summary", action="store_true", help="Run nothing: table and figure of the runs on disk.")


def run(options: Namespace) -> int:
    """Run the study; 1 if a run of it failed."""
    from ...study.kinds import run_study
    from ...study.reading import SET_BY_STUDY
    from ...study.request import StudyRequest

    if options.jobs < 1:
        raise UsageError(f"--jobs {options.jobs}: give at least 1")
    if options.retries < 0:
        raise UsageError(f"--retries {options.retries}: give at least 0")
    if options.trial is not None and options.summary:
        raise UsageError(f"--trial {options.trial}: --summary runs nothing; leave one of them out")
    request = StudyRequest(
        file=find_config(options.study, "study"),
        scale=options.scale,
        out=Path(options.out) if options.out else None,
        arms=None if options.arms is None else tuple(arm.strip() for arm in options.arms.split(",")),
        overrides=read_overrides(options["set"], SET_BY_STUDY, "the study sets it for every run, leave it out"),
        jobs=options.jobs,
        summary=options.summary,
        trial=options.trial,
        retries=options.retries,
    )
    failures = run_study(request)
    for failure in failures:
        print(f"birthmark: error: {failure.trial.label}: {failure.reason} ({failure.trial.log})", file=sys.stderr)
    return 1 if failures else 0
