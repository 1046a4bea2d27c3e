"""Places where tests run this project's kernels in Triton: its interpreter on a CPU, and a GPU.

Triton decides as it is imported whether it interprets: run a file alone, with ``TRITON_INTERPRET=1``.
"""

import os
from importlib import import_module
from importlib.util import find_spec

import pytest

from birthmark import kernel_devices

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
#: Mark of a test that needs the interpreter.
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1 and Triton, which is 1 GB")
#: Devices of a test of a kernel: the interpreter's, and a GPU.
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
#: Ways of a function that kernels or torch's operators do.
WAYS = ["operators", pytest.param("interpreter", marks=interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]


def interpret(monkeypatch, module, **sizes):
    """Have tensors of a CPU take the kernels of a module; ``sizes`` of their tiles that cut a head into several."""
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    kernels = import_module(f"{module.__name__}_kernel")
    for name, value in sizes.items():
        monkeypatch.setattr(kernels, name, value)
