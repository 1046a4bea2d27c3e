"""The limit of open files, in a process that may lose it."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from birthmark.errors import RunError
from birthmark.trainer.processes.launched_process import LaunchedProcess
from birthmark.trainer.processes.process_group import allow_sockets

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
try:
    allow_sockets(LaunchedProcess(5, 1024, 5, 8), engine=True)
    # As many as 1,023 others take, twice.
    pairs = [open("/dev/null") for _ in range(2 * 1023)]
    print("opened", len(pairs))
except RunError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(
    ("hard", "expected"),
    [
        (4096, "opened 2046"),
        (1024, "ulimit -n is 1024 at most, and each of 1024 processes needs 2176 open files: raise"),
    ],
)
def test_the_limit_is_raised_or_named(hard, expected, python):
    done = subprocess.run([python, "-c", SCRIPT, str(hard)], capture_output=True, text=True, check=True)
    assert expected in done.stdout
