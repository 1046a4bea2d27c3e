"""What an interrupted build of one of DeepSpeed's operators leaves: its lock, for which torch would wait for ever."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

LOAD = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from birthmark.trainer.strategies.zero import load_operator
load_operator(ShareMemCommBuilder())
print("loaded")
"""


def load(python, folder):
    """A process that loads the operator, with its builds in ``folder``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([python, "-c", LOAD], env={**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)}, **pipes)


def test_the_lock_of_a_dead_build_is_removed_and_that_of_a_living_one_is_waited_for(tmp_path, python):
    from torch.utils.cpp_extension import get_default_build_root

    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    built = list(Path(get_default_build_root()).glob("*/deepspeed_shm_comm/deepspeed_shm_comm.so"))
    if built:  # else it is compiled here
        shutil.copytree(built[0].parent, lock.parent)
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    out, err = load(python, tmp_path).communicate(timeout=300)
    assert out == "loaded\n", err
    assert f"birthmark: {lock}: left by a build that was killed; removed\n" in err
    assert ("building DeepSpeed's deepspeed_shm_comm in" in err) == (not built)

    with lock.open("w"):
        process = load(python, tmp_path)
        line = next(line for line in process.stderr if line.startswith("birthmark: "))
        assert "waiting for another process" in line
        assert str(lock) in line
        assert lock.exists()
        lock.unlink()
        assert process.communicate(timeout=300)[0] == "loaded\n"
