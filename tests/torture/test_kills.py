"""Runs that are killed go on as if they had been left alone; and faults that are planted are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def printed(python):
    """``printed(script, *arguments, whole=True)``: what it prints; whole runs draw their snapshot's page.

    That takes most of such a run's time, and most blows would fall into it.
    """

    def run(script, *arguments, whole=True):
        # A fork of a process that runs has no failing device before its libc (devices.py).
        command = [sys.executable if script.startswith("planted") else python, HERE / script, *arguments]
        environment = {**os.environ, **({"SNAPSHOT_PAGES": "1"} if whole else {})}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=3600, env=environment)
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run


def test_killed_runs_go_on_as_if_left_alone(printed):
    assert "2 trials, 0 failed" in (out := printed("kills.py", "0", "2", "single", whole=False)), out


@pytest.mark.slow  # about half an hour
def test_killed_runs_of_every_strategy_go_on_as_if_left_alone(printed):
    assert "200 trials, 0 failed" in (out := printed("kills.py", "0", "200")), out


@pytest.mark.slow  # half a minute, and as much of a second core
def test_planted_faults_are_found(printed):
    """And without one, a run goes on from wherever it was struck."""
    found = dict(line.split(": ", 1) for line in printed("planted_kills.py").splitlines() if ": " in line)
    expected = {
        "nothing _killed_at_6": "None",
        "nothing _stopped_twice_at_6": "None",
        "nothing _killed_while_measuring": "None",
        "nothing _killed_at_the_end": "None",
        "log_repeats_itself _killed_at_6": "twice: metrics.jsonl step 5",
        "write_fails_unheard _left_alone": "lost: checkpoints/step-00000008",
        "data_begin_anew _killed_at_6": "differs: checkpoints/step-00000008",
        "second_signal_is_at_once _stopped_twice_at_6": "no checkpoint",
        "scratch_stays _left_alone": "left over: .",
        "internal_error _left_alone": "internal error: ",
        "rank_hangs _left_alone": "rank 0 still runs after",
        "nothing _damaged_between": "None",
        "verifies_nothing _damaged_between": "silent: goes on from step-00000008",
        "nothing _quota_of_4_kib": "None",
        "says_nothing_of_devices _quota_of_4_kib": "Disk quota exceeded",
    }
    assert {name: words if words in found[name] else found[name] for name, words in expected.items()} == expected
