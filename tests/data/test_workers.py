"""Processes that share work: results, errors, and that none is left."""

import json
import operator
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from birthmark.data.workers import in_processes
from birthmark.errors import RunError, UsageError
from birthmark.files import read_json, user_path


def test_every_job_is_done_in_another_process():
    found = dict(in_processes(abs, list(range(0, -20, -1)), 3))
    assert found == {number: number for number in range(20)}
    pids = {pid for _, pid in in_processes(_call, [os.getpid] * 4, 2)}
    assert os.getpid() not in pids


_call = operator.call if hasattr(operator, "call") else None


def test_one_process_works_here():
    assert list(in_processes(_call, [os.getpid] * 2, 1)) == [(0, os.getpid()), (1, os.getpid())]


def test_an_error_is_raised_here_in_its_own_words(tmp_path):
    with pytest.raises(RunError, match=r"b\.json: missing"):
        list(in_processes(read_json, [tmp_path / "b.json"] * 3, 2))
    with pytest.raises(UsageError, match="no home of such a user"):
        list(in_processes(user_path, ["~nobody-of-this-name/x"] * 3, 2))
    with pytest.raises(RuntimeError, match="JSONDecodeError"):
        list(in_processes(json.loads, ["1", "{", "3"], 2))


def test_a_process_that_is_killed_ends_the_work():
    with pytest.raises(RunError, match=r"data\.n_workers: a process that reads text ended \(killed by SIGKILL\)"):
        list(in_processes(_call, [partial(signal.raise_signal, signal.SIGKILL)] * 3, 2))


_SCRIPT = """
import time
from birthmark.data.workers import in_processes
import os, sys
if __name__ != "__main__":
    print("the script ran again", flush=True)
for _ in in_processes(time.sleep, [0.01, 600, 600], 2):
    print("one is done", flush=True)
"""


def test_none_outlives_the_process_that_started_it(tmp_path):
    (tmp_path / "script.py").write_text(_SCRIPT)
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "one is done\n"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(Path("/proc", child).exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path("/proc", child).exists() for child in children)
