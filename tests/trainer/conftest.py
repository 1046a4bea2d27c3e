import json

import pytest

# Each line of its last argument: a run's folder, whether it goes on, and the fields that differ from the config's.
# All runs share one process group: to join and to leave takes a moment each time.
_RUNS = """
import functools, json, sys
from pathlib import Path

import torch

from birthmark.measure.records import RunDir
from birthmark.trainer.config_file import read_config
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.run import pretrain

# What hooks and checkpoints make of a graph is tested here. Code that is built of one is in tests/trainer/test_run.py,
# and takes longer than all runs together.
torch.compile = functools.partial(torch.compile, backend="aot_eager")

file, runs = sys.argv[1:]
#BEFORE
with join_process_group(launched_process(), torch.device("cpu")):
    for line in Path(runs).read_text().splitlines():
        folder, resume, flags = json.loads(line)
        overrides = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        pretrain(read_config(file, overrides), RunDir(Path(folder)), resume=resume)
"""


@pytest.fixture(scope="session")
def launch_runs(forked, tmp_path_factory):
    """``launch_runs(file, runs, n=2, before="")``: train all ``runs``, (folder, resume, flags), of a config's file in
    one launch, after the lines ``before``, which see the folder of the run that trains as ``folder``.

    Starting processes takes many times longer than small runs do.
    """

    def launch(file, runs, n=2, before=""):
        folder = tmp_path_factory.mktemp("launch")
        (folder / "script.py").write_text(_RUNS.replace("#BEFORE", before))
        (folder / "runs.jsonl").write_text("".join(json.dumps([str(path), *rest]) + "\n" for path, *rest in runs))
        forked(folder / "script.py", file, folder / "runs.jsonl", n=n)

    return launch
