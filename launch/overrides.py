"""``--set FIELD=VALUE``: fields of a config to replace on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import UsageError
from ..trainer.config_parser import Parser, unknown_fields
from ..urls import keep_credentials_in


def add_overrides(parser: Parser, what: str) -> None:
    """Let a command take ``--set``; ``what`` is its help."""
    parser.add_argument("--set", type=str, nargs="+", default=[], metavar="FIELD=VALUE", help=what)


def read_overrides(words: Sequence[str], refused: Sequence[str] = (), why: str = "") -> dict[str, str]:
    """Read values by dotted field, as text: reading the config gives each its field's type.

    Args:
        words: the words after ``--set``.
        refused: fields that this command rejects.
        why: reason for the message that rejects them.

    Raises:
        UsageError: a word is no ``FIELD=VALUE``, or names no field; the message repeats it.
    """
    found: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or not field:
            raise UsageError(f"--set {word}: write FIELD=VALUE, as in trainer.max_steps=100")
        if field in refused:
            raise UsageError(f"--set {word}: {why}")
        if unknown := unknown_fields([field]):
            raise UsageError(f"--set {word}: {unknown[0]}")
        found[field] = keep_credentials_in(value)
    return found
