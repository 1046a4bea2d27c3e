"""Trials shared among processes: the lock that one of them holds, and the starts that failed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NotRequired

from typing_extensions import TypedDict

from ..errors import RunError
from ..files import make_folder, parse_json, read_json, read_text, write_json, write_text
from ..locks import hold_lock
from ..schema import SchemaError, checked
from .trials import Trial

# ---------------------------------------------------------------- claims of trials by processes
# A lock file beside a trial's folder names its process, and stale ones are found.
#
# Processes that take trials of one study may be on one machine or on several that share a file system. The owner
# touches its lock while it lives. A lock is stale if its process is gone, which its own host can see; if it belongs
# to an earlier start of the same SLURM job, which ended before the job was queued again; or, seen from another host,
# if it was not touched for `STALE_SECONDS`. Several nodes of one job, at one start, count as different hosts.

#: Time, in seconds, that the owner of a lock on another host may be silent.
STALE_SECONDS = 300.0
#: Interval, in seconds, at which an owner touches its lock.
TOUCH_SECONDS = 20.0


class Owner(TypedDict):
    """Content of a lock file."""

    host: str
    pid: int
    started: str
    """Start of the process by the system's count: another process may have got its number."""
    run: int
    """The process that trains, which outlives a killed owner; 0: none yet."""
    run_started: str
    job: str
    """The job of SLURM that they are part of; "": none."""
    restart: NotRequired[int]
    """Number of times that the job had been requeued; old locks lack it, which means 0."""


def _this_process() -> Owner:
    """Describe this process as an owner, before the training."""
    pid = os.getpid()
    job, restart = os.environ.get("SLURM_JOB_ID", ""), _restart()
    return Owner(
        host=socket.gethostname(), pid=pid, started=_start_of(pid), run=0, run_started="", job=job, restart=restart
    )


def _restart() -> int:
    """Return the number of times that SLURM has requeued this job; its variable is missing at the first start."""
    count = os.environ.get("SLURM_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else 0


def _start_of(pid: int) -> str:
    """Return the start of a process, if the system tells it; otherwise ""."""
    with contextlib.suppress(OSError):
        # The name, in brackets, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return ""


def _is_alive(pid: int, started: str) -> bool:
    """Return True if a process of this host is still the same process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # another user's
    return _start_of(pid) == started


def lock_of(trial: Trial) -> Path:
    """Return the lock file of a trial, beside its folder."""
    return trial.run.path.with_suffix(".lock")


def is_stale(lock: Path, owner: Owner) -> bool:
    """Return True if the owner of a lock is gone."""
    me = _this_process()
    if owner["host"] == me["host"]:
        trains = owner["run"] > 0 and _is_alive(owner["run"], owner["run_started"])
        return not trains and not _is_alive(owner["pid"], owner["started"])
    if owner["job"] and owner["job"] == me["job"] and owner.get("restart", 0) < _restart():
        return True
    return _silent_seconds(lock) > STALE_SECONDS


def _silent_seconds(lock: Path) -> float:
    """Return the seconds since a lock was touched, by the clock of its file system."""
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
    """Exclude other processes from the same study's folder within the context. For moments, not for runs."""
    make_folder(folder)
    with hold_lock(folder / ".taking.lock"):
        yield


@dataclass
class Claim:
    """Claim of this process on a trial, until it is released."""

    lock: Path
    study: Path
    """The study's folder."""
    owner: Owner
    touched: float

    def hand_to(self, pid: int) -> None:
        """Record the process that trains."""
        self.owner = Owner(**{**self.owner, "run": pid, "run_started": _start_of(pid)})
        write_json(self.lock, self.owner)

    def keep(self) -> None:
        """Touch the lock, if it is time."""
        if time.monotonic() - self.touched > TOUCH_SECONDS:
            self.touched = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.lock)

    def let_go(self) -> None:
        """Remove the lock, if it still belongs to this process."""
        with alone(self.study):
            if _read(self.lock) == self.owner:
                self.lock.unlink()


def _read(lock: Path) -> Owner | None:
    """Read the owner that a lock names; None without a lock."""
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

    Returns: The claim, or the present owner. Raises: RunError: the lock file is damaged; the message names it.
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
    """Return the present owner of a trial; None if no living process has it."""
    lock = lock_of(trial)
    owner = _read(lock)
    return None if owner is None or is_stale(lock, owner) else owner


# ---------------------------------------------------------------- starts that failed
# Failed starts of a trial, kept beside its folder and reported in the table, for any process that made them.

#: Exit status of a wrong request, which another try would not mend.
WRONG_REQUEST = 2


class Failed(NamedTuple):
    """A start of a trial that did not reach its last step."""

    status: int
    """Exit status of its process; below 0, the signal that killed it."""
    reason: str
    """The last line of its output."""


class _Line(TypedDict):
    """A line of the file."""

    status: int
    reason: str


def tries_file(trial: Trial) -> Path:
    """Return the file of a trial's failed starts: a line of JSON for each, beside its folder."""
    return trial.run.path.with_suffix(".failed.jsonl")


def add_failure(trial: Trial, failed: Failed) -> None:
    """Record a failed start; the caller has claimed the trial."""
    failures = [*failures_of(trial), failed]
    write_text(tries_file(trial), "".join(json.dumps(one._asdict()) + "\n" for one in failures))


def failures_of(trial: Trial) -> list[Failed]:
    """Read a trial's failed starts, the oldest first.

    Raises:
        RunError: the file is damaged; the message names file and line.
    """
    file, found = tries_file(trial), []
    if not file.exists():
        return []
    for number, line in enumerate(read_text(file).rstrip("\n").split("\n"), start=1):
        try:
            found.append(Failed(**checked(parse_json(line), _Line)))
        except (SchemaError, ValueError) as error:
            raise RunError(f"{file}: line {number} is damaged ({error}); delete the line") from None
    return found


def failed_runs(trials: Sequence[Trial]) -> str:
    """List in a sentence, for tables and pages, the runs that failed, how often and with which outcome; "" if
    none did.
    """
    parts = []
    for trial in {trial.label: trial for trial in trials}.values():
        if failed := failures_of(trial):
            times = "once" if len(failed) == 1 else f"{len(failed)} times"
            end = "then finished" if trial.finished else "not finished"
            parts.append(f"{trial.label} {times}, {end} (last: {failed[-1].reason})")
    return f"Failed starts: {'; '.join(parts)}." if parts else ""
