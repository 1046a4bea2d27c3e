"""The parser of config files and command lines, whose errors are one line."""

from __future__ import annotations

from typing import Any, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser, set_parsing_settings

from ..errors import UsageError
from .config import RunConfig
from .config_errors import one_line

# The dataclasses' attribute docstrings are the help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


class Parser(ArgumentParser):
    """Raises UsageError in place of printing a usage text and leaving; takes no field by the beginning of its name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """One line, and no usage text."""
        names = [action.dest for action in self._actions if action.dest != "help"]
        raise UsageError(one_line(message, names, self.prog))


def add_run_fields(parser: ArgumentParser) -> None:
    """Let ``parser`` take every field of a run, and ``--config`` files that hold some of them."""
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the fields below.")
    parser.add_class_arguments(RunConfig, None, as_group=False)
