"""torchrun as our launch files start it: it stops a run with a checkpoint, and leaves the error message to the run.

It is ``torch.distributed.run`` with its own options, and differs in five things:

- SIGUSR1, SLURM's warning before a job's end, becomes SIGTERM to the workers. They stop by themselves, in their own
  time, and torchrun ends with status 0.
- After a SIGTERM or Ctrl-C to itself it waits for them for minutes, not 30 seconds.
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

from ..errors import USAGE_STATUS

#: Variables that torch reads, with values for those that the user has not set.
DEFAULTS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _stop_workers(number: int, frame: FrameType | None) -> None:
    """Send SIGTERM to every child of this process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGTERM)


def _is_news(record: logging.LogRecord) -> bool:
    """Say if a line of torchrun's log adds to what the workers printed.

    A worker that ended with a positive status has explained it itself.
    """
    status = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (isinstance(status, int) and status > 0)


def _quiet() -> None:
    """Remove from torchrun's log the errors that no worker prints itself."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    multiprocessing = "torch.distributed.elastic.multiprocessing"
    logging.getLogger(f"{multiprocessing}.api").addFilter(_is_news)
    logging.getLogger(f"{multiprocessing}.errors.error_handler").setLevel(logging.CRITICAL)


def _give_up_on_usage_errors() -> None:
    """Keep agents from restarting their workers after one has ended with the status of a usage error."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if any(failure.exitcode == USAGE_STATUS for failure in result.failures.values()):
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


def main() -> int:
    """Run torchrun; returns the run's exit status."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    if "LOGLEVEL" not in os.environ:
        _quiet()
    _give_up_on_usage_errors()
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, _stop_workers)
    if why := _problem(run):
        mend = "NPROC, NNODES and MAX_RESTARTS say how many processes, nodes and restarts"
        print(f"birthmark: error: torchrun: {why}; {mend}", file=sys.stderr)
        return USAGE_STATUS
    try:
        run.main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except RendezvousError as error:
        print(f"birthmark: error: torchrun found no other nodes: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
