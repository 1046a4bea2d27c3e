"""torchrun as our launch files start it: it stops a run with a checkpoint, and leaves the last word to the run.

It is ``torch.distributed.run`` with its own options, and differs in four things:

- SIGUSR1, with which SLURM warns of a job's end, becomes SIGTERM to the workers. They stop by themselves, in their own
  time, and torchrun ends well.
- After a SIGTERM or Ctrl-C to itself it gives them minutes, not 30 seconds.
- The workers' rank 0 serves their store at every start, so that one whose node is gone is not dialled again.
- Why a worker has failed is what the worker printed, in one line. torchrun adds pages only about one that was killed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

#: What torch reads, unless the user has set it.
DEFAULTS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "270", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _stop_workers(number: int, frame: FrameType | None) -> None:
    """SIGTERM to every child of this process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                os.kill(int(stat.parent.name), signal.SIGTERM)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether torchrun's line says what no worker has: a positive status has been explained by the worker itself."""
    status = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (isinstance(status, int) and status > 0)


def _quiet() -> None:
    """Leave of torchrun's log the errors that no worker prints."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.ERROR)
    multiprocessing = "torch.distributed.elastic.multiprocessing"
    logging.getLogger(f"{multiprocessing}.api").addFilter(_is_news)
    logging.getLogger(f"{multiprocessing}.errors.error_handler").setLevel(logging.CRITICAL)


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
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, _stop_workers)
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
