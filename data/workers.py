"""Work shared among processes that inherit nothing from this one: no threads, no locks, no main module.

A forked process inherits locks that nobody releases, and one that is spawned by `multiprocessing` runs the user's
script again. These start afresh and receive a function, by name, and its arguments.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ..child_python import python_command, python_environment, search_path
from ..errors import RunError, UsageError
from ..urls import credentials_for_children

Job = TypeVar("Job")
Result = TypeVar("Result")

_START = f"from {__name__} import serve; serve()"


def n_cores() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    function: Callable[[Job], Result], jobs: Sequence[Job], n_workers: int, *, apart: bool = False
) -> Iterator[tuple[int, Result]]:
    """Yield number and result of every job as it finishes.

    Args:
        function: function at the top level of a module.
        jobs: arguments of the calls; they and the results are pickled.
        n_workers: processes; below 2, or with one job, this one does the work,
        apart: use another process even then, so that a job's memory ends with it.

    Raises:
        UsageError, RunError: raised by the function; or a process ended.
    """
    n_workers = min(max(n_workers, 1), len(jobs))
    if n_workers < 2 and not apart:
        yield from ((number, function(job)) for number, job in enumerate(jobs))
        return
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(jobs)):
        todo.put(number)
    done: queue.SimpleQueue[tuple[int, Result] | BaseException] = queue.SimpleQueue()
    processes = [_start(max(1, n_cores() // n_workers)) for _ in range(n_workers)]
    threads = [
        threading.Thread(target=_feed, args=(process, function, jobs, todo, done), daemon=True) for process in processes
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        for process in processes:
            process.kill()
        for process, thread in zip(processes, threads, strict=True):
            thread.join()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                _close(pipe)


def _close(pipe: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # a process that is gone did not read all
        pipe.close()


def _start(n_threads: int) -> subprocess.Popen[bytes]:
    own = {
        "PYTHONPATH": search_path(path for path in sys.path if path != str(Path.cwd())),
        "TOKENIZERS_PARALLELISM": "true" if n_threads > 1 else "false",
        "RAYON_NUM_THREADS": str(n_threads),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    variables = python_environment(own, credentials_for_children())
    return subprocess.Popen(python_command("-c", _START), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)


def _feed(
    process: subprocess.Popen[bytes],
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    todo: queue.SimpleQueue[int],
    done: queue.SimpleQueue[Any],
) -> None:
    """Send a process one job after the other."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while True:
            number = todo.get_nowait()
            pickle.dump((function, jobs[number]), process.stdin)
            process.stdin.flush()
            result = pickle.load(process.stdout)
            done.put(result if isinstance(result, BaseException) else (number, result[0]))
    except queue.Empty:
        return
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        status = process.wait()
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        done.put(
            RunError(
                f"data.n_workers: a process that reads text ended ({how}); if memory ran out, give fewer processes"
            )
        )
    except BaseException as error:
        done.put(error)


def serve() -> None:
    """Run the loop of a process started by this module: read jobs from its input and write results to its output until
    the input ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it ends it
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, jobs), daemon=True).start()
    while True:
        function, job = jobs.get()
        reply: Any
        try:
            reply = (function(job),)
        except (UsageError, RunError) as error:
            reply = error
        except BaseException:
            reply = RuntimeError(f"in a process that was started here:\n{traceback.format_exc()}")
        pickle.dump(reply, replies)
        replies.flush()


def _receive(source: BinaryIO, jobs: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            jobs.put(pickle.load(source))
        except EOFError:
            os._exit(0)  # nobody waits for a result any more
        except BaseException:
            traceback.print_exc()
            os._exit(1)
