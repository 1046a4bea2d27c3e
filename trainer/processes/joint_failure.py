"""Failing together: an error of one process ends all processes of a run, and one of them prints the reason."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from ...errors import USAGE_STATUS, RunError, UsageError
from ...measure.ranks import rank, rank_on_host, world_size
from ...messages import system_words
from .launched_process import LaunchedProcess, start_name

#: Factor on ``trainer.timeout_s`` for phases that take longer than a step: by default half an hour.
LONGER = 15

#: Phase → how many times ``trainer.timeout_s`` a process may be in one. The first step of a start compiles.
PHASES = {
    "birth": LONGER,
    "set-up": LONGER,
    "first step": LONGER,
    "data": 1,
    "step": 1,
    "validation": LONGER,
    "snapshot": LONGER,
    "fingerprint": LONGER,
    "evaluation": LONGER,
    "average": LONGER,
    "checkpoint": LONGER,
    "end": LONGER,
}


class Place(NamedTuple):
    """Place of a process in its run. All processes of a run pass the same places."""

    number: int
    """Number of the place among all that the process has passed, from 1."""
    phase: str
    """A key of ``PHASES``."""
    step: int
    """The optimizer step that is being taken, or after which this happens."""

    def __str__(self) -> str:
        return f"{self.phase} (step {self.step})"


class Progress:
    """Current place of this process. Moving on costs an assignment; other threads read it."""

    def __init__(self) -> None:
        self.place = Place(1, "birth", 0)
        self.waits_for: int | None = None
        """The thread that the main thread waits for, if it does: a hang is then where that one is."""
        self.waited_s = 0.0
        """Seconds that steps waited for their batches, in all."""
        self.on_fault: Callable[[str], None] | None = None
        """Function called with the reason when this process ends because it or another hangs: by a thread of the watch,
        with little time.
        """

    def enter(self, phase: str, step: int) -> None:
        """Enter a new place. Every rank must call, in the same order."""
        self.place = Place(self.place.number + 1, phase, step)


# ---------------------------------------------------------------- failing together

# Times after a failure: for rank 0 to print the common reason, and for failing processes to wait for another.
_RANK_0_FIRST, _OTHERS = timedelta(seconds=2), timedelta(seconds=3)

# Time, in seconds, that a process gives the first one of its node to report a common finding.
_ALIKE_S = 30.0

# Time, in seconds, that the store at the run's port has to answer.
_ANSWER_S = 5


def _message_for_all(error: Exception) -> str:
    """Return the message of a rank's error for the other ranks; a bug keeps the name of its class."""
    if isinstance(error, (UsageError, RunError)):
        return str(error)
    said = system_words(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return f"rank {rank()}: {said}"


def raise_on_every_rank(error: Exception | None) -> None:
    """Raise if ``error`` is given on any rank: a rank's own error, else a RunError for the first rank that has one.
    Collective: call on every rank.
    """
    if world_size() > 1:
        mine = None if error is None else _message_for_all(error)
        messages: list[str | None] = [None] * world_size()
        dist.all_gather_object(messages, mine)
        first = next((text for text in messages if text is not None), None)
        if error is None and first is not None:
            error = RunError(first)
    if error is not None:
        raise error


def common_store() -> dist.Store | None:
    """Connect to the store through which processes communicate without a group; None if it is gone."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # Asked first, because the store itself prints pages where there is none.
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except (KeyError, ValueError, OSError):
        return None
    found: list[dist.Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            found.append(dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_ANSWER_S)))

    # Something else may listen there and never answer, for which the store would wait without end.
    asking = threading.Thread(target=connect, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return dist.PrefixStore(f"birthmark/{start_name()}", found[0]) if found else None


def report_failure(
    line: str, status: int, process: LaunchedProcess, *, rank_0_first: bool = True, names_rank: bool = False
) -> tuple[str, int]:
    """Print why this process fails, unless another process has printed the reason; return the reason and the exit
    status.

    The first to fail knows the cause; the others fail because it is gone. Rank 0 prints what all fail of, unless it is
    known to be silent. Another rank thus mostly fails of something that it met alone, and adds its rank and host to
    ``line``, unless this names a rank. It says no more than who prints: rank 0 may be late with what all fail of, as it
    closes the loggers first.
    """
    if process.rank > 0 and not names_rank:
        line = f"{line} (said by {rank_on_host(process.rank)})"
    store = common_store()
    if store is None:
        if process.rank > 0:
            # Most likely rank 0 fails of the same, prints it, and the launcher ends all others; or else the first of
            # this node. What was asked for wrongly the first of a node finds too, however late a busy node starts it.
            usage = status == USAGE_STATUS and process.local_rank > 0
            time.sleep(_ALIKE_S if usage else _OTHERS.total_seconds() * (1 + (process.local_rank > 0)))
        print(line, file=sys.stderr, flush=True)
        return line, status
    with suppress(RuntimeError):
        if process.rank > 0 and rank_0_first:
            with suppress(RuntimeError):
                store.wait(["printed"], _RANK_0_FIRST)
        if store.add("failed", 1) == 1:
            print(line, file=sys.stderr, flush=True)
            store.set("printed", f"{status} {line}")
        else:
            store.wait(["printed"], _OTHERS)
            known, _, line = store.get("printed").decode().partition(" ")
            status = int(known)
        # A launcher ends the rest as soon as one is gone; those that can leave by themselves with this status.
        store.add("leaving", 1)
        end = time.monotonic() + _OTHERS.total_seconds()
        while store.add("leaving", 0) < process.world_size and time.monotonic() < end:
            time.sleep(0.05)
    return line, status


def was_reported(store: dist.Store) -> bool:
    """Return True if a process has printed why it fails; ``store`` is that of :func:`common_store`."""
    return store.check(["printed"])


def tell_launcher(line: str) -> None:
    """Write ``line`` where torchrun looks for the reason of a failure, so that its summary ends with it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
