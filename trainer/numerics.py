"""Numerics of a run: its precision, products in float32, determinism. Decided once, from its config and device."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import UsageError
from ..kernel_devices import why_not_triton
from ..measure.ranks import from_rank_zero
from ..measure.records import RunDir
from ..models.attention.attention import LinearGate
from ..models.attention.fused import native
from ..models.decoder import Decoder
from ..models.experts.routed_mlp import Mixture
from ..models.init import Linear
from ..models.norms import NormGate
from .config import TrainerConfig
from .saved_config import DECIDED, read_saved_fields

# ---------------------------------------------------------------- fp8
# Matrix products of the blocks' linear maps in fp8, as torchao computes them.
#
# Each map stays the same module, with its name, weight and birth: only its training pass uses another function.
# Tables, head, norms and attention stay in bf16, as in torchtitan; so do routers and gates, whose outputs steer other
# parts, and all measurements.

#: GPUs multiply fp8 from this compute capability on.
CAPABILITY = (8, 9)

#: Divisor of the sides of a product.
_MULTIPLE = 16


def fp8_problem(device: torch.device) -> str | None:
    """Say why fp8 is not available, with the remedy; None if it is."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        return "needs a GPU of compute capability 8.9 or more (H100, L40S, RTX 4090): give bf16"
    if importlib.util.find_spec("torchao") is None:
        return "needs torchao: pip install torchao, or give bf16"
    return None


def _deciding_maps(model: Decoder) -> set[nn.Module]:
    """Return the maps of routers and gates, including gates of norms."""
    routers: set[nn.Module] = {module.router for module in model.modules() if isinstance(module, Mixture)}
    gates = (module for module in model.modules() if isinstance(module, (LinearGate, NormGate)))
    return routers.union(*(gate.modules() for gate in gates))


def use_fp8(model: Decoder, *, emulate: bool = False) -> None:
    """Let training passes of the blocks' linear maps multiply in fp8: weights, inputs and gradients scaled by their
    largest elements. Maps with a side that is no multiple of 16 stay as they are, and so do routers and gates.

    Args:
        model: the model; its weights may be sharded: a pass multiplies with the gathered ones.
        emulate: round to fp8, and multiply in the inputs' dtype: on devices that have no fp8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # Padded, since the tokens of a micro-batch are a side too.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    deciding = _deciding_maps(model)
    for module in model.blocks.modules():
        if not isinstance(module, Linear) or module in deciding:
            continue
        if module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0:
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            in_fp8 = convert_to_float8_training(nn.Sequential(plain), config=config)[0]
            # On the instance: a strategy may exchange the class.
            module.product = partial(_product, module, in_fp8)  # type: ignore[method-assign]


def _product(linear: Linear, in_fp8: nn.Module, x: Tensor) -> Tensor:
    """Multiply in fp8 in training; otherwise use the map's own product."""
    # An expert without tokens gets no rows, which have no largest element.
    if not linear.training or x.numel() == 0:
        return Linear.product(linear, x)
    # Asked for now: a sharded weight is another tensor in each pass.
    product: Tensor = functional_call(in_fp8, dict(linear.named_parameters(recurse=False)), (x.contiguous(),))
    return product


# ---------------------------------------------------------------- numerics of a run
# Its precision, products in float32, determinism. Decided once, from its config and device.


def fast_in_bf16(device: torch.device) -> bool:
    """Return True if a device has units for bf16: GPUs from compute capability 8.0 on, CPUs with AVX-512 BF16
    or AMX.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # Public names (torch.cpu.get_capabilities) came after the oldest torch that we run with.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def decide(config: TrainerConfig, device: torch.device, begun: RunDir | None = None) -> TrainerConfig:
    """Return the config with values in place of ``auto``: those of the resumed run, else those in which the device is
    fast.

    Args:
        config: the requested config.
        device: device of the run.
        begun: the run that is resumed, if any.

    Raises:
        UsageError: the device does not support the config.
    """
    if begun is not None:
        saved = from_rank_zero(partial(read_saved_fields, begun))
        names = [name for name in DECIDED if getattr(config, name.removeprefix("trainer.")) == "auto"]
        config = replace(config, **{name.removeprefix("trainer."): saved[name] for name in names})
    if config.precision == "auto":
        config = replace(config, precision="bf16" if fast_in_bf16(device) else "fp32")
    if config.gather == "auto" and config.reads("gather"):
        config = replace(config, gather=config.gathers_in)
    if found := [*config.problems(), *device_problems(config, device)]:
        raise UsageError("; ".join(found))
    return config


def device_problems(config: TrainerConfig, device: torch.device) -> list[str]:
    """List the parts of a config that this device does not support, one line each, with the remedy."""
    found = []
    if config.matmul == "tf32" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        found.append(
            "trainer.matmul is tf32, which only GPUs of compute capability 8.0 or more have: leave it out, or give ieee"
        )
    if config.precision == "fp8" and (why := fp8_problem(device)):
        found.append(f"trainer.precision is fp8, which {why}")
    if config.compile != "no" and (missing := _missing_compiler(device)):
        found.append(f"trainer.compile is {config.compile}, which needs {missing}: give no")
    return found


def _missing_compiler(device: torch.device) -> str | None:
    """Name the tools for torch.compile that this machine lacks; None if it has all."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton and a GPU of compute capability 7.0 or more"
    compiler = os.environ.get("CXX", "g++")
    there = any(map(shutil.which, (compiler, "clang++")))
    return None if there else f"a C++ compiler ({compiler}; apt install g++)"


def decisions(asked: TrainerConfig, config: TrainerConfig, device: torch.device) -> list[str]:
    """List the choices made for ``auto``, and other departures of the device from the default, one line each."""
    lines = []
    if asked.precision == "auto":
        lines.append(f"precision: {config.precision} (trainer.precision auto); config.yaml records it")
    if asked.gather == "auto" and config.gather == "bf16":
        lines.append(
            "weights: gathered in bf16, as precision is (trainer.gather auto); snapshots measure them as they are used"
        )
    if config.matmul == "tf32":
        lines.append("float32 products: rounded to TF32, in snapshots too (trainer.matmul)")
    if config.precision == "bf16" and not fast_in_bf16(device):
        lines.append("precision: bf16, for which this device has no units; fp32 is faster (trainer.precision)")
    if device.type == "cpu" and config.precision == "bf16" and (why := native.why_not()):
        lines.append(f"attention and activations in bf16: by torch's operators in place of our kernels in C ({why})")
    if device.type == "cuda" and (why := why_not_triton("cuda")):
        lines.append(f"kernels in Triton: torch's operators, which are slower, in their place ({why})")
    if config.deterministic and device.type == "cuda":
        lines.append("deterministic: runs and resumes on the same GPUs and libraries are equal bit for bit")
    return lines


@contextmanager
def numerics(config: TrainerConfig, device: torch.device) -> Iterator[None]:
    """Set torch's process-wide switches for the length of a run. They do not concern a CPU, where runs are
    deterministic and products are IEEE's anyway.
    """
    if device.type != "cuda":
        yield
        return
    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    products, strict = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    fill, flags = memory.fill_uninitialized_memory, (cudnn.deterministic, cudnn.benchmark)
    torch.set_float32_matmul_precision("high" if config.matmul == "tf32" else "highest")
    if config.deterministic:
        # Read when cuBLAS is first used; torch refuses other values.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        # Only code that reads unwritten memory would differ.
        memory.fill_uninitialized_memory = False
        cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.use_deterministic_algorithms(strict)
        memory.fill_uninitialized_memory = fill
        cudnn.deterministic, cudnn.benchmark = flags
