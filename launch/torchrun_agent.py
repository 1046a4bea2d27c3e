"""torchrun as our launch files start it: it stops a run with a checkpoint, and leaves the error message to the run.

It is ``torch.distributed.run`` with its own options, and differs in seven things:

- SIGUSR1, SLURM's warning before a job's end, becomes SIGTERM to the workers. They stop by themselves, in their own
  time, and torchrun ends with status 0.
- After a SIGTERM, SIGHUP or Ctrl-C to itself it waits for them for minutes, not 30 seconds.
- Under nohup it ignores SIGHUP, which torchrun would take back.
- A stop is final: nothing is restarted after it, nor after a worker that a signal ended before its first step.
- The workers' rank 0 serves their store at every start, so that a store on a lost node is not contacted again.
- An impossible request is not retried: a worker that ends with the status of a usage error is not
  restarted.
- The worker's own line says why it failed. torchrun adds its pages only about a worker that was killed.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from contextlib import redirect_stderr, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from ..child_python import stop_signals
from ..errors import INTERRUPTED_STATUS, USAGE_STATUS
from .cli import unless_interrupted

#: Variables that torch reads, with values for those that the user has not set.
DEFAULTS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


#: Signals that ask a run to stop. One that trains answers them with a checkpoint; until then a worker dies of them.
_STOPS = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")]
#: Statuses of workers that are not restarted.
_FINAL = {USAGE_STATUS, INTERRUPTED_STATUS, *(-number for number in _STOPS)}
#: Signals whose stop was handed on to the workers.
_handed_on: list[int] = []


def _stop_workers(number: int, frame: FrameType | None) -> None:
    """Send SIGTERM to every child of this process; end it if there is none yet."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    n_sent = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGTERM)
                n_sent += 1
    if not n_sent:
        raise SignalException("stopped before any worker", signal.Signals(number))
    _handed_on.append(number)


def _is_news(record: logging.LogRecord) -> bool:
    """Say if a line of torchrun's log adds to what the workers printed.

    A worker that ended with a positive status has explained it itself, and what a stop signal does `main` explains.
    """
    status = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (isinstance(status, int) and (status > 0 or status in _FINAL))


def _quiet() -> None:
    """Remove from torchrun's log the errors that no worker prints itself."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    multiprocessing = "torch.distributed.elastic.multiprocessing"
    logging.getLogger(f"{multiprocessing}.api").addFilter(_is_news)
    logging.getLogger(f"{multiprocessing}.errors.error_handler").setLevel(logging.CRITICAL)


def _restart_failures_alone() -> None:
    """Keep agents from restarting their workers after a usage error, and after a stop."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            statuses = [failure.exitcode for failure in result.failures.values()]
            # The first one failed by itself; torch then ends the others with SIGTERM, and lists them behind it.
            if _handed_on or USAGE_STATUS in statuses or not _FINAL.isdisjoint(statuses[:1]):
                self._remaining_restarts = 0
            return result

    launcher: Any = import_module("torch.distributed.launcher.api")
    launcher.LocalElasticAgent = Agent


def _problem(run: ModuleType) -> str:
    """Return the problem that torchrun, whose module is ``run``, has with its command line; "" if there is none."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            config, _, _ = run.config_from_args(run.parse_args(None))
    except (ValueError, AssertionError, RuntimeError) as error:
        return " ".join(str(error).split()).rstrip(".")
    except SystemExit as ended:
        if not ended.code:
            raise  # it was asked for its help
        return said.getvalue().strip().rpartition("error: ")[2]
    # torch finds this only when it starts the processes.
    return "" if config.nproc_per_node > 0 else f"nproc_per_node is {config.nproc_per_node}, which is none"


def _run() -> int:
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not stop_signals("SIGHUP"):
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if "LOGLEVEL" not in os.environ:
        _quiet()
    _restart_failures_alone()
    if why := _problem(run):
        mend = "NPROC, NNODES and MAX_RESTARTS say how many processes, nodes and restarts"
        print(f"birthmark: error: torchrun: {why}; {mend}", file=sys.stderr)
        return USAGE_STATUS
    stopped = "birthmark: stopped while nothing trained; a run that has checkpoints goes on from its last"
    try:
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, _stop_workers)
        run.main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if -failure.exitcode in _STOPS:
            print(stopped, file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except RendezvousError as error:
        print(f"birthmark: error: torchrun found no other nodes: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except SignalException as ended:
        if ended.sigval == getattr(signal, "SIGUSR1", None):
            print(stopped, file=sys.stderr)
        return 128 + ended.sigval
    return 0


def main() -> int:
    """Run torchrun; returns the run's exit status."""
    return unless_interrupted(_run, is_program=True)


if __name__ == "__main__":
    sys.exit(main())
