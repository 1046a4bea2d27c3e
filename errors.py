"""The two errors that a person is meant to read; everything else is a bug and keeps its traceback."""


class UsageError(Exception):
    """The request is impossible: a config field, a path, a combination. Exit status 2."""


class RunError(Exception):
    """The request failed while it ran: a damaged file, a full disk, a loss that is not a number. Exit status 1."""


USAGE_STATUS = 2
"""Exit status of the command after a UsageError; torchrun as our launch files start it then starts nothing again."""

INTERRUPTED_STATUS = 130
"""Exit status of the command after Ctrl-C, as shells have it."""
