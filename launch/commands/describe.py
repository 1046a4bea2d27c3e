"""`birthmark describe`: what a model is made of."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import Namespace

from ...trainer.config_file import read_config
from ...trainer.config_parser import Parser
from ..options import add_config, add_json

SUMMARY = "Show what a model is made of, without allocating it."


def add_options(parser: Parser) -> None:
    """The config."""
    add_config(parser)
    add_json(parser)


def run(options: Namespace) -> int:
    """Describe the model of a config."""
    from rich.console import Console

    from ...plan.describe import describe, print_description
    from ...report.terminal import print_json

    description = describe(read_config(Path(options.config)).model)
    if options.json:
        print_json(description)
    else:
        print_description(description, Console())
    return 0
