"""The runs of a study as processes, a few at a time, and its results, printed and written beside its runs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from ..child_python import python_command, python_environment, stop_signals
from ..errors import RunError, UsageError
from ..files import write_text
from ..models.user_classes import user_code_for_children
from ..report.terminal import RunConsole, say
from ..time_left import Pace, duration
from ..trainer.saved_config import write_config
from ..urls import credentials_for_children
from .study_file import StudyRequest
from .trial_lock import WRONG_REQUEST, Claim, Failed, add_failure, alone, claim, failed_runs, owner_of
from .trials import Trial, check_buildable, check_stored, chosen_trial, each_once, next_move

_POLL_SECONDS = 0.2
#: Interval, in seconds, of checks on trials of other processes.
_ELSEWHERE_SECONDS = 2.0


@dataclass(frozen=True)
class Failure:
    """A run that did not reach its last step."""

    trial: Trial
    reason: str
    """The last line of its output."""


@dataclass
class _Process:
    trial: Trial
    claim: Claim
    slot: int
    process: subprocess.Popen[bytes]
    since: float


def run_trials(
    trials: Sequence[Trial], jobs: int, console: Console, out: Path, *, retries: int = 0, wait: bool = True
) -> list[Failure]:
    """Bring every trial to its last step, ``jobs`` at a time; finished ones are skipped.

    Args:
        trials: the trials.
        jobs: runs at a time.
        console: the console to print to.
        out: the study's folder, whose other processes take none of these trials meanwhile.
        retries: number of restarts of a failed trial; an error that a restart cannot cure is not retried.
        wait: if to wait for trials that other processes run, until they are finished or free.

    Returns:
        The trials that failed. A failure stops no other trial.

    Raises:
        KeyboardInterrupt: a signal came. Running trials have saved a checkpoint; the same call resumes them.
        UsageError, RunError: another process has begun one of the trials with another config, after the others have
            ended; or it runs one, and nobody is to wait.
    """
    return _Runner(trials, jobs, console, out, retries, wait=wait).run()


def study_console(out: Path, *, stderr: bool = False) -> Console:
    """Return a console of the study in a folder, on one of the process's outputs, whose loss ends no run."""
    return RunConsole(out / "*" / "*.log", work="study", stderr=stderr)


def run_as_asked(request: StudyRequest, out: Path, trials: Sequence[Trial], console: Console) -> list[Failure]:
    """Check that no folder holds another run, and bring every requested trial to its last step, unless only a summary
    is requested.

    Returns:
        The trials that failed.

    Raises:
        UsageError, RunError: a model that cannot be built, or a folder that holds something else; before any run.
    """
    for trial in trials:
        check_stored(trial)
    if request.summary:
        return []
    check_buildable(trials)
    request.keep_overrides(out)
    if request.trial is None:
        return run_trials(trials, request.jobs, console, out, retries=request.retries)
    return run_trials([chosen_trial(trials, request.trial)], 1, console, out, retries=request.retries, wait=False)


def leaves_results(request: StudyRequest, trials: Sequence[Trial]) -> bool:
    """Return True if tables and pictures are left to other processes: one trial was requested, and not all are
    finished.
    """
    return request.trial is not None and not all(trial.finished for trial in trials)


class _Runner:
    def __init__(
        self, trials: Sequence[Trial], jobs: int, console: Console, out: Path, retries: int, *, wait: bool
    ) -> None:
        self.trials = each_once(trials)
        self.jobs, self.console, self.out, self.wait = jobs, console, out, wait
        self.tries_left = {trial.label: 1 + retries for trial in self.trials}
        #: Trials that other processes run.
        self.elsewhere: list[Trial] = []
        self.looked = 0.0
        self.steps = {trial.label: trial.step for trial in self.trials}
        self.waiting = deque(trial for trial in self.trials if next_move(trial) != "skip")
        self.running: list[_Process] = []
        self.failures: list[Failure] = []
        #: Why a trial is no longer one of this study: somebody else began it meanwhile, with another config.
        self.refusal: UsageError | RunError | None = None
        self.signals = 0
        self.bar = Progress(
            TextColumn("[bold]{task.fields[done]}[/bold] runs"),
            BarColumn(bar_width=16),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
            # On a narrow terminal this column is the one that shrinks.
            TextColumn("{task.fields[current]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            console=(shown := study_console(out, stderr=True)),
            expand=True,
            disable=not shown.is_terminal,
            transient=True,
            # A run logs nothing for seconds at a time while it starts and measures.
            speed_estimate_period=600,
        )

    def run(self) -> list[Failure]:
        skipped = len(self.trials) - len(self.waiting)
        if skipped:
            self._print(f"{skipped} of {len(self.trials)} runs are finished already")
        with self._signals_caught(), self.bar:
            total = sum(trial.config.trainer.max_steps for trial in self.trials)
            self.pace = Pace(total, sum(self.steps.values()))
            self.task = self.bar.add_task("", total=total, completed=sum(self.steps.values()), done="", current="")
            try:
                self._loop()
            finally:
                for job in self.running:  # only after an error of our own
                    job.process.kill()
                    job.claim.let_go()
        if self.signals:
            raise KeyboardInterrupt
        if self.refusal is not None:
            raise self.refusal
        return self.failures

    def _loop(self) -> None:
        signals_sent = 0
        while self.running or ((self.waiting or self.elsewhere) and not self.signals):
            self._look_elsewhere()
            while self.waiting and len(self.running) < self.jobs and not self.signals:
                self._take(self.waiting.popleft())
            if self.signals > signals_sent:
                signals_sent = self.signals
                self._print("stopping: runs save a checkpoint, the same command resumes them later")
                for job in self.running:
                    # The first ends a run at its next step, one that comes seconds later at once (callbacks/stop.py).
                    job.process.send_signal(signal.SIGKILL if self.signals > 2 else signal.SIGINT)
            self._show()
            time.sleep(_POLL_SECONDS)
            for job in [job for job in self.running if job.process.poll() is not None]:
                self.running.remove(job)
                self._end(job)
            for job in self.running:
                job.claim.keep()

    def _take(self, trial: Trial) -> None:
        """Start a trial, if no other process has it, and none has finished it."""
        found = claim(trial, self.out)
        if isinstance(found, Claim):
            try:
                check_stored(trial)
            except (UsageError, RunError) as error:
                self.refusal = error
                found.let_go()
                return
            if next_move(trial) != "skip":
                self._start(trial, found)
                return
            found.let_go()
            self.steps[trial.label] = trial.step
            self._print(f"{trial.label}  finished by another process")
            return
        who = f"process {found['pid']} on {found['host']} runs it"
        if not self.wait:
            raise RunError(f"{trial.label}: {who}; leave it to that one")
        self._print(f"{trial.label}  {who}")
        self.elsewhere.append(trial)

    def _look_elsewhere(self) -> None:
        """Take the trials that no other process runs any more."""
        if not self.elsewhere or time.monotonic() - self.looked < _ELSEWHERE_SECONDS:
            return
        self.looked = time.monotonic()
        free = [trial for trial in self.elsewhere if owner_of(trial) is None]
        self.elsewhere = [trial for trial in self.elsewhere if trial not in free]
        self.waiting.extend(free)

    def _start(self, trial: Trial, claim: Claim) -> None:
        command = python_command("-m", "birthmark.launch.cli", "pretrain")
        self.tries_left[trial.label] -= 1
        own_code = {}
        if next_move(trial) == "resume":
            # The user named own code in the study; the process that resumes reads only the run.
            own_code = user_code_for_children()
            command.append(f"--resume={trial.run.path}")
        else:
            write_config(trial.config, trial.config_file)
            command.append(f"--config={trial.config_file}")
        slot = min(set(range(self.jobs)) - {job.slot for job in self.running})
        trial.log.parent.mkdir(parents=True, exist_ok=True)
        with trial.log.open("wb") as log:
            # In a session of its own, so that a Ctrl-C at the terminal reaches it once, through this process.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=python_environment(process_environment(self.jobs, slot), credentials_for_children(), own_code),
                start_new_session=True,
            )
        claim.hand_to(process.pid)
        self.running.append(_Process(trial, claim, slot, process, time.monotonic()))

    def _end(self, job: _Process) -> None:
        trial, status = job.trial, job.process.returncode
        self.steps[trial.label] = trial.step
        if trial.finished and status == 0:
            self._print(f"{trial.label}  {time.monotonic() - job.since:.0f} s")
        elif not self.signals:
            self._failed(trial, status)
        job.claim.let_go()

    def _failed(self, trial: Trial, status: int) -> None:
        """Record a failed start, and try again if it may help."""
        reason = f"killed by {signal.Signals(-status).name}" if status < 0 else last_line(trial.log)
        add_failure(trial, Failed(status, reason))
        if self.tries_left[trial.label] and status != WRONG_REQUEST:
            self._print(f"{trial.label}  failed, and is tried again: {reason}")
            self.waiting.append(trial)
            return
        self.failures.append(Failure(trial, reason))
        self._print(f"{trial.label}  failed: {reason}")

    # ── progress ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _print(self, line: str) -> None:
        # Above the bar, where both are on one terminal.
        console = self.bar.console if self.console.is_terminal and not self.bar.disable else self.console
        say(console, line)

    def _show(self) -> None:
        if self.bar.disable and not self.pace.is_due():
            return
        done = len(self.trials) - len(self.waiting) - len(self.running) - len(self.elsewhere)
        self.steps |= {job.trial.label: last_logged_step(job.trial.run.metrics) for job in self.running}
        current = ", ".join(f"{job.trial.label} {self.steps[job.trial.label]}" for job in self.running)
        taken = sum(self.steps.values())
        if self.bar.disable:
            seconds = self.pace.seconds_left(taken)
            left = f", about {duration(seconds)} left" if seconds else ""
            self._print(f"{done} of {len(self.trials)} runs, {taken:,} of {self.pace.total:,} steps: {current}{left}")
            return
        self.bar.update(
            self.task,
            completed=taken,
            done=f"{done}/{len(self.trials)}",
            current=escape(current) + (f"  [red]{len(self.failures)} failed" if self.failures else ""),
        )

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        def handle(*_: object) -> None:
            self.signals += 1

        before = {number: signal.signal(number, handle) for number in stop_signals("SIGINT", "SIGTERM", "SIGHUP")}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def process_environment(jobs: int, slot: int) -> dict[str, str]:
    """Return environment variables that divide the machine among ``jobs`` runs.

    Each gets an equal number of cores. If CUDA_VISIBLE_DEVICES names several GPUs, each gets one of them, by ``slot``.
    """
    try:
        # A user who sets the number of threads says how many cores the study may use.
        cores = int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), "PYTHONUNBUFFERED": "1"}
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if len(gpus) > 1 and jobs > 1:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    return environment


def last_logged_step(metrics: Path) -> int:
    """Return the last step in a run's ``metrics.jsonl``, reading only the end of the file; 0 if there is none."""
    try:
        with metrics.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 8192))
            lines = f.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # an incomplete line
    return 0


def last_line(log: Path) -> str:
    """Return the last line of a process's output, or birthmark's own error line if there is one."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("birthmark: ")]
    return (errors or lines or ["no output"])[-1].removeprefix("birthmark: ").removeprefix("error: ")


# ---------------------------------------------------------------- results, printed and written


def _nothing(console: Console) -> None:
    """Write no further files."""


@dataclass(frozen=True)
class Outputs:
    """Functions that print and write the results of a study. Nothing is made before they are called."""

    show: Callable[[Console], object]
    """Function that prints the results."""
    table: Callable[[], str]
    """Content of ``table.md``."""
    write_csv: Callable[[Path], object]
    """Function that writes the table for programs to a path."""
    draw: Callable[[Path], list[str]]
    """Function that draws pictures into a folder and returns their names; not called where matplotlib is missing."""
    page: Callable[[], str]
    """Content of ``index.html``."""
    write_more: Callable[[Console], object] = _nothing
    """Function that writes further files of this kind of study, and prints their names."""


def end_study(
    request: StudyRequest, out: Path, trials: Sequence[Trial], console: Console, outputs: Outputs | None, missing: str
) -> None:
    """Print the results of a study, and write ``index.html``, ``table.md``, ``table.csv`` and pictures.

    One process at a time writes: processes with trials of the same study end at the same moment.

    Args:
        request: the request.
        out: the study's folder.
        trials: trials whose failed starts the table lists.
        console: console to print to.
        outputs: outputs of the results; None without results.
        missing: name of the results that are then missing.

    Raises:
        UsageError: a summary was asked for, and there are no results.
    """
    if outputs is None:
        if request.summary:
            raise UsageError(f"{out}: no {missing} of {request.file} in it yet; run it without --summary")
        return
    outputs.show(console)
    with alone(out):
        _write(out, outputs, console, failed_runs(trials))
        outputs.write_more(console)


def _write(out: Path, outputs: Outputs, console: Console, failed: str) -> None:
    """Write the files; ``failed`` is a last paragraph for ``table.md``."""
    table = outputs.table()
    write_text(out / "table.md", f"{table}\n{failed}\n" if failed else table)
    outputs.write_csv(out / "table.csv")
    write_text(out / "index.html", outputs.page())
    files = ["index.html", "table.md", "table.csv"]
    if importlib.util.find_spec("matplotlib"):
        files += outputs.draw(out)
    else:
        files.append("(no pictures: pip install matplotlib)")
    say(console, f"{out}: {' '.join(files)}")
