"""Runs of the command line in forked processes: imports are paid once, so that a run of a tiny model takes a second."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

#: After one rank of a run has ended with a failure, a launcher sends the others SIGTERM, and SIGKILL so much later.
LAUNCHER_S = 30.0

_HEARD = (signal.SIGINT, signal.SIGTERM)

_HEAVY = ("torch.distributed.fsdp", "lightning.pytorch", "matplotlib.pyplot", "birthmark.api.run")
_HEAVY += ("birthmark.launch.commands.pretrain", "birthmark.report.run_page", "birthmark.report.snapshot_table")
_HEAVY += ("birthmark.trainer.strategies.lightning_setup",)


def import_once(deepspeed: bool) -> None:
    """Import what runs need. Nothing may compute here: a process with threads must not fork."""
    import importlib

    # As the command line has it: read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in (*_HEAVY, *(["deepspeed"] if deepspeed else [])):
        importlib.import_module(name)


@dataclass
class Rank:
    """One forked process."""

    pid: int
    output: Path
    """What it printed, on both channels."""
    status: int | None = None
    """Exit status once it has ended; negative: the signal that killed it."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start_rank(
    arguments: list[str], output: Path, environment: Mapping[str, str], prepare: Callable[[], None] = lambda: None
) -> Rank:
    """Fork a process that runs ``birthmark ARGUMENTS``; ``prepare`` is called in it first."""
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal that comes before the command line runs waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        return Rank(pid, output)
    status = 70
    try:
        with output.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for number in _HEARD:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(environment)
        prepare()
        from birthmark.launch.cli import main

        # The signal that waited: Python's own start would have met it without a word of ours.
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        except KeyboardInterrupt:
            print("birthmark: interrupted", file=sys.stderr)
            os._exit(130)
        status = main(arguments)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise AssertionError


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(n: int, arguments: list[str], folder: Path, prepare: Callable[[], None] = lambda: None) -> list[Rank]:
    """Fork ``n`` ranks of one run; one alone is started without a launcher's variables."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {} if n == 1 else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(n)}
    return [
        start_rank(
            arguments,
            folder / f"rank-{rank}.txt",
            shared | ({} if n == 1 else {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)}),
            prepare,
        )
        for rank in range(n)
    ]


def wait(
    ranks: Iterable[Rank], limit_s: float, meanwhile: Callable[[float], None] = lambda elapsed: None
) -> str | None:
    """Wait for all ranks of one run as a launcher does: where one fails, the others get SIGTERM.

    ``meanwhile`` is called again and again with the seconds since then. Returns what was wrong about their end.
    """
    ranks = list(ranks)
    start, failed_at, wrong = time.monotonic(), None, None
    while any(rank.poll() is None for rank in ranks):
        now = time.monotonic()
        meanwhile(now - start)
        if failed_at is None and any(rank.poll() for rank in ranks):
            failed_at = now
            for rank in ranks:
                rank.send(signal.SIGTERM)
        late = failed_at is not None and now - failed_at > LAUNCHER_S
        if late or now - start > limit_s:
            alive = [i for i, rank in enumerate(ranks) if rank.poll() is None]
            after = f"{LAUNCHER_S:.0f} s after another rank's failure" if late else f"after {limit_s:.0f} s"
            wrong = f"rank {', '.join(map(str, alive))} still runs {after}"
            for rank in ranks:
                rank.send(signal.SIGKILL)
        time.sleep(0.005)
    return wrong
