"""The ``birthmark`` command: parse, run, and say in one line what went wrong."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from ..child_python import leave_working_folder, stop_signals
from ..errors import INTERRUPTED_STATUS, USAGE_STATUS, RunError, UsageError

# Everything beyond the standard library is imported inside functions, once the working folder is off the path.

#: Ctrl-C that came: an import may turn it into an error of its own.
_interrupts: list[int] = []

_MORE_THREADS = "give this user, or the container, more processes and threads (ulimit -u, pids.max)"


def _report_failure(line: str, status: int) -> int:
    """Print ``line`` once, even if several processes of one run fail together; return the exit status."""
    from ..messages import for_terminal
    from ..urls import hide_credentials

    line = for_terminal(hide_credentials(line))
    # Variables that torchrun and DeepSpeed set, and srun.
    if "WORLD_SIZE" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ:
        from ..trainer.processes.joint_failure import report_failure, tell_launcher
        from ..trainer.processes.launched_process import launched_process

        try:
            where = launched_process()
        except UsageError:
            where = None
        if where is not None:
            if where.world_size > 1:
                line, status = report_failure(line, status, where)
            else:
                print(line, file=sys.stderr)
            tell_launcher(line)
            return status
    print(line, file=sys.stderr)
    return status


def _run(arguments: Sequence[str]) -> int:
    from .command_table import COMMANDS, load_command, parse_command, top_parser

    name = arguments[0] if arguments else "--help"
    if name.startswith("-"):
        top_parser().parse_args(arguments or [name])  # prints help or version and leaves
    if name not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else "see birthmark --help"
        raise UsageError(f"{name}: no such command; {hint}")
    return load_command(name).run(parse_command(name, arguments[1:]))


def _ignore_stops() -> None:
    """Ignore further stop signals, so that the exit status is that of the finished work.

    Python takes a moment to end, and launchers may ask for a stop once more meanwhile, or the terminal may go. SLURM
    sends SIGUSR1.
    """
    for number in stop_signals("SIGTERM", "SIGUSR1", "SIGHUP"):
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def unless_interrupted(work: Callable[[], int], *, is_program: bool, debug: bool = False) -> int:
    """Return the status of ``work``; after Ctrl-C print a line and return 130.

    Args:
        work: the work.
        is_program: it is the whole program, whose last moments another Ctrl-C must not disturb.
        debug: raise, in place of the line.
    """
    if is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored on purpose
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return work()
    except BaseException as error:
        if debug or not (_interrupts or isinstance(error, KeyboardInterrupt)):
            raise
        if is_program:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("birthmark: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0, 1 (it failed), 2 (wrong usage), 130 (interrupted)."""
    words = sys.argv if argv is None else argv
    return unless_interrupted(partial(_main, argv), is_program=argv is None, debug="--debug" in words)


def _main(argv: Sequence[str] | None) -> int:
    if argv is None:
        try:
            leave_working_folder()
        except FileNotFoundError:
            line = "birthmark: error: the working folder was deleted; go to another one first (cd)"
            return _report_failure(line, USAGE_STATUS)
        # None where it was closed. PYTHONIOENCODING may name another way than Python's two.
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
            # A locale may lack a character. Standard error has this from Python.
            sys.stdout.reconfigure(errors="backslashreplace")
    from ..messages import one_line, system_words
    from ..models.user_classes import in_words, name_user_code, raised_in_user_code
    from ..urls import hide_credentials
    from .command_line import normal_dashes, resolve_home

    arguments = resolve_home(normal_dashes(sys.argv[1:] if argv is None else argv))

    if argv is None:
        # Loggers record what is asked for.
        sys.argv[1:] = map(hide_credentials, sys.argv[1:])
    name_user_code(arguments)
    debug = "--debug" in arguments
    # torch reads it once, when it is imported. Its warnings repeat a rank's end as forty lines of C++ in every other.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "INFO" if debug else "ERROR")
    try:
        if "_ARGCOMPLETE" in os.environ and argv is None:
            from .commands.completion import complete

            complete()
        status = _run(arguments)
        if argv is None:
            _ignore_stops()
        return status
    except (UsageError, RunError) as error:
        if debug or _interrupts:
            raise
        status = USAGE_STATUS if isinstance(error, UsageError) else 1
        return _report_failure(f"birthmark: error: {' '.join(str(error).split())}", status)
    except BrokenPipeError:
        # The reader of our output has closed it; the rest must not fail again when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if debug or _interrupts:
            raise
        # A refusal by the system is not our bug: a name too long, a folder without permission to write.
        said = system_words(error)
        # An output that never waits, such as a pipe of another program, refuses with the number alone.
        if error.errno == errno.EAGAIN and said == os.strerror(error.errno):
            said = f"{said}; {_MORE_THREADS}"
        return _report_failure(f"birthmark: error: {said}", 1)
    except Exception as error:
        if debug or _interrupts:
            raise
        if _is_out_of_memory(error):
            return _report_failure("birthmark: error: out of memory; give a smaller model, batch or probe", 1)
        if "start new thread" in str(error):  # Python's RuntimeError
            return _report_failure(f"birthmark: error: {one_line(error)}; {_MORE_THREADS}", 1)
        if (part := raised_in_user_code(error)) is not None:
            return _report_failure(f"birthmark: error: {part} raised {in_words(error)}; --debug shows where", 1)
        # A mistake in this package, whatever the input: nothing that a user could mend.
        line = f"birthmark: internal error ({one_line(error)}); please report it with what --debug shows"
        return _report_failure(line, 1)


def _is_out_of_memory(error: Exception) -> bool:
    # torch says it of the CPU as a RuntimeError, of a GPU as OutOfMemoryError.
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
