"""``launch/slurm.sbatch`` on two nodes, both this machine, with real torchruns; SLURM's commands are stood in for."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quiet_runs import config_file, logged, ranks_of

import birthmark
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir

LAUNCH = Path(birthmark.__file__).parent / "launch"

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds the processes under /proc")

# Of srun what matters here: one task per node; a SIGTERM becomes a SIGKILL for the tasks, other signals are handed on;
# a task that ends badly ends the others.
SRUN = """
import os, signal, subprocess, sys, time

command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
nodes = range(int(os.environ["SLURM_JOB_NUM_NODES"]))
tasks = [subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(n), "SLURM_NODEID": str(n)}) for n in nodes]

def hand_on(number, frame):
    for task in tasks:
        if task.poll() is None:
            task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

signal.signal(signal.SIGUSR1, hand_on)
signal.signal(signal.SIGTERM, hand_on)
while any(task.poll() is None for task in tasks):
    if any(task.poll() for task in tasks):
        hand_on(signal.SIGTERM, None)
    time.sleep(0.05)
sys.exit(max(abs(task.returncode) for task in tasks))
"""

SCONTROL = """#!/bin/sh
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >>"$REQUEUED" ;;
esac
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The folder of SLURM's commands."""
    folder = tmp_path_factory.mktemp("slurm")
    for name, text in {"srun": f"#!{sys.executable}{SRUN}", "scontrol": SCONTROL}.items():
        file = folder / name
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return folder


def test_a_job_goes_on_after_a_kill_and_slurms_warning_leaves_a_checkpoint(tiny, commands, python, tmp_path):
    run, file, requeued = RunDir(tmp_path / "run"), tmp_path / "run.yaml", tmp_path / "requeued"
    fields = {"optim.schedule": "constant", "trainer.strategy": "ddp", "snapshot.enabled": False}
    config = tiny(fields | {"trainer.max_steps": 1000000, "trainer.checkpoint_every": 50})
    config_file(file, config)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_GPUS_ON_NODE": "1", "SLURM_NTASKS": "2", "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}
    started = f"SLURM_JOB_ID={os.getpid()}"
    process = subprocess.Popen(
        ["bash", LAUNCH / "slurm.sbatch", "--config", file, "--run_dir", run.path],
        env=os.environ | job | {"OMP_NUM_THREADS": "1", "PYTHON": python, "REQUEUED": str(requeued)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while process.poll() is None and not run.checkpoint(50).is_dir():
            time.sleep(0.05)
        ranks = ranks_of(started)
        assert sorted(ranks) == [0, 1]
        os.kill(ranks[1], signal.SIGKILL)
        at = max(logged(run, "train/loss"))
        while process.poll() is None and (max(logged(run, "train/loss")) < at + 60 or ranks_of(started) == ranks):
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGUSR1)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        for pid in ranks_of(started).values():
            os.kill(pid, signal.SIGKILL)
    assert requeued.read_text().split() == [job["SLURM_JOB_ID"]], printed[-3000:]
    (at_stop,) = [line for line in printed.splitlines() if line.startswith("stopped by SIG")]
    last = int(at_stop.split(" at step ")[1].split()[0])
    assert max(run.checkpoints_by_step()) == last
    # One restart, by all; no step is logged twice, none is missing.
    assert printed.count("  2 processes") == 2
    assert printed.count("resumed at step") == 1
    assert [r["step"] for r in read_metrics(run.metrics) if "train/loss" in r] == list(range(1, last + 1))
    assert "no end after" not in printed
    # Of the two torchruns only what no worker could print.
    assert [line for line in printed.splitlines() if "torch/distributed" in line or "Traceback" in line] == [
        line for line in printed.splitlines() if "failed (exitcode: -9)" in line
    ]
