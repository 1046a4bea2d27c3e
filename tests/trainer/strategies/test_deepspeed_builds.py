"""Builds of DeepSpeed's operators, and the lock that a killed build leaves, for which torch would wait for ever."""

import importlib.util
import os
import subprocess

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

#: Loads an operator that is compiled in a moment, by torch as DeepSpeed's builders do.
LOAD = """
import os, sys
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
from torch.utils.cpp_extension import load
from birthmark.trainer.strategies.zero import load_operator

class Builder:
    name = "small_operator"

    def load(self, verbose):
        print("in", load(self.name, [sys.argv[1]], verbose=verbose, is_python_module=False))

load_operator(Builder())
print("loaded")
"""


def load(python, folder):
    """A process that loads the operator, with its builds in ``folder``."""
    (folder / "small.cpp").write_text("int small() { return 1; }\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder)}
    return subprocess.Popen([python, "-c", LOAD, str(folder / "small.cpp")], env=environment, **pipes)


def test_the_lock_of_a_dead_build_is_removed_and_that_of_a_living_one_is_waited_for(tmp_path, python):
    lock = tmp_path / "small_operator" / "lock"
    lock.parent.mkdir()
    lock.touch()
    out, err = load(python, tmp_path).communicate(timeout=300)
    assert out == "loaded\n", err
    assert f"birthmark: {lock}: left by a build that was killed; removed\n" in err
    assert f"birthmark: building DeepSpeed's small_operator in {lock.parent}, this once" in err

    with lock.open("w"):
        process = load(python, tmp_path)
        line = next(line for line in process.stderr if line.startswith("birthmark: "))
        assert "waiting for another process" in line
        assert str(lock) in line
        assert lock.exists()
        lock.unlink()
        out, err = process.communicate(timeout=300)
        assert out == "loaded\n"
        assert "building" not in err


def test_a_strategy_of_deepspeed_compiles_nothing_on_a_cpu(python, tmp_path):
    code = (
        "import torch, torch.distributed as dist; from birthmark.trainer.strategies.zero import prepare_deepspeed;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "prepare_deepspeed(torch.device('cpu')); print(dist.get_world_size())"
    )
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout, list(tmp_path.iterdir())) == ("1\n", []), done.stderr
