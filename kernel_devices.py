"""Kind of device that kernels are chosen for, and the kinds of kernels that run there."""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

#: Type of the device that kernels are chosen for; by default the one that tensors lie on. Set while a pass is planned.
chosen_for: str | None = None
#: Compute capability that Triton takes from on; older GPUs have no bf16 either.
_OLDEST = (8, 0)


def runs_on(x: Tensor) -> str:
    """Return the type of the device of a tensor, or of the one that a pass is planned for."""
    return chosen_for or x.device.type


def trains_on_cpu(*tensors: Tensor) -> bool:
    """Return True if any of these needs a gradient in a step on a CPU that is not compiled, for which this project's
    backward passes of cheap operators exist.
    """
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return wanted and runs_on(tensors[0]) == "cpu" and not torch.compiler.is_compiling()


@cache
def _missing_for_triton() -> str:
    if find_spec("triton") is None:
        return "Triton is missing, pip install triton"
    compilers = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler ({compilers[0]}), apt install gcc"
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(None)) < _OLDEST:
        newest, oldest = (".".join(map(str, version)) for version in (capability, _OLDEST))
        return f"the GPU is of compute capability {newest}, Triton takes {oldest} and newer"
    return ""


@torch.compiler.assume_constant_result
def why_not_triton(device_type: str) -> str:
    """Return the reason why kernels in Triton do not run on a type of device; empty if they do."""
    return _missing_for_triton() if device_type == "cuda" else f"the device is {device_type}"


def runs_triton(x: Tensor) -> bool:
    """Return True if kernels in Triton run where a tensor lies. A plan assumes so."""
    return runs_on(x) == "cuda" and (chosen_for is not None or not why_not_triton("cuda"))


def fuses_rows(x: Tensor) -> bool:
    """Return True if kernels in Triton take rows of this type in place of separate operators; a compiler makes such
    kernels itself.
    """
    # First: a compiler that is asked for the strides of a gradient copies it.
    if torch.compiler.is_compiling():
        return False
    fits = x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.stride(-1) == 1
    return fits and runs_triton(x)
