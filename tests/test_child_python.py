"""Python as a child, started in a folder whose files have the names of modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import birthmark
from birthmark.child_python import python_command, python_environment, search_path
from birthmark.data.workers import in_processes

LAUNCH = Path(birthmark.__file__).parent / "launch"
#: Modules that a child imports, of the standard library and of others.
NAMES = ("json", "resource", "numpy", "safetensors", "torch", "yaml")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A working folder with a file for each name, which leaves a mark where it is run."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", [None, "", os.pathsep, f"{os.pathsep}/nowhere", f"/nowhere{os.pathsep}"])
def test_a_child_imports_nothing_of_the_working_folder(hostile, path, monkeypatch):
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path)
    # And what the child starts itself, by a plain command line.
    code = "import json, resource, subprocess, sys; subprocess.run([sys.executable, '-c', 'import json, resource'])"
    subprocess.run(python_command("-c", code), env=python_environment(), check=True)
    assert not (hostile / "ran").exists()
    # Without them Python runs the files.
    subprocess.run([sys.executable, "-c", "import resource"], check=True)
    assert (hostile / "ran").read_text() == "resource"


def test_what_a_user_has_put_on_the_path_stays_there(tmp_path, monkeypatch):
    (tmp_path / "library").mkdir()
    (tmp_path / "library/of_the_user.py").write_text("print('of the user')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "library")
    command = python_command("-c", "import of_the_user")
    done = subprocess.run(command, env=python_environment({"A": "b"}), capture_output=True, text=True, cwd="/")
    assert done.stdout == "of the user\n"
    assert search_path(["", "a", "/b"]) == f"{tmp_path}/a{os.pathsep}/b"


def test_the_command_leaves_the_working_folder(hostile):
    """Also under ``python -m``, where what it imports from then on comes from elsewhere."""
    for command, path in (
        ([sys.executable, "-m", "birthmark.launch.cli"], ""),
        ([str(Path(sys.executable).with_name("birthmark"))], os.pathsep),
    ):
        # What is imported before the first line of ours is beyond us.
        (hostile / "json.py").unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run([*command, "configs"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not (hostile / "ran").exists(), (command, (hostile / "ran").read_text())


@pytest.mark.parametrize("file", ["array.sbatch", "deepspeed.sh", "slurm.sbatch", "torchrun.sh"])
def test_what_a_launch_file_starts_is_such_a_child(file, tmp_path):
    for name in ("python", "srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\necho safe $PYTHONSAFEPATH\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "SLURM_JOB_ID": "1",
        "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1",
    }  # fmt: skip
    done = subprocess.run(["bash", LAUNCH / file], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "safe 1", done.stderr


def test_workers_import_nothing_of_the_working_folder(hostile, monkeypatch):
    monkeypatch.syspath_prepend("")
    monkeypatch.syspath_prepend(str(hostile))
    assert dict(in_processes(abs, [-1, -2], 2)) == {0: 1, 1: 2}
    assert not (hostile / "ran").exists()
