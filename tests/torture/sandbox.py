"""One command in a forked process of its own: bounded in time and memory, its output kept, what it touched seen."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import select
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds of computing, seconds and bytes that one case may take. Busy machines are slow, which is no fault.
CPU_SECONDS, WALL_SECONDS, MEMORY = 20, 60.0, 1 << 30

#: What a message for a person never holds.
_PYTHON = re.compile(r"\b[A-Za-z_.]+(?:Error|Exception|Warning|Interrupt)\b|Traceback|internal error")
_NO_MEMORY = re.compile(r"out of memory|not enough memory|allocate memory", re.IGNORECASE)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int | None
    """Exit status; None where a signal ended it."""
    ended_by: str
    """``exit``, ``time`` or the name of a signal."""
    output: str
    errors: str
    seconds: float
    memory: int
    """Bytes that it held at most, over those of the process that it was forked from."""
    touched: list[str] = field(default_factory=list)
    """Paths outside its folder that it made, changed or removed."""


class Watch:
    """Tells what was made, changed or removed below some folders since it was asked last (Linux's inotify)."""

    _LIBC = ctypes.CDLL(None, use_errno=True)
    #: IN_MODIFY, IN_ATTRIB, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE of <sys/inotify.h>.
    _CHANGES = 0x2 | 0x4 | 0x40 | 0x80 | 0x100 | 0x200
    _EVENT = struct.Struct("iIII")
    """The folder's number, what happened, a cookie, and the length of the name that follows."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self._queue = self._LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._folders: dict[int, str] = {}
        for root in roots:
            self._add(root)

    def _add(self, root: Path) -> None:
        for folder, _, _ in os.walk(root):
            number = self._LIBC.inotify_add_watch(self._queue, os.fsencode(folder), self._CHANGES)
            if number < 0:
                raise OSError(ctypes.get_errno(), f"cannot watch a folder: {os.strerror(ctypes.get_errno())}", folder)
            self._folders[number] = folder

    def changes(self) -> list[str]:
        """Paths that were made, changed or removed since the last call."""
        paths = set()
        with contextlib.suppress(BlockingIOError):
            while events := os.read(self._queue, 1 << 16):
                at = 0
                while at < len(events):
                    folder, _, _, length = self._EVENT.unpack_from(events, at)
                    at += self._EVENT.size
                    name = os.fsdecode(events[at : at + length].rstrip(b"\0"))
                    at += length
                    # No folder: more happened than the queue holds.
                    paths.add(f"{self._folders.get(folder, 'more than is listed')}/{name}")
        for path in map(Path, paths):
            if path.is_dir() and not path.is_symlink():
                self._add(path)
        return sorted(paths)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def in_memory(needed: int = 4 << 30) -> str | None:
    """Where temporary folders are best made: in memory, if the machine gives that so many bytes; else anywhere.

    Files of a case live for a moment. On a disk they take a quarter of all processor time.
    """
    place = Path("/dev/shm")
    free = shutil.disk_usage(place).free if place.is_dir() and os.access(place, os.W_OK) else 0
    return str(place) if free >= needed else None


def be_cheap_to_fork() -> None:
    """Make the processes that are forked from this one cheap, once it has loaded what they need.

    A collection of garbage in one would write to every object, and so copy every page, which takes .7 s. And
    its tables of pages are copied: large pages, where Linux can make them, have a five-hundredth of the entries.
    """
    gc.collect()
    gc.freeze()
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    large, collapse = 2 << 20, 25  # MADV_COLLAPSE, of Linux 6.1; what cannot be made large stays as it is
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, *_, name = (*line.split(maxsplit=5), "")[:6]
        if mode.startswith("rw") and name in ("", "[heap]"):
            first, end = (int(address, 16) for address in addresses.split("-"))
            for place in range(-(-first // large) * large, end // large * large, large):
                advise(place, large, collapse)


def run_forked(
    do: Callable[[], int], folder: Path, watch: Watch | None = None, wall: float = WALL_SECONDS, memory: int = MEMORY
) -> Outcome:
    """``do()`` in a forked process whose working folder and home is ``folder``; its result is the exit status.

    It is killed after ``wall`` seconds, and may take ``memory`` bytes of address space more than this process has.
    """
    base, start = _resident(), time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    files = [os.fdopen(os.memfd_create(name), "w+b") for name in ("output", "errors")]
    with files[0] as output, files[1] as errors:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = _in_child(do, folder, memory, output.fileno(), errors.fileno())
            finally:
                os._exit(status)
        ended = "exit"
        if not _has_ended(child, wall):
            ended = "time"
            os.killpg(child, signal.SIGKILL)
        _, waited, usage = os.wait4(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it left behind
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read(1 << 22).decode("utf-8", errors="replace"))
    status = os.waitstatus_to_exitcode(waited)
    if status < 0 and ended == "exit":
        ended = signal.Signals(-status).name
    return Outcome(
        None if status < 0 else status,
        ended,
        *texts,
        seconds=time.monotonic() - start,
        memory=max(0, usage.ru_maxrss * 1024 - base),
        touched=watch.changes() if watch else [],
    )


def _has_ended(child: int, wall: float) -> bool:
    """Wait at most ``wall`` seconds for a process, which stays to be waited for."""
    handle = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(1000 * wall))
    finally:
        os.close(handle)


def _in_child(do: Callable[[], int], folder: Path, memory: int, output: int, errors: int) -> int:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + memory,) * 2)
    os.chdir(folder)
    os.environ["HOME"] = str(folder)
    try:
        return do()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # what the command line let through
        print(f"Traceback: {type(error).__name__}: {error}", file=sys.stderr)
        return 71
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def faults(outcome: Outcome, names: Sequence[str], memory: int = MEMORY) -> list[str]:
    """What is wrong with how a command ended, whatever it was asked; empty if nothing is.

    A refusal must have one of the ``names``: the file or the field. It may have held ``memory`` bytes.
    """
    found = []
    if outcome.ended_by in ("time", "SIGXCPU"):
        found.append(f"hang: still busy after {outcome.seconds:.0f} s")
    elif outcome.status is None:
        found.append(f"crash: {outcome.ended_by}")
    # `audit` and `verify` end with 3 where they have told what is wrong, on their output.
    elif outcome.status not in (0, 1, 2) and not (outcome.status == 3 and outcome.output.strip()):
        found.append(f"exit status {outcome.status}")
    if outcome.memory > memory or (outcome.status != 0 and _NO_MEMORY.search(outcome.errors)):
        found.append(f"memory: {outcome.memory >> 20} MiB")
    if python := _PYTHON.search(outcome.errors):
        found.append(f"internal error: {python[0]}")
    lines = [line for line in outcome.errors.splitlines() if line.strip()]
    if outcome.status in (1, 2):
        if not 1 <= len(lines) <= 2:
            found.append(f"{len(lines)} lines for a refusal")
        if lines and not any(name in outcome.errors for name in names):
            found.append(f"a refusal that names none of {', '.join(names)}")
    if outcome.touched:
        found.append(f"touched {', '.join(outcome.touched[:3])}")
    return found
