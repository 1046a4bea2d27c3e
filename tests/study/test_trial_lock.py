"""Processes that share a study's trials: one runs each, what failed is tried again, and the table tells of it."""

import dataclasses
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from birthmark.errors import RunError, UsageError
from birthmark.files import read_json, write_json
from birthmark.launch.cli import main
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.study.runner import _Runner, study_console
from birthmark.study.trial_lock import (
    STALE_SECONDS,
    Claim,
    Failed,
    add_failure,
    claim,
    failed_runs,
    failures_of,
    lock_of,
    owner_of,
    tries_file,
)
from birthmark.study.trials import chosen_trial
from birthmark.trainer.saved_config import write_config


@pytest.fixture
def trials(study_file, tmp_path):
    """The trials of a study of two arms, in the folder ``out``."""
    return arm_trials(read_arm_study(study_file(tmp_path)), tmp_path / "out")


@pytest.fixture(scope="module")
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_lock_is_kept_while_its_owner_lives_and_is_stale_when_it_is_gone(trials, tmp_path, gone, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    trial, out = trials[0], tmp_path / "out"
    lock = lock_of(trial)
    mine = claim(trial, out)
    assert isinstance(mine, Claim)
    here = read_json(lock)
    # This process lives: nobody else gets the trial, not even it itself.
    assert claim(trial, out) == here == owner_of(trial)
    mine.let_go()
    assert not lock.exists()
    assert owner_of(trial) is None

    nobody = {"run": 0, "run_started": "", "job": "", "restart": 0}
    far = {"host": "elsewhere", "pid": 1, "started": "1", **nobody}
    cases = {
        "its process is gone": ({**here, "pid": gone}, 0, True),
        "another process has its number": ({**here, "started": "7"}, 0, True),
        "the process that trains lives on": ({**here, "pid": gone, "run": os.getpid()}, 0, False),
        "the number of what trained is another's": ({**here, "pid": gone, "run": os.getpid()}, 0, True),
        "another host, heard of lately": (far, STALE_SECONDS - 100, False),
        "another host, silent": (far, STALE_SECONDS + 100, True),
        "an earlier start of this job": ({**far, "job": "5_1"}, 0, True),
        "an earlier start, by a lock without the count": (
            {name: value for name, value in far.items() if name != "restart"} | {"job": "5_1"},
            0,
            True,
        ),
        "another node of this job": ({**far, "job": "5_1", "restart": 2}, 0, False),
        "another node of this job, silent": ({**far, "job": "5_1", "restart": 2}, STALE_SECONDS + 100, True),
        "another job": ({**far, "job": "6_1"}, 0, False),
    }
    for name, (owner, silent, stale) in cases.items():
        if name.startswith("the process that trains"):
            owner = {**owner, "run_started": here["started"]}
        monkeypatch.setenv("SLURM_JOB_ID", "5_1")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        write_json(lock, owner)
        then = lock.stat().st_mtime - silent
        os.utime(lock, (then, then))
        found = claim(trial, out)
        assert isinstance(found, Claim) == stale, name
        if stale:
            found.let_go()
    lock.write_text("{")
    with pytest.raises(RunError, match=r"seed-0\.lock: damaged"):
        claim(trial, out)


def test_a_claim_that_was_taken_over_is_not_let_go_and_a_living_one_is_touched(trials, tmp_path, monkeypatch):
    trial, out = trials[0], tmp_path / "out"
    mine = claim(trial, out)
    mine.hand_to(os.getpid())
    assert read_json(lock_of(trial))["run"] == os.getpid()
    os.utime(lock_of(trial), (1, 1))
    mine.keep()
    assert lock_of(trial).stat().st_mtime == 1
    monkeypatch.setattr("birthmark.study.trial_lock.TOUCH_SECONDS", 0.0)
    mine.keep()
    assert lock_of(trial).stat().st_mtime > 1
    other = {**read_json(lock_of(trial)), "host": "elsewhere"}
    write_json(lock_of(trial), other)
    mine.let_go()
    assert read_json(lock_of(trial)) == other


def test_processes_that_ask_at_once_never_get_the_same_trial(study_file, tmp_path, as_ranks):
    file = study_file(tmp_path, init_seeds=list(range(5)))
    script = """
import sys
from pathlib import Path
from birthmark.study.arms.trials import read_arm_study
from birthmark.study.arms.trials import arm_trials
from birthmark.study.trial_lock import Claim, claim

_, rank, file, out = sys.argv
trials = arm_trials(read_arm_study(Path(file)), Path(out))
mine = [trial.label for trial in trials if isinstance(claim(trial, Path(out)), Claim)]
Path(out, f"{rank}.taken").write_text("\\n".join(mine))
# All stay until all have asked: a process that has ended has let go.
import time
while len(list(Path(out).glob("*.taken"))) < 3:
    time.sleep(0.01)
"""
    outputs, statuses = as_ranks(script, file, tmp_path / "out", n=3)
    assert list(statuses) == [0] * 3, outputs
    taken = [(tmp_path / "out" / f"{rank}.taken").read_text().split() for rank in range(3)]
    everything = [label for labels in taken for label in labels]
    assert len(everything) == len(set(everything)) == 10


def test_a_trial_that_another_process_has_run_with_another_config_is_in_no_table(trials, tmp_path):
    """Two commands started at once, with different --set, ended well with a table of runs of both."""
    (trial, *_), out = trials, tmp_path / "out"
    runner = _Runner([trial], 1, study_console(out), out, 0, wait=True)
    other = dataclasses.replace(trial.config, optim=dataclasses.replace(trial.config.optim, lr=0.5))
    write_config(other, trial.run.config)
    trial.run.birth.write_text("{}")
    trial.run.checkpoint(trial.config.trainer.max_steps).mkdir(parents=True)
    with pytest.raises(UsageError, match=r"plain/seed-0: a run of another config \(optim\.lr 0\.5 there"):
        runner.run()
    assert not lock_of(trial).exists()


def test_a_trial_is_chosen_by_name_or_place(trials):
    assert [chosen_trial(trials, str(i)).label for i in range(4)] == [trial.label for trial in trials]
    assert chosen_trial(trials, "headnorm/seed-1") is trials[3]
    for name, expected in (("4", "give 0 to 3, or a name such as plain/seed-0"), ("plain/seed-O", "did you mean")):
        with pytest.raises(UsageError, match=f"--trial {name}: no such trial; {expected}"):
            chosen_trial(trials, name)
    # Arms of one config share a run, and have one place.
    assert chosen_trial([trials[0], trials[0], trials[2]], "1") is trials[2]


def test_failed_starts_are_told_in_the_order_of_the_trials(trials):
    assert failed_runs(trials) == ""
    tries_file(trials[0]).parent.mkdir(parents=True)
    for reason in ("no space left", "killed\u2028by SIGKILL"):
        add_failure(trials[0], Failed(1, reason))
    assert failed_runs(trials) == "Failed starts: plain/seed-0 2 times, not finished (last: killed\u2028by SIGKILL)."
    for damaged in (b'{"status": 1}\n', b'{"status": 1e999, "reason": ""}\n', b"\xff\n", b"[" * 9999 + b"\n"):
        tries_file(trials[0]).write_bytes(damaged)
        with pytest.raises(RunError, match=r"failed\.jsonl.*(line 1 is damaged|UTF-8)"):
            failures_of(trials[0])


def test_a_failed_run_is_tried_again_and_the_last_writes_the_table(study_file, tmp_path, python, monkeypatch, capsys):
    # As a machine of a cluster fails: the first start of a run dies, another does not.
    flaky = tmp_path / "flaky"
    flaky.write_text(f'#!/bin/sh\n[ -e "{tmp_path}/met" ] || {{ : > "{tmp_path}/met"; echo boom; exit 3; }}\n')
    flaky.open("a").write(f'exec "{python}" "$@"\n')
    flaky.chmod(flaky.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(flaky))
    monkeypatch.setattr("birthmark.study.arms.run.draw_study", lambda study, results, out: [])
    broken = {"plain": {}, "broken": {"model.vocab_size": 4}}
    file, out = study_file(tmp_path, init_seeds=[0], arms=broken), tmp_path / "out"
    ablate = ["ablate", str(file), f"--out={out}"]
    assert main([*ablate, "--trial=plain/seed-0", "--retries=0"]) == 1
    assert not (out / "plain" / "seed-0").exists()
    Path(tmp_path, "met").unlink()
    assert main([*ablate, "--trial=0"]) == 0
    assert "plain/seed-0  failed, and is tried again: boom" in capsys.readouterr().out
    # Another trial is missing: the tables are left to who makes it.
    assert not (out / "table.md").exists()
    # What another start cannot mend has one.
    assert main([*ablate, "--retries=5"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("broken/seed-0  failed: ") == 1
    assert "tried again" not in printed.out
    note = (out / "table.md").read_text().splitlines()[-1]
    assert note.startswith("Failed starts: plain/seed-0 2 times, then finished (last: boom); broken/seed-0 once, not")
    assert "Failed starts: plain/seed-0 2 times" in (out / "index.html").read_text()
    assert not list(out.glob("*/*.lock"))
    assert main([*ablate, "--trial=3"]) == 2
    assert main([*ablate, "--retries=-1"]) == 2
    assert main([*ablate, "--trial=0", "--summary"]) == 2
    # A trial that somebody else runs is left to it.
    (out / "plain" / "seed-0.lock").write_text("")
    study = read_arm_study(file)
    (trial, _) = arm_trials(study, out)
    lock_of(trial).unlink()
    claim(trial, out)
    for folder in trial.run.checkpoints():
        for inner in folder.iterdir():
            inner.unlink()
        folder.rmdir()
    capsys.readouterr()
    assert main([*ablate, "--trial=0"]) == 1
    assert f"plain/seed-0: process {os.getpid()} on" in capsys.readouterr().err
