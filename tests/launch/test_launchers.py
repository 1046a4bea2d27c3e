"""The launch files as the documentation shows them, on this machine with two processes."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

import birthmark
from birthmark.measure.records import RunDir, read_metrics

LAUNCH = Path(birthmark.__file__).parent / "launch"


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    file = tmp_path_factory.mktemp("launchers") / "run.yaml"
    file.write_text(yaml.safe_dump(asdict(tiny({"optim.schedule": "constant"}))))
    return file


def environment(**more):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "PATH": path, **more}


def losses(run):
    return {r["step"]: r["train/loss"] for r in read_metrics(run.metrics) if "train/loss" in r}


def worker(launcher, rank):
    """The process of a rank, wherever below the launcher it is; None where there is none yet."""
    waiting = [str(launcher)]
    while waiting:
        pid = waiting.pop()
        try:
            waiting += Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                return int(pid)
        except FileNotFoundError:
            continue
    return None


@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds the processes under /proc")
def test_torchrun_starts_a_run_again_that_lost_a_worker_and_it_goes_on_by_itself(config, tmp_path):
    run = RunDir(tmp_path / "run")
    flags = ["--trainer.strategy=ddp", "--trainer.max_steps=1000000", "--trainer.checkpoint_every=20"]
    process = subprocess.Popen(
        ["bash", LAUNCH / "torchrun.sh", "--config", config, "--run_dir", run.path, *flags],
        env=environment(NPROC="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while process.poll() is None and not run.checkpoint(20).is_dir():
            time.sleep(0.1)
        os.kill(worker(process.pid, 1), signal.SIGKILL)
        at = max(losses(run))
        while process.poll() is None and (max(losses(run)) < at + 40 or len(run.checkpoints_by_step()) < 3):
            time.sleep(0.1)
        os.kill(worker(process.pid, 0), signal.SIGTERM)
        printed, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, printed[-3000:]
    assert printed.count("  2 processes") == 2
    (again,) = [line for line in printed.splitlines() if "resumed at step" in line]
    assert int(again.split("resumed at step ")[1].split()[0]) % 20 == 0
    # No step is logged twice, none is missing.
    assert list(losses(run)) == list(range(1, max(losses(run)) + 1))


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed, an optional one, is not installed"
)


def deepspeed(config, run, port, *flags):
    """What came of ``launch/deepspeed.sh`` with two processes on this machine."""
    hosts = run.with_name("hosts")
    hosts.write_text("# here\nlocalhost slots=2\n")
    return subprocess.run(
        ["bash", LAUNCH / "deepspeed.sh", "--config", config, "--run_dir", run, *flags],
        env=environment(HOSTFILE=str(hosts), PORT=str(port), DS_ACCELERATOR="cpu"),
        capture_output=True,
        text=True,
        timeout=300,
    )


@needs_deepspeed
def test_deepspeed_starts_what_a_hostfile_says(config, tmp_path, free_port):
    done = deepspeed(config, tmp_path / "run", free_port(), "--trainer.strategy=zero2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("  2 processes") == 1
    assert done.stdout.count(f"report: {tmp_path / 'run' / 'report.html'}") == 1
    run = RunDir.open(tmp_path / "run")
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]
    assert json.loads(run.birth.read_text())["n_params"] > 0


@needs_deepspeed
def test_a_port_in_use_is_one_line_and_all_are_down(config, tmp_path):
    start = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = deepspeed(config, tmp_path / "run", port, "--trainer.strategy=ddp")
    seconds = time.monotonic() - start
    assert done.returncode != 0
    (printed,) = [line for line in done.stderr.splitlines() if "birthmark: error" in line]
    assert f"MASTER_PORT {port} is in use" in printed
    assert not (tmp_path / "run").exists()
    assert seconds < 60  # two interpreters start, and find each other


@pytest.mark.parametrize(
    ("text", "expected"), [(None, "no such file"), ("node0 slots 8\n", "line 1:node0 slots 8 is not")]
)
def test_a_wrong_hostfile_is_one_line(text, expected, tmp_path):
    hosts = tmp_path / "hosts"
    if text is not None:
        hosts.write_text(text)
    done = subprocess.run(
        ["bash", LAUNCH / "deepspeed.sh"], env=environment(HOSTFILE=str(hosts)), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert expected in done.stderr


def test_several_nodes_need_a_head():
    done = subprocess.run(["bash", LAUNCH / "torchrun.sh"], env=environment(NNODES="2"), capture_output=True, text=True)
    assert done.returncode != 0
    assert "NNODES is 2: give HEAD" in done.stderr


@pytest.mark.parametrize("file", ["torchrun.sh", "deepspeed.sh", "slurm.sbatch"])
def test_the_files_are_shell(file):
    assert subprocess.run(["bash", "-n", LAUNCH / file]).returncode == 0
