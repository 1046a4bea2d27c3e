"""`birthmark completion`: the script with which a shell completes commands, fields and values."""

from __future__ import annotations

import os
from argparse import Action
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import Namespace

from ...errors import UsageError
from ...trainer.by_name.shipped_configs import shipped_configs
from ...trainer.config_parser import ConfigFile, Parser
from ..command_line import named_arguments, normal_dashes

SUMMARY = "Print the script with which bash, zsh or fish completes commands, fields and values."

Shell = Literal["bash", "zsh", "fish"]

#: Instructions to load the script, by shell.
LOADED_BY: dict[Shell, str] = {
    "bash": 'eval "$(birthmark completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(birthmark completion zsh)" in ~/.zshrc, after compinit',
    "fish": "birthmark completion fish | source, in ~/.config/fish/config.fish",
}


def add_options(parser: Parser) -> None:
    """Add the argument that names the shell."""
    parser.add_argument(
        "shell",
        type=Shell,
        help="; ".join(" ".join(line.split()) for line in LOADED_BY.values()),
    )


def run(options: Namespace) -> int:
    """Print the script."""
    print(_argcomplete().shellcode(["birthmark"], shell=options.shell))
    return 0


def complete() -> None:
    """Answer the shell, which asks by environment variables, and exit. As elsewhere only the parser of the command at
    hand is built.
    """
    from ..command_table import COMMANDS, command_parser, top_parser

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) > 2 and words[1] in COMMANDS:
        # The parser's own words begin after the command's name.
        os.environ["_ARGCOMPLETE"] = "2"
        parser = command_parser(words[1])
        add_names(parser)
        # A field with dashes is completed with underscores.
        head, _, last = os.environ["COMP_LINE"].rpartition(" ")
        os.environ["COMP_LINE"] = f"{head} {normal_dashes([last])[0]}"
    else:
        parser = top_parser()
    files = _argcomplete().completers.FilesCompleter()
    for action in parser._actions:
        if (values := _values(action, files)) is not None:
            action.completer = values  # type: ignore[attr-defined]
    parser.parse_args([])  # jsonargparse hands itself to argcomplete, which answers and leaves


def add_names(parser: Parser) -> None:
    """Add the options and the words by which names may be given too (launch/command_line.py), for completion alone."""
    for option, action in named_arguments(parser).items():
        kind = parser.bare_kind if action.dest == parser.bare else action.metavar
        parser.add_argument(option, type=str, metavar=kind)
    if parser.bare:
        parser.add_argument("names", type=str, nargs="*", metavar=parser.bare_kind)


def _values(action: Action, files: Callable[..., Sequence[str]]) -> Callable[..., Sequence[str]] | None:
    """Return the completer of an option's values; None keeps the parser's own.

    Options that take any text complete files and configs.
    """
    hint = getattr(action, "_typehint", None)
    kinds = [
        kind for kind in (get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]) if kind is not None
    ]
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return lambda prefix, **_: choices
    if bool in kinds or isinstance(action, ConfigFile) or hint is None:
        return None
    if not any(kind is str or get_origin(kind) is list for kind in kinds):
        return lambda prefix, **_: []
    configs = (
        [config.name for config in shipped_configs()]
        if {"CONFIG", "MODEL", "STUDY", "SUITE"} & set(str(action.metavar).split("|"))
        else []
    )
    return lambda prefix, **more: [*files(prefix, **more), *(name for name in configs if name.startswith(prefix))]


def _argcomplete() -> Any:
    try:
        import argcomplete
        import argcomplete.completers
    except ImportError:
        raise UsageError("completion needs argcomplete: pip install argcomplete") from None
    return argcomplete
