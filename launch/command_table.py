"""The commands by name, and their parsers: one is built for the command that runs, none for the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from jsonargparse import Namespace

from .. import __version__
from ..trainer.config_parser import Parser
from .command_line import arrange

#: In the order of ``birthmark --help``. Each is a module in `commands`, and is named as the module is.
COMMANDS = (
    "demo",
    "tokenise",
    "pretrain",
    "adapt",
    "launch",
    "data",
    "report",
    "figure",
    "describe",
    "plan",
    "birth",
    "sample",
    "export",
    "ablate",
    "fingerprint",
    "identify",
    "audit",
    "certify",
    "verify",
    "snapshot",
    "compare",
    "intervene",
    "length",
    "quantise",
    "configs",
    "doctor",
    "completion",
)


class Command(Protocol):
    """Interface of a module in `commands`.

    It imports frameworks inside `run` only, so that help and completion are quick. A module may also have
    ``expand(arguments) -> arguments``, which rewrites the words of the command line, arranged, before they are parsed.
    """

    SUMMARY: str
    """Summary for the help, one sentence."""

    def add_options(self, parser: Parser) -> None:
        """Add the command's options to ``parser``, which has --debug already."""

    def run(self, options: Namespace) -> int:
        """Run the command; return the exit status.

        Raises:
            UsageError: an option is impossible.
            RunError: the command failed on the way.
        """


def load_command(name: str) -> Command:
    """Import a command's module."""
    return cast(Command, import_module(f".commands.{name}", __package__))


@cache
def command_parser(name: str) -> Parser:
    """Return the parser of one command's options, built once per process: that of a run's fields takes .2 s."""
    command = load_command(name)
    parser = Parser(prog=f"birthmark {name}", description=command.SUMMARY)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")
    command.add_options(parser)
    return parser


def parse_command(name: str, words: Sequence[str]) -> Namespace:
    """Parse the words after a command's name.

    Args:
        name: the command.
        words: the words, with underscores in options (`normal_dashes`).

    Raises:
        UsageError: an unknown option, a name too many or too few, a value of another type; the message repeats it.
    """
    parser = command_parser(name)
    arranged = arrange(parser, words)
    if expand := getattr(load_command(name), "expand", None):
        arranged = expand(arranged)
    found: Namespace = parser.parse_args(arranged)
    return found


def top_parser() -> Parser:
    """Return the parser of ``birthmark`` itself: help, version, and the commands' names without their options."""
    text = (
        "Pretrain transformers and see the mark they were born with. A config or a model is named alone or behind "
        "--config or --model, in every command (docs/commands.md)."
    )
    parser = Parser(prog="birthmark", description=text)
    parser.add_argument("--version", action="version", version=f"birthmark {__version__}")
    commands = parser.add_subcommands(dest="command")
    for name in COMMANDS:
        summary = load_command(name).SUMMARY
        commands.add_subcommand(name, Parser(description=summary), help=summary)
    return parser
