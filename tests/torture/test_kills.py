"""Runs that are killed go on as if they had been left alone; and faults that are planted are found."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def printed(script, *arguments):
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments], check=False, capture_output=True, text=True, timeout=1800
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_killed_runs_go_on_as_if_left_alone():
    assert "6 trials, 0 failed" in (out := printed("kills.py", "0", "6", "single", "ddp")), out


@pytest.mark.slow  # about half an hour
def test_killed_runs_of_every_strategy_go_on_as_if_left_alone():
    assert "200 trials, 0 failed" in (out := printed("kills.py", "0", "200")), out


def test_planted_faults_are_found():
    found = dict(line.split(": ", 1) for line in printed("planted_faults.py").splitlines() if ": " in line)
    assert found.pop("nothing") == "None"
    expected = {
        "log_repeats_itself": "twice: metrics.jsonl step 5",
        "write_fails_unheard": "lost: checkpoints/step-00000008",
        "data_begin_anew": "differs: checkpoints/step-00000008",
        "second_signal_is_at_once": "exit status 1",
        "scratch_stays": "left over: .",
        "internal_error": "internal error: ",
        "rank_hangs": "rank 0 still runs after",
    }
    assert found.keys() == expected.keys()
    for plant, words in expected.items():
        assert words in found[plant], (plant, found[plant])
