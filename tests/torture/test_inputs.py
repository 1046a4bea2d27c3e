"""The harness for damaged and hostile inputs finds nothing in what is there, and finds what is planted."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

HERE = Path(__file__).parent

#: The first of seed 0.
N_CASES = 40

#: What is planted (planted_inputs.py) → how each of the harness's findings begins.
FOUND = {
    "no_schema": ("internal error", "silent: taken"),
    "no_seal": ("silent: taken, and another result",),
    "unpickles": ("touched",),
    "hangs": ("hang",),
    "crashes": ("crash: SIGSEGV",),
    "allocates": ("memory",),
    "throws": ("internal error",),
    "talks": ("a refusal that names none",),
    "writes": ("touched",),
    "says_nothing_of_devices": ("internal error",),
    "finds_modules_in_the_folder": ("touched", "no code of the folder"),
    "follows_names": ("touched", "a link out of the folder", "silent"),
    "hears_for_ever": ("hang",),
    "keeps_private": ("mode 600 of",),
    "writes_where_it_reads": ("internal error", "refused", "a refusal that names none"),
    "asks_the_clock": ("silent: taken, and another result",),
    "reads_holes": ("hang",),
}


@pytest.fixture(scope="module")
def torture(tmp_path_factory, python):
    """``torture(script, *arguments)``: run it in a process of its own on one example; what it printed, its status."""
    root = tmp_path_factory.mktemp("torture")

    def run(script, *arguments):
        # A fork of a process that runs has no failing device before its libc (devices.py).
        start = sys.executable if script.startswith("planted") else python
        command = [start, str(HERE / script), str(root), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SNAPSHOT_PAGES": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        return done.stdout + done.stderr[-3000:], done.returncode

    return run


def test_every_input_is_refused_in_a_sentence_or_does_what_it_says(torture):
    said, status = torture("inputs.py", 0, 0, N_CASES)
    assert f"{N_CASES} cases of seed 0" in said
    assert status == 0, said


@pytest.mark.slow
def test_faults_that_are_planted_are_found(torture):
    said, status = torture("planted_inputs.py")
    assert status == 0, said
    lines = [line.split("\t") for line in said.splitlines() if line.count("\t") == 2]
    assert {name: literal_eval(sound) for name, sound, _ in lines} == {name: [] for name in FOUND}
    for name, _, found in lines:
        assert any(one.startswith(FOUND[name]) for one in literal_eval(found)), (name, found)
