"""The launch files as the documentation shows them, on this machine with two processes."""

import functools
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quiet_runs import config_file, logged, ranks_of

import birthmark
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir

LAUNCH = Path(birthmark.__file__).parent / "launch"


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory):
    file = tmp_path_factory.mktemp("launchers") / "run.yaml"
    config_file(file, tiny({"optim.schedule": "constant"}))
    return file


def environment_of(python, **more):
    path = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": python, "PATH": path, **more}


@pytest.fixture
def environment(python):
    """``environment(**more)``: what the launch files find; processes start in a moment."""
    return functools.partial(environment_of, python)


@pytest.mark.parametrize(
    ("command", "variables", "status", "expected"),
    [
        # The last word is the run's, and a usage error is not tried again.
        (
            "torchrun.sh --config none.yaml",
            {"NPROC": "1", "MAX_RESTARTS": "3"},
            2,
            "birthmark: error: none.yaml: no such",
        ),
        (
            *("torchrun.sh", {"NNODES": "2", "HEAD": "{host}", "NPROC": "1", "PET_RDZV_CONF": "join_timeout=1"}),
            *(1, "birthmark: error: torchrun found no other nodes"),
        ),
        ("torchrun.sh", {"NNODES": "2"}, 1, "NNODES is 2: give HEAD"),
        ("torchrun.sh", {"NPROC": "0"}, 2, "nproc_per_node is 0"),
        ("torchrun.sh", {"NPROC": "1", "MAX_RESTARTS": "x"}, 2, "invalid int value: 'x'"),
        ("torchrun.sh", {"NPROC": "1", "NNODES": "2:1", "HEAD": "127.0.0.1:1"}, 2, "min_nodes=2, max_nodes=1"),
        ("torchrun.sh", {"NPROC": "1", "HEAD": "h:1"}, 2, "HEAD is h:1, one of several nodes: give NNODES too"),
        ("deepspeed.sh", {"HOSTFILE": "{folder}/none"}, 2, "no such file"),
        ("deepspeed.sh", {"HOSTFILE": "{folder}/hosts"}, 2, "line 1:node0 slots 8 is not"),
    ],
)
def test_what_a_launch_file_cannot_start_is_one_line(
    command, variables, status, expected, tmp_path, environment, free_port
):
    (tmp_path / "hosts").write_text("node0 slots 8\n")
    given = {name: text.format(folder=tmp_path, host=f"127.0.0.1:{free_port()}") for name, text in variables.items()}
    file, *words = command.split()
    done = subprocess.run(["bash", LAUNCH / file, *words], env=environment(**given), capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert expected in line


def worker(launcher):
    """The only process that a torchrun has started; None where there is none yet."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return int(children[0]) if children else None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process that its parent died")
def test_workers_of_a_torchrun_that_is_killed_stop_with_a_checkpoint(config, tmp_path):
    run = RunDir(tmp_path / "run")
    flags = ["--trainer.strategy=ddp", "--trainer.max_steps=1000000", "--trainer.checkpoint_every=1000000"]
    with (tmp_path / "printed").open("w") as printed:
        agent = subprocess.Popen(
            ["bash", LAUNCH / "torchrun.sh", "--config", config, "--run_dir", run.path, *flags],
            env=environment_of(sys.executable, NPROC="2"),
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 200
        while not (run.metrics.is_file() and logged(run, "train/loss")) and time.monotonic() < end:
            time.sleep(0.1)
        workers = [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    finally:
        agent.kill()
        agent.wait()
    assert len(workers) == 2, (tmp_path / "printed").read_text()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert len(run.checkpoints_by_step()) == 1


#: Runs the module ARGV[1] as a program that gets Ctrl-C while it imports ARGV[2], perhaps in code that hides it.
INTERRUPTED = """
import importlib.abc, os, runpy, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == asked:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if hides:
                    raise ImportError(f"cannot import {name}") from None
                raise

module, asked, hides, *sys.argv[1:] = sys.argv[1:]
hides = hides == "hides"
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "asked", "hides"),
    [
        ("cli", "birthmark.models.user_classes", "shows"),
        ("cli", "birthmark.trainer.config_parser", "shows"),
        ("cli", "birthmark.trainer.config_parser", "hides"),
        ("torchrun_agent", "torch", "shows"),
        ("torchrun_agent", "torch", "hides"),
    ],
)
def test_ctrl_c_in_an_import_is_one_line(module, asked, hides):
    command = [sys.executable, "-c", INTERRUPTED, f"birthmark.launch.{module}", asked, hides, "pretrain", "demo"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "birthmark: interrupted\n")


#: The agent, with SIGHUP as with a terminal or under nohup: tests run under either, and forked Pythons inherit it.
AGENT = (
    "import signal, sys; from birthmark.launch.torchrun_agent import main; signal.signal(1, signal.{action});"
    "sys.exit(main())"
)
STARTED = (
    "import signal, time\nsignal.signal(1, signal.SIG_DFL)\nopen('starts', 'a').write('start ')\ntime.sleep(100)\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker under /proc")
@pytest.mark.parametrize(
    ("receiver", "number"), [("agent", signal.SIGUSR1), ("worker", signal.SIGTERM), ("worker", signal.SIGHUP)]
)
def test_a_stop_before_the_first_step_is_final(receiver, number, tmp_path, environment, python):
    (tmp_path / "worker.py").write_text(STARTED)
    command = [python, "-c", AGENT.format(action="SIG_DFL"), "--standalone", "--max_restarts=3", tmp_path / "worker.py"]
    agent = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    starts, end = tmp_path / "starts", time.monotonic() + 100
    while not (starts.is_file() and starts.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    if receiver == "agent":
        agent.send_signal(number)
    else:
        os.kill(ranks_of(tmp_path / "worker.py")[0], number)
    _, said = agent.communicate(timeout=100)
    assert (agent.returncode, said) == (
        128 + (number if receiver == "worker" else signal.SIGTERM),
        "birthmark: stopped while nothing trained; a run that has checkpoints goes on from its last\n",
    )
    assert starts.read_text() == "start "


@pytest.mark.parametrize(("action", "status"), [("SIG_DFL", 128 + signal.SIGHUP), ("SIG_IGN", 0)])
def test_a_lost_terminal_stops_the_agent_and_under_nohup_does_not(action, status, tmp_path, environment, python):
    (tmp_path / "worker.py").write_text("import time\nopen('starts', 'w').close()\ntime.sleep(0.6)\n")
    command = [python, "-c", AGENT.format(action=action), "--standalone", tmp_path / "worker.py"]
    agent = subprocess.Popen(command, cwd=tmp_path, env=environment())
    while agent.poll() is None and not (tmp_path / "starts").exists():
        time.sleep(0.02)
    agent.send_signal(signal.SIGHUP)
    assert agent.wait(timeout=100) == status


KILLED_ONCE = """
import os, signal, time
open("starts", "a").write("start ")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)
"""


def test_a_killed_worker_is_a_failure_though_its_peers_are_stopped(tmp_path, environment, python):
    (tmp_path / "worker.py").write_text(KILLED_ONCE)
    options = ["--standalone", "--nproc_per_node=2", "--max_restarts=1", "worker.py"]
    command = [python, "-m", "birthmark.launch.torchrun_agent", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "stopped" not in done.stderr
    assert len((tmp_path / "starts").read_text().split()) >= 3  # the first start of rank 0 may come too late


@pytest.mark.slow  # a minute: five starts, one after the other
@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds the processes under /proc")
def test_a_node_that_joins_later_takes_part_and_a_kill_after_that_is_one_restart(config, tmp_path, free_port):
    run = RunDir(tmp_path / "run")
    flags = ["--trainer.strategy=ddp", "--trainer.max_steps=1000000", "--trainer.checkpoint_every=100"]
    where = {"NNODES": "1:2", "HEAD": f"127.0.0.1:{free_port()}", "NPROC": "1", "PET_RDZV_CONF": "last_call_timeout=3"}

    def node(name):
        with (tmp_path / name).open("w") as printed:
            return subprocess.Popen(
                ["bash", LAUNCH / "torchrun.sh", "--config", config, "--run_dir", run.path, *flags],
                env=environment_of(sys.executable, **where),
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def both():
        return (tmp_path / "first").read_text() + (tmp_path / "second").read_text()

    def wait(until):
        end = time.monotonic() + 200
        while not until():
            assert [node.poll() for node in nodes] == [None] * len(nodes), both()
            assert time.monotonic() < end, both()
            time.sleep(0.1)

    (tmp_path / "second").touch()
    nodes = [node("first")]
    try:
        wait(lambda: run.checkpoint(100).is_dir())
        nodes.append(node("second"))
        for start in (1, 2):
            wait(lambda start=start: both().count("  2 processes") == start)
            at = max(logged(run, "train/loss"))
            wait(lambda at=at: max(logged(run, "train/loss")) > at + 20)
            if start == 1:
                os.kill(worker(nodes[1].pid), signal.SIGKILL)
        os.kill(worker(nodes[1].pid), signal.SIGTERM)
        statuses = [node.wait(timeout=100) for node in nodes]
    finally:
        for launcher in nodes:
            launcher.kill()
    assert statuses == [0, 0], both()
    assert both().count("  2 processes") == 2
    assert both().count("resumed at step") == 2
    assert "Traceback" not in both()
    assert list(logged(run, "train/loss")) == list(range(1, max(logged(run, "train/loss")) + 1))


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed, an optional one, is not installed"
)


def deepspeed(environment, config, run, port, *flags):
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
def test_deepspeed_starts_what_a_hostfile_says(config, tmp_path, free_port, environment):
    short = ["--trainer.strategy=zero2", "--trainer.max_steps=2", "--snapshot.enabled=false"]
    done = deepspeed(environment, config, tmp_path / "run", free_port(), *short)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("  2 processes") == 1
    assert done.stdout.count(f"report: {tmp_path / 'run' / 'report.html'}") == 1
    run = RunDir.open(tmp_path / "run")
    assert list(logged(run, "train/loss")) == [1, 2]
    assert json.loads(run.birth.read_text())["n_params"] > 0


@pytest.mark.slow
@needs_deepspeed
def test_a_port_in_use_is_one_line_and_all_are_down(config, tmp_path, environment):
    start = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = deepspeed(environment, config, tmp_path / "run", port, "--trainer.strategy=ddp")
    seconds = time.monotonic() - start
    assert done.returncode != 0
    (printed,) = [line for line in done.stderr.splitlines() if "birthmark: error" in line]
    assert f"MASTER_PORT {port} is in use" in printed
    assert not (tmp_path / "run").exists()
    assert seconds < 60  # two interpreters start, and find each other


# ── which environment, which nodes ───────────────────────────────────────────────────────────────────────────────────

#: Stands for an environment's python: its own path, and what it was asked to run.
SAY = '#!/bin/sh\necho "$0" "$@"\n'


def program(file, text=SAY):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


@pytest.fixture
def files(tmp_path):
    """The launch files where an installation has them."""
    folder = tmp_path / "env/lib/python3/site-packages/birthmark/launch"
    shutil.copytree(LAUNCH, folder, ignore=shutil.ignore_patterns("*.py", "commands", "reference", "__pycache__"))
    return folder


def start(file, *arguments, **more):
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **more}
    return subprocess.run(["bash", file, *arguments], env=variables, capture_output=True, text=True)


@pytest.mark.parametrize("file", ["torchrun.sh", "deepspeed.sh"])
@pytest.mark.parametrize("where", ["env/bin", "env/lib/python3/site-packages/birthmark/.venv/bin", "in-path"])
def test_a_launch_file_finds_the_environment_that_it_belongs_to(file, where, files, tmp_path):
    for name in ("python", "birthmark"):
        program(tmp_path / where / name)
    path = f"{tmp_path / 'in-path'}{os.pathsep}{os.environ['PATH']}"
    done = start(files / file, "--config", "demo", PATH=path)
    assert done.returncode == 0, done.stderr
    python, *asked = done.stdout.split()
    assert Path(python).resolve() == tmp_path / where / "python"
    assert asked[-3:] == ["pretrain", "--config", "demo"]


def test_without_an_environment_the_mend_is_said(files, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "basename", "env"):
        (tools / name).symlink_to(shutil.which(name))
    done = start(files / "torchrun.sh", PATH=str(tools))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "give PYTHON" in done.stderr


SRUN = {
    "SLURM_JOB_ID": "20000",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "node[5-7]",
    "SLURM_GPUS_ON_NODE": "4",
}


def test_torchrun_reads_what_srun_says(tmp_path):
    program(tmp_path / "bin/python")
    names = '#!/bin/sh\n[ "$*" = "show hostnames node[5-7]" ] && printf "node5\\nnode6\\n"\n'
    program(tmp_path / "bin/scontrol", names)
    variables = {"PYTHON": str(tmp_path / "bin/python"), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    asked = start(LAUNCH / "torchrun.sh", "--config", "demo", **variables, **SRUN).stdout.split()
    options = dict(zip(asked[3:-5:2], asked[4:-5:2], strict=True))
    assert options["--nnodes"] == "3"
    assert options["--nproc_per_node"] == "4"
    assert options["--rdzv_endpoint"] == "node5:20000"
    assert options["--rdzv_id"] == "20000.1"
    one_per_gpu = start(LAUNCH / "torchrun.sh", **variables, **SRUN | {"SLURM_STEP_NUM_TASKS": "12"})
    assert one_per_gpu.returncode == 2
    assert "srun started 12 tasks on 3 nodes: give --ntasks-per-node 1" in one_per_gpu.stderr


# ── birthmark launch ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_script_is_written_with_all_that_was_given(tmp_path, capsys, refused):
    job, python = tmp_path / "job.sh", tmp_path / "bin/python"
    program(python)
    asked = ["--nproc", "3", "--write", str(job), "--config", "demo", "--run_dir", "runs/a b"]
    assert main(["launch", "torchrun", *asked]) == 0
    assert f"bash {job}" in capsys.readouterr().out
    assert sys.executable in job.read_text()
    done = start(job, "--init_seed", "4", PYTHON=str(python))
    assert "--nproc_per_node 3 --max_restarts 3 --standalone" in done.stdout
    assert done.stdout.endswith("pretrain --config demo --run_dir runs/a b --init_seed 4\n")
    assert "exists already" in refused("launch", "torchrun", *asked)


def test_a_script_for_deepspeed_runs_where_no_file_lies_beside_it(tmp_path):
    job, hosts, python = tmp_path / "there" / "job.sh", tmp_path / "hosts", tmp_path / "bin/python"
    program(python)
    job.parent.mkdir()
    hosts.write_text("node0 slots=8\n")
    asked = [f"--hostfile={hosts}", f"--write={job}", "--config=demo"]
    assert main(["launch", "deepspeed", *asked]) == 0
    done = start(job, PYTHON=str(python))
    assert f"--hostfile {hosts} " in done.stdout, done.stderr


def test_the_fewest_and_the_most_nodes_may_be_given(tmp_path):
    job = tmp_path / "job.sh"
    program(tmp_path / "bin/python")
    where = ["--nnodes=2:4", "--head=node0:29500", "--max_restarts=0"]
    assert main(["launch", "torchrun", *where, f"--write={job}", "--config=demo"]) == 0
    done = start(job, PYTHON=str(tmp_path / "bin/python"))
    assert "--nnodes 2:4 --nproc_per_node gpu --max_restarts 0 --rdzv_backend c10d" in done.stdout


def test_a_job_for_slurm_has_what_sbatch_is_asked_for(tmp_path):
    job = tmp_path / "job.sbatch"
    assert main(["launch", "slurm", "--nodes=2", "--gpus-per-node=8", f"--write={job}", "--config=demo"]) == 0
    lines = job.read_text().splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", 'set -- --config=demo "$@"'} <= set(lines)
    assert "find_python" not in job.read_text()
    assert subprocess.run(["bash", "-n", job]).returncode == 0


@pytest.mark.parametrize("value", ["x\n#SBATCH --wrap=y\n", 'x" --wrap="y', "x\r", "x\x1b[2J", "x\u2028"])
def test_a_value_stays_in_its_line_of_a_job(value, tmp_path, refused):
    job = tmp_path / "job.sbatch"
    line = refused("launch", "slurm", f"--partition={value}", f"--write={job}", "--config=demo")
    assert "--partition x" in line
    assert line.rstrip().endswith("leave quotation marks and characters that do not print out")
    assert not job.exists()


def test_a_job_is_handed_to_sbatch_with_this_environment(tmp_path):
    program(tmp_path / "bin/sbatch", '#!/bin/sh\necho "$PYTHON" "$MAX_RESTARTS" "$@"\n')
    command = [sys.executable, "-m", "birthmark.launch.cli", "launch", "slurm", "--nodes=2", "--max_restarts=1"]
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # A corpus that only the job's nodes have is no mistake here.
    done = subprocess.run(
        [*command, "--config=demo", "--data.path=/only/there"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    python, restarts, nodes, file, *rest = done.stdout.split()
    assert (python, restarts, nodes) == (sys.executable, "1", "--nodes=2")
    assert Path(file).samefile(LAUNCH / "slurm.sbatch")
    assert rest == ["--config=demo", "--data.path=/only/there"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["torchrn", "--config=demo"], "launch torchrn: give torchrun, deepspeed, slurm"),
        (["--config=demo"], "name the launcher first"),
        ([], "launch: name the launcher first: torchrun, deepspeed, slurm"),
        (["--nproc", "2"], "launch: name the launcher first: torchrun, deepspeed, slurm"),
        (["torchrun", "--nproc=0", "--config=demo"], "--nproc 0: give a whole number from 1"),
        (["torchrun", "--nproc", "-1", "--config=demo"], "--nproc -1: give a whole number from 1"),
        (["torchrun", "--nproc=two", "--config=demo"], "--nproc two: give a whole number from 1"),
        (["torchrun", "--max_restarts=x", "--config=demo"], "--max_restarts x: give a whole number from 0"),
        (["slurm", "--max_restarts=-1", "--config=demo"], "--max_restarts -1: give a whole number from 0"),
        (["torchrun", "--nnodes=0", "--config=demo"], "--nnodes 0: give a whole number, at least 1, or"),
        (["torchrun", "--nnodes=4:2", "--config=demo"], "--nnodes 4:2: give a whole number, at least 1, or"),
        (["deepspeed", "--port=65536", "--config=demo"], "--port 65536: give a whole number from 1 to 65535"),
        (["torchrun", "--head=node0:29500", "--config=demo"], "--head node0:29500: is one of several nodes; give --nn"),
        (["deepspeed", "--write=job.sh", "--config=demo"], "--write job.sh: give --hostfile too"),
        (["torchrun"], "nothing to train"),
        (["torchrun", "--config=demo", "--trainer.max_step=3"], "did you mean trainer.max_steps?"),
        (["torchrun", "--config=demo", "--model.d_model=13"], "model.d_model 13 is not divisible"),
        (["slurm", "--nproc=2", "--config=demo"], "--nproc: slurm does not read it"),
        (["torchrun", "--nproc", "--config=demo"], "--nproc: give a value"),
        (["torchrun", "--nproc=2", "--config=demo"], "trainer.strategy is single, but 2 processes were started"),
        (
            ["torchrun", "--nproc=17", "--config=demo", "--trainer.strategy=ddp", "--trainer.device=cpu"],
            "trainer.global_batch_size 16 is less than 17 processes",
        ),
    ],
)
def test_a_usage_error_is_seen_before_any_process_starts(arguments, expected, refused):
    assert expected in refused("launch", *arguments)
