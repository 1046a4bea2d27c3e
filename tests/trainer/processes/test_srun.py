"""srun as a launcher: its variables, by hand, as SLURM sets them for the tasks of a step."""

import os
import subprocess
from dataclasses import asdict

import pytest
import yaml
from quiet_runs import logged, run

from birthmark.errors import UsageError
from birthmark.measure.records import RunDir
from birthmark.trainer.processes.launched_process import LaunchedProcess, launched_process

#: What a shell inside an allocation of two nodes with two tasks each has.
ALLOCATION = {"SLURM_JOB_ID": "7654321", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[07-08]"}
ALLOCATION |= {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
#: What srun adds and changes for the last of its tasks.
TASK = ALLOCATION | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0"}
TASK |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[07-08]"}
TORCH = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]


@pytest.fixture
def variables(monkeypatch):
    """``variables(found)``: these alone are what a launcher has said; monkeypatch takes away what comes of them."""

    def be(found):
        for name in [name for name in os.environ if name.startswith("SLURM_")] + TORCH:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in found.items():
            monkeypatch.setenv(name, value)

    return be


def test_a_task_is_a_process_and_torch_reads_who_it_is(variables):
    variables(TASK)
    assert launched_process() == LaunchedProcess(rank=3, world_size=4, local_rank=1, local_world_size=2)
    port = str(15000 + 7654321 % 15000)
    assert [os.environ[name] for name in TORCH] == ["3", "4", "1", "2", "node07", port]


@pytest.mark.parametrize("step", [None, str(2**32 - 5), str(2**32 - 6)], ids=["none", "batch", "interactive"])
def test_a_shell_inside_an_allocation_is_no_task(variables, step):
    shell = ALLOCATION if step is None else {**TASK, **ALLOCATION, "SLURM_STEP_ID": step}
    variables(shell)
    assert launched_process() is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "SLURM_STEP_TASKS_PER_NODE=3,1: .*--ntasks-per-node"),
        ({"SLURM_PROCID": "2"}, "task 2 as number 1 of node 1: .*--distribution=block"),
        ({"SLURM_NODEID": None}, "SLURM_NODEID is missing"),
    ],
)
def test_tasks_that_are_no_run_are_one_line(variables, change, expected):
    variables({name: value for name, value in (TASK | change).items() if value is not None})
    with pytest.raises(UsageError, match=expected):
        launched_process()


@pytest.fixture(scope="module")
def config(tiny):
    return tiny({"trainer.max_steps": 3, "trainer.checkpoint_every": 3, "snapshot.enabled": False})


def test_a_single_process_trains_inside_an_allocation(config, variables, tmp_path):
    variables(ALLOCATION)
    assert list(logged(run(config, tmp_path / "run"), "train/loss")) == [1, 2, 3]


def test_two_tasks_train_as_one_process_does(config, variables, tmp_path, pretrain_script, python):
    variables({})
    file, asked = tmp_path / "run.yaml", asdict(config)
    asked["trainer"]["strategy"] = "ddp"
    file.write_text(yaml.safe_dump(asked))
    step = TASK | {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [
        subprocess.Popen(
            [python, "-W", "ignore", pretrain_script, file, tmp_path / "two", "begin"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **step, "SLURM_PROCID": task, "SLURM_LOCALID": task},
        )
        for task in ("0", "1")
    ]
    try:
        assert [task.wait(timeout=300) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
    alone, two = run(config, tmp_path / "one"), RunDir.open(tmp_path / "two")
    assert logged(two, "train/loss") == pytest.approx(logged(alone, "train/loss"), rel=1e-5)
