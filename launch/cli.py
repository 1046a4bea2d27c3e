"""The ``birthmark`` command: parse, run, and tell people in one line what went wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import RunError, UsageError
from ..trainer.config_file import check_config_files
from .commands.table import COMMANDS
from .parsing import build_parser, normal_dashes


def _failed(line: str, status: int) -> int:
    """Tell it: once, where several processes are one run and fail of the same, or of one another."""
    if "WORLD_SIZE" in os.environ:
        from ..trainer.processes import place, tell

        try:
            where = place()
        except UsageError:
            where = None
        if where is not None and where.world_size > 1:
            return tell(line, status, where)
    print(line, file=sys.stderr)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 (it failed), 2 (it was asked wrongly), 130 (interrupted)."""
    arguments = normal_dashes(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        check_config_files(arguments)
        parser, commands = build_parser()
        parsed = parser.parse_args(arguments or ["--help"])
        return COMMANDS[parsed.command](commands[parsed.command], arguments[1:], parsed[parsed.command])
    except (UsageError, RunError) as error:
        if debug:
            raise
        return _failed(f"birthmark: error: {' '.join(str(error).split())}", 2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left must not fail again when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        print("birthmark: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        return _failed(f"birthmark: {type(error).__name__}: {' '.join(str(error).split())} (--debug shows where)", 1)


if __name__ == "__main__":
    sys.exit(main())
