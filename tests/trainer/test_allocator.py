"""Freed memory stays with the process: the next step's tensors fault nothing in."""

import os
import platform
import subprocess
import sys

import pytest

from birthmark.trainer.devices import growing_segments

SCRIPT = """
import resource
import torch
from birthmark.trainer.devices import keep_freed_memory

if {keep}:
    assert keep_freed_memory()
for step in range(12):  # it takes a few to find room for all
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(16 << 20) for _ in range(3)]  # 64 MiB each
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_a_later_step_faults_no_memory_in(python):
    faults = []
    for keep in (False, True):
        command = [python, "-c", SCRIPT.format(keep=keep)]
        faults.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert faults[1] < 0.05 * faults[0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere segments do not grow")
@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}])
def test_segments_grow_on_gpus_unless_the_environment_says_how_memory_is_allocated(monkeypatch, given):
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    for name in names:
        # Set first, so that it is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    def found():
        return {name: os.environ[name] for name in names if name in os.environ}

    with growing_segments():
        assert found() == (given or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert found() == given
