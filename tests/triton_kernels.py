"""Places where tests run this project's kernels in Triton: its interpreter on a CPU, and a GPU.

Triton decides as it is imported whether it interprets: run a file alone, with ``TRITON_INTERPRET=1``.
"""

import os
from importlib.util import find_spec

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
#: Mark of a test that needs the interpreter.
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1 and Triton, which is 1 GB")
#: Devices of a test of a kernel: the interpreter's, and a GPU.
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.cuda)]
