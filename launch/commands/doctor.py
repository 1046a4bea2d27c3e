"""`birthmark doctor`: what there is on this machine, and whether a run would start."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from jsonargparse import Namespace

from ...trainer.config_file import read_config
from ...trainer.config_parser import Parser
from ..options import add_config, add_json, read_overrides

SUMMARY = (
    "Show what a run finds on this machine (libraries, devices, launchers, disk, W&B), and whether it would start."
)

_MARKS = {"ok": "[green]ok[/green]  ", "note": "[yellow]note[/yellow]", "stop": "[red]stop[/red]"}


def add_options(parser: Parser) -> None:
    """Add the options that name the run in question."""
    add_config(parser, by_default="demo")
    add_json(parser)


def run(options: Namespace) -> int:
    """Examine this machine, and print one line for each finding; return 0 if a run would start, else 1."""
    from rich.console import Console
    from rich.markup import escape

    from ...api.run import in_its_folder
    from ...report.terminal import print_json
    from ..readiness import examine, would_run

    overrides = read_overrides(options["set"])
    config = read_config(options.config, overrides)
    config = in_its_folder(config, Path(options.config).stem)
    findings = list(examine(config))
    stops = [finding for finding in findings if finding.state == "stop"]
    plan = None if stops else would_run(config, options.config, overrides)
    if options.json:
        print_json(
            {
                "config": options.config,
                "starts": not stops,
                "run": plan,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
        return 1 if stops else 0
    console = Console()
    say = partial(console.print, highlight=False, soft_wrap=True)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mend = f"  → {finding.mend}" if finding.mend else ""
        say(f"{_MARKS[finding.state]}  {escape(f'{finding.name:{width}}  {finding.text}{mend}')}")
    if plan is None:
        say(f"{options.config} would not start: {stops[0].name}: {stops[0].mend}", markup=False)
        return 1
    processes = f"{plan['processes']} process{'es' if plan['processes'] > 1 else ''}"
    say(
        f"{options.config} would start: {processes} on {plan['device']}, strategy {plan['strategy']}, "
        f"{plan['precision']}: {plan['command']}",
        markup=False,
    )
    return 0
