"""One process runs a trial: a lock file beside its folder says which, and a stale one is found.

Processes that take trials of one study may be on one machine or on several that share a file system. The owner touches
its lock while it lives. A lock is stale where its process is gone, as its own host can see; where it is of an earlier
start of this very job of SLURM, which has ended before the job was queued again; or, seen from another host, where it
was not touched for `STALE_SECONDS`. Several nodes of one job, at one start, are as any other hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from filelock import FileLock

from ...errors import RunError
from ...files import make_folder, read_json, write_json
from ..trials import Trial

#: Of a lock on another host: how long its owner may be silent.
STALE_SECONDS = 300.0
#: How often an owner says that it lives.
TOUCH_SECONDS = 20.0


class Owner(TypedDict):
    """What a lock file holds."""

    host: str
    pid: int
    started: str
    """When the process started, as its system counts: another process may have got its number."""
    run: int
    """The process that trains, which outlives a killed owner; 0: none yet."""
    run_started: str
    job: str
    """The job of SLURM that they are part of; "": none."""
    restart: NotRequired[int]
    """How often that job had been queued again; locks of before it was kept lack it, as if never."""


def _this_process() -> Owner:
    """Who we are, before the training."""
    pid = os.getpid()
    job, restart = os.environ.get("SLURM_JOB_ID", ""), _restart()
    return Owner(
        host=socket.gethostname(), pid=pid, started=_start_of(pid), run=0, run_started="", job=job, restart=restart
    )


def _restart() -> int:
    """How often SLURM has queued our job again; it says nothing at the first start."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def _start_of(pid: int) -> str:
    """When a process started, where the system says it; "" where it does not."""
    with contextlib.suppress(OSError):
        # The name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return ""


def _is_alive(pid: int, started: str) -> bool:
    """Whether a process of this host is still the one that it was."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return _start_of(pid) == started


def lock_of(trial: Trial) -> Path:
    """The lock file of a trial, beside its folder."""
    return trial.run.path.with_suffix(".lock")


def is_stale(lock: Path, owner: Owner) -> bool:
    """Whether the owner of a lock is gone."""
    me = _this_process()
    if owner["host"] == me["host"]:
        trains = owner["run"] > 0 and _is_alive(owner["run"], owner["run_started"])
        return not trains and not _is_alive(owner["pid"], owner["started"])
    if owner["job"] and owner["job"] == me["job"] and owner.get("restart", 0) < _restart():
        return True
    return _silent_seconds(lock) > STALE_SECONDS


def _silent_seconds(lock: Path) -> float:
    """How long ago a lock was touched, by the clock of its file system."""
    probe = lock.with_name(f".{lock.name}.{secrets.token_hex(4)}")
    probe.touch()
    try:
        return probe.stat().st_mtime - lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # let go a moment ago
    finally:
        probe.unlink()


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other process is inside for the same study's folder. For moments, not for runs."""
    make_folder(folder)
    with FileLock(folder / ".taking.lock"):
        yield


@dataclass
class Claim:
    """A trial that is ours to run, until it is let go."""

    lock: Path
    study: Path
    """The study's folder."""
    owner: Owner
    touched: float

    def hand_to(self, pid: int) -> None:
        """Say which process trains."""
        self.owner = Owner(**{**self.owner, "run": pid, "run_started": _start_of(pid)})
        write_json(self.lock, self.owner)

    def keep(self) -> None:
        """Say that we live, if it is time."""
        if time.monotonic() - self.touched > TOUCH_SECONDS:
            self.touched = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.lock)

    def let_go(self) -> None:
        """Remove the lock, if it is still ours."""
        with alone(self.study):
            if _read(self.lock) == self.owner:
                self.lock.unlink()


def _read(lock: Path) -> Owner | None:
    """The owner that a lock names; None where there is no lock."""
    if not lock.is_file():
        return None
    try:
        owner: Owner = read_json(lock, Owner)
    except RunError:
        if not lock.is_file():
            return None
        raise
    return owner


def claim(trial: Trial, study: Path) -> Claim | Owner:
    """Take a trial of the study in the folder ``study``.

    Returns:
        The claim, or who has the trial.

    Raises:
        RunError: the lock file is damaged; it names the file.
    """
    lock = lock_of(trial)
    with alone(study):
        owner = _read(lock)
        if owner is not None and not is_stale(lock, owner):
            return owner
        make_folder(lock.parent)
        owner = _this_process()
        write_json(lock, owner)
    return Claim(lock, study, owner, time.monotonic())


def owner_of(trial: Trial) -> Owner | None:
    """Who runs a trial now; None: nobody who lives."""
    lock = lock_of(trial)
    owner = _read(lock)
    return None if owner is None or is_stale(lock, owner) else owner
