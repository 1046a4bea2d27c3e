"""A run that hangs ends within its timeout, and names the process that holds it up, its host and what it was doing."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import threading
from types import SimpleNamespace

import pytest
from quiet_runs import config_file

from birthmark.errors import UsageError
from birthmark.measure.records import RunDir
from birthmark.trainer.processes.heartbeat import Fault, Post, RunningClock, find_fault, watched
from birthmark.trainer.processes.joint_failure import PHASES
from birthmark.trainer.processes.process_group import collective_timeout

TIMEOUT_S = 4.0
HOST = re.escape(socket.gethostname())

#: A metric of a user's that sleeps in one process, at the second snapshot.
SLEEPER = """
import os, time
import torch
from torchmetrics import Metric
from birthmark.metrics.quantity import Quantity

class Sleeper(Metric):
    quantities = (Quantity("slept", (), label="slept", definition="Nothing.", section="sink"),)
    made = 0

    def __init__(self, sizes):
        super().__init__()
        Sleeper.made += 1
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def logits(self, logits_BV):
        self.update(logits_BV)

    def update(self, logits_BV):
        if Sleeper.made > 4 and os.environ["RANK"] == "1":
            time.sleep(1000)

    def compute(self):
        return {"slept": self.total}
"""

#: Starts the two processes of several runs at once, by forking: it takes long to load what a run needs. Each process
#: writes what it prints to a file of its own.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from birthmark.data import backcopy
from birthmark.errors import RunError
from birthmark.launch.cli import main
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.run import pretrain
from birthmark.trainer.strategies import lightning_setup

folder, runs = Path(sys.argv[1]), json.loads(sys.argv[2])

def hang_at_step_20():
    batch = backcopy.BackCopy.batch
    def hang(self, first_sample, n):
        if self.split == "train" and first_sample >= 20 * 4:
            time.sleep(1000)
        return batch(self, first_sample, n)
    backcopy.BackCopy.batch = hang

def wait_for_the_other():
    # Rank 1 comes too late for a collective, and nobody watches.
    with join_process_group(launched_process(), torch.device("cpu"), timedelta(seconds=2)):
        time.sleep(6 * dist.get_rank())
        dist.all_reduce(torch.zeros(()))

def fail(*arguments):
    raise RunError("alone")

def train(name, rank, port, data_hang):
    out = os.open(folder / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1), os.dup2(out, 2)
    if rank is not None:
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": 2}
        there |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
        os.environ.update({key: str(value) for key, value in there.items()})
    if name == "late":
        try:
            wait_for_the_other()
        except RunError as error:
            print(f"birthmark: {error}" if rank == 0 else "", flush=True)
        os._exit(0)
    if data_hang:
        hang_at_step_20()
    if (name, rank) == ("fails", 1):
        lightning_setup.join_context_group = fail
    run = str(folder / name / "run")
    os._exit(main(["pretrain", "--config", str(folder / name / "config.yaml"), "--run_dir", run]))

started, found = {}, {}
for name, run in runs.items():
    for rank in run["ranks"]:
        if not (pid := os.fork()):
            train(name, rank, run.get("port"), run.get("hangs", False))
        started[pid] = name, rank
stopped = {}
while started:
    pid, status = os.waitpid(-1, os.WNOHANG)
    if pid:
        name, rank = started.pop(pid)
        stopped.setdefault(name, time.monotonic())
        found.setdefault(name, []).append([rank, status, time.monotonic() - stopped[name]])
    for pid, (name, rank) in started.items():
        metrics = folder / name / "run/metrics.jsonl"
        if rank == runs[name].get("stop", "") and name not in stopped and metrics.is_file():
            # A post is a little older than what it is about: birth is behind all of them by now.
            if metrics.read_text().count("train/loss") > 40:
                stopped[name] = time.monotonic()
                os.kill(pid, signal.SIGSTOP)
    time.sleep(0.05)
print(json.dumps(found))
"""

STOPPED = {
    "ddp-0": {"strategy": "ddp", "stop": 0},
    "ddp-1": {"strategy": "ddp", "stop": 1},
    "zero3-1": {"strategy": "zero3", "stop": 1},
}


OFFLINE = {"log.loggers": ["wandb"], "log.wandb": "offline"}


def fields_of(strategy, timeout_s=TIMEOUT_S):
    long = {"max_steps": 10**6, "checkpoint_every": 10**6, "timeout_s": timeout_s, "strategy": strategy}
    return {f"trainer.{name}": value for name, value in long.items()} | {"snapshot.enabled": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hangs")


@pytest.fixture(scope="module")
def ended(tiny, folder, free_port, python):
    """Train several runs; return their ends: name of the run → (rank, status, seconds after SIGSTOP or the first)."""
    (folder / "sleeper.py").write_text(SLEEPER)
    sleeps = {"snapshot.enabled": True, "snapshot.metrics": ["sleeper:Sleeper"], "trainer.checkpoint_every": 3}
    runs = {name: {**run, "fields": fields_of(run["strategy"])} for name, run in STOPPED.items()}
    runs["sleeper"] = {"fields": fields_of("ddp", 2.0) | sleeps}
    runs["fails"] = {"fields": fields_of("ddp") | {"trainer.context_parallel": 2}}
    runs["late"] = {"fields": {}}
    runs["data"] = {"fields": fields_of("single") | OFFLINE, "hangs": True, "ranks": [None]}
    runs["ddp-1"]["fields"] |= OFFLINE
    for name, run in runs.items():
        (folder / name).mkdir()
        config_file(folder / name / "config.yaml", tiny(run.pop("fields")))
    runs = {name: {"ranks": [0, 1], "port": free_port(), **run} for name, run in runs.items()}
    done = subprocess.run(
        [python, "-W", "ignore", "-c", SCRIPT, str(folder), json.dumps(runs)],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def said(folder, name):
    """What all processes of a run printed; the one line that says what was wrong."""
    text = "".join(file.read_text() for file in sorted(folder.glob(f"{name}-*.txt")))
    (line,) = re.findall("^birthmark: .*", text, re.MULTILINE)
    return text, line


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_process_is_named_and_all_end_soon(ended, folder, name):
    rank = STOPPED[name]["stop"]
    text, line = said(folder, name)
    assert re.search(rf"error: rank {rank} on host {HOST}\b.* has not answered for \d+ s", line)
    assert re.search(r"last seen in (first step|step|data) \(step \d+\)", line)
    # The store is in the process of rank 0.
    assert ("whose store the processes share" in line) == (rank == 0)
    assert re.search(rf"rank {1 - rank} on host {HOST} is here:\n  File ", text)
    assert list((folder / name / "run").glob(f"hangs/*/rank-0000{1 - rank}.txt"))
    statuses = {r: status for r, status, _ in ended[name]}
    assert os.WTERMSIG(statuses[rank]) == signal.SIGKILL
    assert os.waitstatus_to_exitcode(statuses[1 - rank]) == 1
    assert all(seconds < TIMEOUT_S + 30 for _, _, seconds in ended[name])


def test_of_two_that_wait_the_one_that_is_not_in_a_collective_is_named(ended, folder):
    text, line = said(folder, "sleeper")
    assert re.search(rf"error: rank 1 on host {HOST} does not move: \d+ s in snapshot \(step \d+\)", line)
    assert "trainer.timeout_s 2 allows 30 s" in line
    assert "time.sleep(1000)" in text
    assert [os.waitstatus_to_exitcode(status) for _, status, _ in ended["sleeper"]] == [1, 1]
    assert len(list((folder / "sleeper" / "run").glob("hangs/*/rank-0000?.txt"))) == 2


def test_who_waits_for_a_process_that_has_failed_ends_soon(ended, folder):
    """Without a launcher that ends it, as srun is by default. A set-up may take 15 times as long."""
    _, line = said(folder, "fails")
    assert line == f"birthmark: error: alone (said by rank 1 on host {socket.gethostname()})"
    (first, *_), (other, status, seconds) = ended["fails"]
    assert (first, other, os.waitstatus_to_exitcode(status)) == (1, 0, 1)
    assert seconds < TIMEOUT_S + 30


def test_a_single_process_whose_data_do_not_come_ends(ended, folder):
    text, line = said(folder, "data")
    assert re.search(rf"error: rank 0 on host {HOST} does not move: \d+ s in data \(step 2[01]\)", line)
    assert ", in hang\n" in text
    assert [os.waitstatus_to_exitcode(status) for _, status, _ in ended["data"]] == [1]


@pytest.mark.parametrize("name", ["data", "ddp-1"])
def test_wandb_is_told_as_long_as_the_process_that_logs_answers(ended, folder, name, offline_wandb):
    _, line = said(folder, name)
    (start,) = offline_wandb(folder / name / "run")
    assert start.alerts == [("run failed", line, "ERROR")]


def test_who_is_late_for_a_collective_is_not_said_to_be_gone(ended, folder):
    _, line = said(folder, "late")
    assert "rank 0: the others have not answered for 2 s, though none is known to be gone" in line


# ---------------------------------------------------------------- who holds a run up


def post(number, late=False, waiting=0, left=False):
    return Post(1, number, "step", 7, 5.0, late, waiting, left)


@pytest.mark.parametrize(
    ("posts", "silent_s", "expected"),
    [
        ([post(5), post(5)], [0, 9], None),
        ([post(5), post(5)], [0, 11], Fault((1,), silent=True)),
        ([post(5, late=True, waiting=2), post(5, late=True)], [0, 0], Fault((1,), silent=False)),
        ([post(5, late=True), post(5, late=True)], [0, 0], Fault((0, 1), silent=False)),
        # Rank 0 waits for rank 1, which may still take its time where it is.
        ([post(6, late=True), post(5)], [0, 0], None),
        ([post(6, late=True), post(5, late=True, waiting=2)], [0, 0], Fault((1,), silent=False)),
        # Who has left is waited for by nobody.
        ([post(6, late=True), post(5, left=True)], [0, 99], Fault((0,), silent=False)),
        ([post(6, left=True), post(5, left=True)], [99, 99], None),
    ],
)
def test_who_holds_a_run_up(posts, silent_s, expected):
    assert find_fault(posts, silent_s, 10.0) == expected


def test_a_pause_of_the_whole_process_does_not_count(monkeypatch):
    now = iter([100.0, 101.0, 2000.0, 2001.5])
    monkeypatch.setattr("birthmark.trainer.processes.heartbeat.time", SimpleNamespace(monotonic=lambda: next(now)))
    clock = RunningClock(2.0)
    assert [clock.tick() for _ in range(3)] == [1.0, 2.0, 1.5]
    assert clock.seconds == 4.5


def test_without_a_limit_nobody_watches_and_torch_waits_for_a_day(tmp_path):
    before = threading.active_count()
    with watched(0, RunDir(tmp_path), None) as progress:
        progress.enter("step", 3)
        assert threading.active_count() == before
    assert str(progress.place) == "step (step 3)"
    assert collective_timeout(0).total_seconds() == 24 * 3600


@pytest.mark.parametrize("timeout_s", [1, 120, 600])
def test_torch_waits_longer_than_any_phase_may_take(timeout_s):
    assert collective_timeout(timeout_s).total_seconds() > max(PHASES.values()) * timeout_s


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf")])
def test_an_impossible_limit_is_refused(tiny, timeout_s):
    with pytest.raises(UsageError, match=r"trainer\.timeout_s is"):
        tiny({"trainer.timeout_s": timeout_s})


#: One of two ranks fails four times; each prints what it raises.
FAILING = """
import errno, os, sys
from datetime import timedelta
import torch.distributed as dist
from birthmark.errors import RunError, UsageError
from birthmark.trainer.processes.joint_failure import raise_on_every_rank

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run/part.safetensors")
for failing, error in ((1, refused), (1, KeyError("w")), (0, UsageError("optim.lr is 0")), (1, RunError("a: full"))):
    try:
        raise_on_every_rank(error if rank == failing else None)
        print("nothing")
    except Exception as found:
        print(f"{type(found).__name__}: {found}")
raise_on_every_rank(None)
print("on")
"""


def test_all_ranks_fail_of_what_one_fails_and_hear_of_the_system_without_names_of_classes(tmp_path, as_ranks):
    outputs, statuses = as_ranks(FAILING, tmp_path / "store")
    assert statuses == [0, 0]
    said = f"run/part.safetensors: {os.strerror(errno.EACCES)}"
    assert [output.splitlines() for output in outputs] == [
        [
            f"RunError: rank 1: {said}",
            "RunError: rank 1: KeyError: 'w'",
            "UsageError: optim.lr is 0",
            "RunError: a: full",
            "on",
        ],
        [
            f"PermissionError: [Errno {errno.EACCES}] {os.strerror(errno.EACCES)}: 'run/part.safetensors'",
            "KeyError: 'w'",
            "RunError: optim.lr is 0",
            "RunError: a: full",
            "on",
        ],
    ]
