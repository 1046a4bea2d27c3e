"""Places where tests run this project's kernels in Triton: its interpreter on a CPU, and a GPU.

Triton decides as it is imported whether it interprets: ``make kernels`` runs these tests alone.
"""

import os
from importlib import import_module
from importlib.util import find_spec

import pytest

from birthmark import kernel_devices

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
_CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
#: Devices of a test of a kernel: the interpreter's, and a GPU.
DEVICES = [pytest.param("cpu", marks=pytest.mark.interpreter), _CUDA]
#: Ways of a function that kernels or torch's operators do.
WAYS = ["operators", pytest.param("interpreter", marks=pytest.mark.interpreter), _CUDA]


def interpret(monkeypatch, module, **sizes):
    """Have tensors of a CPU take the kernels of a module; ``sizes`` of their tiles that cut a head into several."""
    monkeypatch.setattr(kernel_devices, "chosen_for", "cuda")
    kernels = import_module(f"{module.__name__}_kernel")
    for name, value in sizes.items():
        monkeypatch.setattr(kernels, name, value)
