"""Watch over a run: one that hangs ends by itself, and names the process that is stuck, its host, and its activity.

Two threads in every process do this; neither takes part in a collective, so that a hung one cannot block them.

- One checks its own process: that the main thread still moves from place to place (joint_failure.py), and that the
  store at the run's port still answers.
- The other posts these findings in the store, and reads the others' posts. If the posts of a process end, it or its
  machine has stopped. If all post and none moves, those furthest behind block the others.

The process that finds a fault notes it in the store; then every process writes its stacks and ends. So do those that
still wait, `trainer.timeout_s` later, for one that has ended with a reason of its own. Only time in which
a thread itself ran counts, so that nobody is late after a pause of the process or the machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ...errors import RunError
from ...measure import ranks
from ...measure.ranks import rank_on_host
from ...measure.records import RunDir
from .joint_failure import PHASES, Place, Progress, common_store, report_failure, tell_launcher, was_reported
from .launched_process import LaunchedProcess, launchers_store

T = TypeVar("T")

#: So many processes of a large run read the posts of all; one alone would not be missed if it hung.
_EXAMINERS = 8
#: Frames of a stack that are shown, from the innermost; processes that a line names.
_FRAMES, _NAMED = 12, 8
#: Time, in seconds, that the end waits for files, and for the ranks that learn of it.
_FILES_S = 10.0
#: Runs that this process has watched: a new one must not read the posts of the last.
_watches = count()


class RunningClock:
    """Clock of the seconds in which its thread was running: a gap between two ticks counts at most ``longest``."""

    def __init__(self, longest: float) -> None:
        self.longest, self.seconds, self._last = longest, 0.0, time.monotonic()

    def tick(self) -> float:
        """Read the clock; return the seconds that this adds."""
        now = time.monotonic()
        gap, self._last = min(now - self._last, self.longest), now
        self.seconds += gap
        return gap


class Post(NamedTuple):
    """Report of a process about itself in the store."""

    beat: int
    """Number of its posts so far."""
    number: int
    """Number of its place; see :class:`Place`."""
    phase: str
    step: int
    seconds: float
    """Seconds that the process has been at this place."""
    late: bool
    """True if that is longer than allowed."""
    waiting: int
    """State of the main thread's stack when it is late: 2 in a collective, 1 perhaps in one, 0 elsewhere."""
    left: bool = False
    """True if its run is over."""

    @property
    def place(self) -> Place:
        """Place of the process."""
        return Place(self.number, self.phase, self.step)


class Peer(NamedTuple):
    """A process of the run, as seen by the others."""

    host: str
    pid: int
    born: str | None
    """Start time by the system's own clock; None if unknown."""

    @classmethod
    def this(cls) -> Peer:
        """Describe this process."""
        return cls(socket.gethostname(), os.getpid(), _born(os.getpid()))

    def kill(self) -> None:
        """Kill the process if it is on this host: a stopped process reacts to no other signal, and launchers try others
        first.
        """
        # Once it is gone, its number may belong to another process.
        if self.host == socket.gethostname() and self.born is not None and self.born == _born(self.pid):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _born(pid: int) -> str | None:
    with suppress(OSError):
        # The name of a program, in brackets, may have spaces in it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


@dataclass(frozen=True)
class Fault:
    """Fault that blocks a run."""

    ranks: tuple[int, ...]
    """The processes that do not go on."""
    silent: bool
    """True if they do not answer; otherwise they answer, but do not move."""


def find_fault(posts: Sequence[Post], silent_s: Sequence[float], timeout_s: float) -> Fault | None:
    """Find the processes that block the run; None if none does.

    Args:
        posts: the last post of every rank.
        silent_s: seconds since each of these posts.
        timeout_s: seconds after which a rank without a new post counts as silent.
    """
    there = [rank for rank, post in enumerate(posts) if not post.left]
    if silent := tuple(rank for rank in there if silent_s[rank] > timeout_s):
        return Fault(silent, silent=True)
    # The others wait for those that are furthest behind, who may have all the time that their phase has.
    fewest = min((posts[rank].number for rank in there), default=0)
    behind = [rank for rank in there if posts[rank].number == fewest]
    if not behind or not all(posts[rank].late for rank in behind):
        return None
    least = min(posts[rank].waiting for rank in behind)
    return Fault(tuple(rank for rank in behind if posts[rank].waiting == least), silent=False)


def _waiting(stack: traceback.StackSummary) -> int:
    """See :attr:`Post.waiting`."""
    innermost = [frame.filename.replace(os.sep, "/") for frame in stack[-3:]]
    # Agreements outside of steps wait without a message from torch.
    if any("/torch/distributed/" in name for name in innermost) or innermost[-1:] == [ranks.__file__]:
        return 2
    # Gradients are reduced inside the backward pass.
    return int(innermost[-1].endswith("/torch/autograd/graph.py")) if innermost else 0


def _in_debugger(stack: traceback.StackSummary) -> bool:
    return any(Path(frame.filename).name in ("pdb.py", "bdb.py") for frame in stack)


def _names(ranks: Sequence[int], peers: Sequence[Peer]) -> str:
    """Name the ranks: ``rank 3 on host a``, or several."""
    named = [rank_on_host(rank, peers[rank].host) for rank in ranks[:_NAMED]]
    more = len(ranks) - len(named)
    return " and ".join([", ".join(named), *([f"{more} more"] if more else [])])


def _in_time(act: Callable[[], T], otherwise: T) -> T:
    """Return the result of ``act``, or ``otherwise`` if it takes too long: the file system itself may hang."""
    found = [otherwise]

    def run() -> None:
        found[0] = act()

    acting = threading.Thread(target=run, daemon=True)
    acting.start()
    acting.join(_FILES_S)
    return found[0]


@dataclass
class _SelfCheck:
    """Findings of the thread that checks its own process."""

    place: Place
    seconds: float = 0.0
    late: bool = False
    waiting: int = 0


class _Watch:
    """Watch by the two threads of one process, from the birth of a run's model to the run's end."""

    def __init__(self, progress: Progress, timeout_s: float, run: RunDir, process: LaunchedProcess | None) -> None:
        self.progress, self.timeout_s, self.run, self.process = progress, timeout_s, run, process
        self.rank, self.n_ranks = (process.rank, process.world_size) if process is not None else (0, 1)
        self.interval = min(5.0, max(0.1, timeout_s / 8))
        self._main = threading.get_ident()
        self._own = _SelfCheck(progress.place)
        self._beats, self._exchanges = count(), 0
        self._of_rank_0: Place | None = None
        self._over, self._ending = threading.Event(), threading.Lock()
        me, now = Peer.this(), datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        met = [(me, now)] * self.n_ranks
        loops = [self._look]
        if self.n_ranks > 1:
            self._store = self._open_store()
            self._post()
            # When this returns all have posted.
            dist.all_gather_object(met, (me, now))
            loops.append(self._exchange)
        self.peers = [Peer(*peer) for peer, _ in met]
        self.folder = run.path / "hangs" / met[0][1]
        self._threads = [threading.Thread(target=loop, name="heartbeat", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """Leave the watch: the run is over for this process."""
        self._over.set()
        for thread in self._threads:
            thread.join(self.interval)

    # ---------------------------------------------------------------- this process

    def _look(self) -> None:
        """Check repeatedly that the main thread moves on, and that the store answers."""
        clock = RunningClock(2 * self.interval)
        moved = answered = 0.0
        exchanges = 0
        while not self._over.wait(self.interval):
            clock.tick()
            if (place := self.progress.place) != self._own.place:
                moved = clock.seconds
            if exchanges != self._exchanges:
                exchanges, answered = self._exchanges, clock.seconds
            seconds = clock.seconds - moved
            stack = self._stack() if seconds > PHASES[place.phase] * self.timeout_s else None
            late = stack is not None and not _in_debugger(stack)
            self._own = _SelfCheck(place, seconds, late, 0 if stack is None else _waiting(stack))
            if self.n_ranks == 1 and late:
                self._show(0, self._stack_text())
                self._end(self._line(Fault((0,), silent=False), [self._now(0)], [0.0]), [])
            elif self.n_ranks > 1 and clock.seconds - answered > self.timeout_s:
                self._end_without_store(clock.seconds - answered)

    def _stack(self) -> traceback.StackSummary:
        """Return the stack of the main thread, or of the thread that it waits for."""
        frame = sys._current_frames().get(self.progress.waits_for or self._main)
        # Without the lines of the files, whose file system may be what hangs.
        stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
        stack.reverse()
        return stack

    def _stack_text(self) -> str:
        return "".join(traceback.format_list(self._stack()[-_FRAMES:]))

    def _now(self, beat: int, left: bool = False) -> Post:
        own = self._own if self._own.place == self.progress.place else _SelfCheck(self.progress.place)
        return Post(beat, *own.place, own.seconds, own.late, own.waiting, left)

    # ---------------------------------------------------------------- the others

    def _open_store(self) -> dist.Store:
        store = common_store()
        if store is None:
            raise RunError(f"rank {self.rank}: the store at MASTER_ADDR:MASTER_PORT does not answer; start again")
        self._common = store
        return dist.PrefixStore(f"watch-{next(_watches)}", store)

    def _post(self, *, left: bool = False) -> None:
        post = self._now(next(self._beats), left)
        if post.late:
            self._store.set(f"stack/{self.rank}", self._stack_text())
        self._store.set(f"post/{self.rank}", json.dumps(post))

    def _exchange(self) -> None:
        """Post, and read the others' posts, while the store answers."""
        clock = RunningClock(2 * self.interval)
        examines = self.rank % max(1, self.n_ranks // _EXAMINERS) == 0
        keys = [f"post/{rank}" for rank in range(self.n_ranks)]
        posts: list[Post] = []
        silent_s, failed_s = [0.0] * self.n_ranks, 0.0
        while not self._over.wait(self.interval):
            # A store that fails is one that does not answer: see _look.
            with suppress(RuntimeError):
                self._post()
                # The server of the store cannot be asked once it is silent.
                self._of_rank_0 = Post(*json.loads(self._store.get("post/0"))).place
                if self._store.check(["fault"]):
                    line, silent = json.loads(self._store.get("fault"))
                    self._end(line, silent)
                seconds = clock.tick()
                failed_s += seconds if was_reported(self._common) else 0.0
                if failed_s > self.timeout_s:
                    self._end("another process of the run is gone; --resume goes on from the last checkpoint", [])
                if examines:
                    before, posts = posts, [Post(*json.loads(text)) for text in self._store.multi_get(keys)]
                    # Between two exchanges that were far apart the others could not post either.
                    silent_s = [
                        s + seconds if old and old[0].beat == new.beat else 0.0
                        for s, new, *old in zip(silent_s, posts, *([before] if before else []), strict=True)
                    ]
                    if (fault := find_fault(posts, silent_s, self.timeout_s)) is not None:
                        self._leave_word(fault, posts, silent_s)
                self._exchanges += 1
        with suppress(RuntimeError):
            self._post(left=True)

    def _leave_word(self, fault: Fault, posts: Sequence[Post], silent_s: Sequence[float]) -> None:
        """Tell all processes, unless another one has begun to and is still alive to finish."""
        if 1 < self._store.add("finders", 1) < 4 * _EXAMINERS:
            return
        for rank in fault.ranks[:_NAMED]:
            if not fault.silent and self._store.check([f"stack/{rank}"]):
                self._show(rank, self._store.get(f"stack/{rank}").decode())
        if fault.silent:
            self._show(self.rank, self._stack_text())
        self._store.set("fault", json.dumps([self._line(fault, posts, silent_s), fault.ranks if fault.silent else []]))

    # ---------------------------------------------------------------- the end

    def _line(self, fault: Fault, posts: Sequence[Post], silent_s: Sequence[float]) -> str:
        """Describe a fault in one line."""
        who, post = _names(fault.ranks, self.peers), posts[fault.ranks[0]]
        if fault.silent:
            return (
                f"{who} has not answered for {silent_s[fault.ranks[0]]:.0f} s, last seen in {post.place}: the process "
                f"is stopped, or its host is gone{self._mend()}"
            )
        limit = f"trainer.timeout_s {self.timeout_s:g} allows {PHASES[post.phase] * self.timeout_s:g} s"
        return (
            f"{who} does not move: {post.seconds:.0f} s in {post.place}, where {limit} (raise it if that is no "
            f"fault){self._mend()}"
        )

    def _mend(self) -> str:
        where = f"; stacks are in {self.folder}" if self._has_folder() else ""
        return f"{where}; --resume goes on from the last checkpoint"

    def _has_folder(self) -> bool:
        """Return True if the run's folder is known to exist, without asking the file system, which may hang."""
        return self.progress.place.phase != "birth"

    def _show(self, rank: int, stack: str) -> None:
        who = rank_on_host(rank, self.peers[rank].host)
        print(f"{who} is here:\n{stack}", end="", file=sys.stderr, flush=True)

    def _end(self, line: str, silent: Sequence[int]) -> None:
        """End this process, and silent ones on this host; one process prints the line."""
        with self._ending:
            try:
                line = f"birthmark: error: {line}"
                if self.process is not None and self.n_ranks > 1:
                    line, _ = report_failure(line, 1, self.process, rank_0_first=0 not in silent, names_rank=True)
                else:
                    print(line, file=sys.stderr)
            finally:
                self._exit(line, silent)

    def _end_without_store(self, seconds: float) -> None:
        """End this process when the store does not answer either: the store's process is the one that blocks all."""
        with self._ending:
            seen = ""
            if launchers_store():
                where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                who = f"the launcher, whose store at {where} the processes share,"
            else:
                who = f"{_names([0], self.peers)}, whose store the processes share,"
                seen = f", last seen in {self._of_rank_0}" if self._of_rank_0 is not None else ""
            line = (
                f"birthmark: error: {who} has not answered for {seconds:.0f} s{seen}: the process is stopped, or its "
                f"host is gone{self._mend()}"
            )
            try:
                # Rather twice than not at all.
                if _in_time(self._is_first, otherwise=True):
                    self._show(self.rank, self._stack_text())
                    print(line, file=sys.stderr)
            finally:
                self._exit(line, [] if launchers_store() else [0])

    def _is_first(self) -> bool:
        """Return True if this process is the one to report a fault that all find at once. Without a store they agree
        through the file system.
        """
        if not self._has_folder():
            return self.rank == 1
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "told").touch(exist_ok=False)
        except OSError as error:
            return not isinstance(error, FileExistsError)
        return True

    def _write_stacks(self) -> None:
        """Write the stacks of all threads of this process, and its last collectives, beside the run."""
        # The line is printed; the run must not end because of a full disk.
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"rank-{self.rank:05}.txt").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            if dist.is_nccl_available() and dist.is_initialized():
                recorded = torch._C._distributed_c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
                (self.folder / f"nccl-{self.rank:05}.json").write_bytes(recorded)

    def _leave_files(self, line: str) -> None:
        if self._has_folder():
            self._write_stacks()
        with suppress(OSError):
            tell_launcher(line)

    def _exit(self, line: str, silent: Sequence[int]) -> None:
        try:
            _in_time(lambda: self._leave_files(line), otherwise=None)
            if (on_fault := self.progress.on_fault) is not None:
                _in_time(lambda: on_fault(line), otherwise=None)
            for rank in silent:
                self.peers[rank].kill()
            sys.stderr.flush()
            sys.stdout.flush()
        finally:
            # The main thread cannot: it hangs.
            os._exit(1)


@contextmanager
def watched(timeout_s: float, run: RunDir, process: LaunchedProcess | None) -> Iterator[Progress]:
    """Watch over a run within the context; the main thread must report its place to the yielded object. Collective:
    call on every rank of the process group. With ``timeout_s`` 0 nobody watches.

    Args:
        timeout_s: see :attr:`~birthmark.trainer.config.TrainerConfig.timeout_s`.
        run: beside which stacks are written.
        process: this process; None where it is the only one.
    """
    progress = Progress()
    if not timeout_s:
        yield progress
        return
    watch = _Watch(progress, timeout_s, run, process)
    try:
        yield progress
    finally:
        watch.leave()
