"""`birthmark configs`: the runs, models and studies that come with the package."""

from __future__ import annotations

from jsonargparse import Namespace

from ...trainer.by_name.shipped_configs import shipped_configs
from ...trainer.config_parser import Parser
from ..options import add_json

SUMMARY = "List the configs of runs, models and studies that come with the package; they are found by name."


def add_options(parser: Parser) -> None:
    """Add the option that prints JSON in place of text."""
    add_json(parser)


def run(options: Namespace) -> int:
    """Print one line for each of them."""
    from ...report.terminal import print_json

    configs = shipped_configs()
    if options.json:
        print_json(
            [{"name": c.name, "kind": c.kind, "summary": c.summary, "file": str(c.file)} for c in configs],
        )
        return 0
    width = max(len(config.name) for config in configs)
    for config in configs:
        print(f"{config.name:{width}}  {config.summary}")
    return 0
