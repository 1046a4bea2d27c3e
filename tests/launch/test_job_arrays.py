"""The runs of a study handed to SLURM and to W&B: what is written, and real processes that are started by it."""

import csv
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from birthmark.launch.cli import main
from birthmark.launch.job_arrays import ranges
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.trainer.saved_config import write_config

# Of sbatch what matters here: it reads the options at the file's head, and runs a copy of the file, elsewhere, once for
# each number of the array.
SBATCH = """
import os, shlex, subprocess, sys, tempfile

text = open(sys.argv[1]).read()
head = text.split("set -e")[0]
options = dict(w.removeprefix("--").partition("=")[::2] for l in head.splitlines() if l.startswith("#SBATCH ")
               for w in shlex.split(l)[1:])
numbers = []
for part in options["array"].partition("%")[0].split(","):
    first, _, last = part.partition("-")
    numbers += range(int(first), int(last or first) + 1)
folder = tempfile.mkdtemp()
copy = os.path.join(folder, "slurm_script")
open(copy, "w").write(text)
tasks = []
for n in numbers:
    log = open(options["output"].replace("%A", "7").replace("%a", str(n)), "w")
    job = {"SLURM_JOB_ID": str(8 + n), "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(n), "SLURM_NTASKS": "1",
           "SLURM_PROCID": "0"}
    tasks.append(subprocess.Popen(["bash", copy], cwd=folder, env={**os.environ, **job}, stdout=log, stderr=log))
statuses = [task.wait() for task in tasks]
print("Submitted batch job 7")
sys.exit(max(statuses))
"""


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """An sbatch that comes back when its jobs have ended."""
    folder = tmp_path / "slurm-commands"
    folder.mkdir()
    file = folder / "sbatch"
    file.write_text(f"#!{sys.executable}{SBATCH}")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return file


@pytest.fixture
def ablate(study_file, tmp_path, python, no_page, monkeypatch):
    """``ablate(*arguments)``: of a study of two arms and two seeds; ``ablate.file``."""
    # Drawing takes longer than these runs.
    monkeypatch.setattr("birthmark.study.arms.run.draw_study", lambda study, results, out: [])
    monkeypatch.setattr(sys, "executable", python)
    file = study_file(tmp_path, {"trainer.max_steps": 2}, scales={"same": {}})

    def run(out, *arguments):
        return main(["ablate", str(file), f"--out={out}", *arguments])

    run.file = file
    return run


def test_a_task_of_an_array_is_the_command_of_its_run(ablate, tmp_path, sbatch, monkeypatch, capsys):
    echo = tmp_path / "echo"
    echo.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    # What is in the environment at the start wins over the environment that wrote the file.
    monkeypatch.setenv("PYTHON", str(echo))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out there"
    given = ["--set", "log.project=two words"]
    assert ablate("out there", "--launcher=slurm", "--submit", "--scale=same", "--retries=3", *given) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Submitted batch job 7"
    for number in range(4):
        printed = (out / "slurm" / f"7_{number}.log").read_text().splitlines()
        options = [f"--out={out}", "--retries=3", "--scale=same", "--set", "log.project=two words"]
        command = ["-m", "birthmark.launch.cli", "ablate", str(ablate.file), *options, "--trial", str(number)]
        assert printed == [str(tmp_path), *command]


@pytest.mark.slow
def test_an_array_and_a_sweep_make_the_runs_and_the_table_of_this_machine(ablate, tmp_path, sbatch, no_page, capsys):
    here, there = tmp_path / "here", tmp_path / "out there"
    study = read_arm_study(ablate.file).only(["plain"])
    for trial in arm_trials(study, here):
        write_config(trial.config, tmp_path / "trial.yaml")
        with no_page():
            assert main(["pretrain", f"--config={tmp_path / 'trial.yaml'}"]) == 0
    assert ablate(here, "--arms=plain", "--summary") == 0
    capsys.readouterr()

    # Nothing is submitted unless it is asked for.
    assert ablate(there, "--arms=plain", "--launcher=slurm", "--jobs=2", "--sbatch", "time=1:00:00", "gpus=1") == 0
    array = there / "array.sbatch"
    assert f"submit it with: sbatch {array}" in capsys.readouterr().out
    assert not list((there / "slurm").iterdir())
    head = [line for line in array.read_text().splitlines() if line.startswith("#SBATCH ")]
    expected = ("--array=0-1%2", f'--output="{there}/slurm/%A_%a.log"', "--time=1:00:00", "--gpus=1", "--requeue")
    assert {f"#SBATCH {option}" for option in expected} <= set(head)

    assert ablate(there, "--arms=plain", "--launcher=slurm", "--submit") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Submitted batch job 7"
    logs = "".join(file.read_text() for file in (there / "slurm").iterdir())
    assert sorted(file.name for file in (there / "slurm").iterdir()) == ["7_0.log", "7_1.log"], logs
    for name in ("table.csv", "table.md"):
        assert (there / name).read_bytes() == (here / name).read_bytes(), logs
    assert next(csv.DictReader((there / "table.csv").open()))["runs"] == "2"
    assert not list(there.glob("*/*.lock"))
    # What is finished is not handed over again.
    assert ablate(there, "--arms=plain", "--launcher=slurm") == 0
    assert "all 2 runs are finished" in capsys.readouterr().out

    # W&B's own code makes an agent's command of the file.
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args, load_sweep_config

    assert ablate(there, "--launcher=wandb") == 0
    assert f"wandb sweep {there / 'sweep.yaml'}" in capsys.readouterr().out
    sweep = load_sweep_config(str(there / "sweep.yaml"))
    assert sweep["parameters"] == {"trial": {"values": ["headnorm/seed-0", "headnorm/seed-1"]}}
    arguments = create_sweep_command_args({"args": {"trial": {"value": "headnorm/seed-1"}}})["args"]
    words = create_sweep_command(sweep["command"])
    command = [word for w in words for word in (arguments if w == "${args}" else [w])]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"WANDB_MODE": "offline"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (there / "headnorm" / "seed-1" / "checkpoints" / "step-00000002").is_dir()
    assert not (there / "headnorm" / "seed-0").exists()


def test_a_sweep_is_as_wandb_documents_it(ablate, tmp_path):
    assert ablate(tmp_path / "out", "--launcher=wandb", "--set", "trainer.max_steps=4") == 0
    sweep = yaml.safe_load((tmp_path / "out" / "sweep.yaml").read_text())
    # docs.wandb.ai: sweep configuration options.
    assert set(sweep) <= {"name", "project", "description", "program", "method", "metric", "parameters", "command"}
    assert (sweep["method"], sweep["metric"]) == ("grid", {"name": "val/loss", "goal": "minimize"})
    assert sweep["project"] == "birthmark"
    assert all(isinstance(word, str) for word in sweep["command"])
    assert sweep["command"][-3:] == ["--set", "trainer.max_steps=4", "${args}"]
    values = sweep["parameters"]["trial"]["values"]
    assert values == ["plain/seed-0", "headnorm/seed-0", "plain/seed-1", "headnorm/seed-1"]


def test_an_option_that_is_given_stands_in_place_of_the_files_own(ablate, tmp_path):
    assert ablate(tmp_path / "out", "--launcher=slurm", "--sbatch", "job-name=mine", "gpus=1") == 0
    lines = (tmp_path / "out" / "array.sbatch").read_text().splitlines()
    # sbatch takes the last of two lines of an option.
    assert [line for line in lines if "job-name" in line] == ["#SBATCH --job-name=mine"]
    assert {"#SBATCH --gpus=1", "#SBATCH --requeue"} <= set(lines)


def test_numbers_as_slurm_writes_them():
    for numbers, expected in (([0], "0"), ([0, 1, 2, 5], "0-2,5"), ([1, 3, 4], "1,3-4"), (range(9), "0-8")):
        assert ranges(list(numbers)) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--submit"], "--submit: only --launcher slurm reads it"),
        (["--launcher=wandb", "--sbatch", "gpus=1"], "--sbatch: only --launcher slurm reads it"),
        (["--launcher=slurm", "--trial=0"], "--trial: --launcher slurm hands over all runs"),
        (["--launcher=wandb", "--summary"], "--summary: --launcher wandb hands over all runs"),
        (["--launcher=wandb", "--jobs=2"], "--jobs 2: as many runs of a sweep"),
        (["--launcher=slurm", "--sbatch", "gpus"], "--sbatch gpus: write OPTION=VALUE"),
        (["--launcher=slurm", "--sbatch", "time=1\ntouch x"], "--time 1 touch x: stands in a line of the file"),
        (["--launcher=slurm", "--sbatch", "array=0-9"], "--sbatch array=0-9: the array sets it"),
        (["--launcher=slurm", "--jobs=0"], "--jobs 0: give at least 1"),
        (["--launcher=ssh"], "launcher: 'ssh' is not one of"),
    ],
)
def test_what_no_launcher_can_do_is_one_line(ablate, tmp_path, arguments, expected, capsys):
    assert ablate(tmp_path / "out", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not (tmp_path / "out" / "array.sbatch").exists()


def test_without_an_sbatch_the_file_is_written_and_said(ablate, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(Path(tmp_path)))
    assert ablate(tmp_path / "out", "--launcher=slurm", "--submit") == 2
    assert "--submit: no sbatch on this machine" in capsys.readouterr().err
    assert (tmp_path / "out" / "array.sbatch").is_file()
