"""Activations of the feed-forward half of a block, alone or multiplied with a tensor (gated); and their gradients.

Separate operators read and write every number several times, and torch's GELU in bf16 on a CPU takes longer than that.
A GPU has a kernel in Triton for SwiGLU's product (``gated_kernel.py``). A CPU in bf16 looks smooth activations up:
there are 65,536 numbers (``activations.c``). Both compute in float32, round once, and keep their inputs alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernel_devices import fuses_rows, runs_on
from .c_library import kernel

#: Activations by name; a gated MLP applies its own to the gate.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "relu2": lambda x: F.relu(x).square(),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_aten = torch.ops.aten

#: Gradient of an activation's input, given that of its output and the input.
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda d, x: d * (x > 0),
    "gelu": lambda d, x: _aten.gelu_backward(d, x),
    "silu": lambda d, x: _aten.silu_backward(d, x),
    "tanh": lambda d, x: _aten.tanh_backward(d, x.tanh()),
    "identity": lambda d, x: d,
    "relu2": lambda d, x: 2 * d * F.relu(x),
    "gelu_tanh": lambda d, x: _aten.gelu_backward(d, x, approximate="tanh"),
}


def activated(activation: str, x: Tensor, factor: Tensor | None = None) -> Tensor:
    """Apply the named activation, and multiply with a tensor of the shape of ``x``, if given."""
    if _has_kernel(activation, x, factor):
        found: Tensor = _Activated.apply(activation, x, factor)
        return found
    y = ACTIVATIONS[activation](x)
    return y if factor is None else y * factor


def _has_kernel(activation: str, x: Tensor, factor: Tensor | None) -> bool:
    alike = factor is None or (factor.dtype == x.dtype and factor.is_contiguous())
    if not alike or not x.is_contiguous():
        return False
    if factor is not None and activation == "silu" and fuses_rows(x):
        return True
    return activation in _LOOKED_UP and x.dtype == torch.bfloat16 and runs_on(x) == "cpu" and _is_built()


class _Activated(torch.autograd.Function):
    """Autograd function of :func:`activated` by the kernel of the device."""

    @staticmethod
    def forward(ctx: Any, activation: str, x: Tensor, factor: Tensor | None) -> Tensor:
        ctx.activation, ctx.looks_up = activation, factor is None or not fuses_rows(x)
        ctx.save_for_backward(x, factor)
        found: Tensor = _look_up(activation, x, factor) if ctx.looks_up else _product(x, factor)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[None, Tensor, Tensor | None]:
        x, factor = ctx.saved_tensors
        given = d.contiguous(), x, factor
        dx, d_factor = _look_up_gradients(ctx.activation, *given) if ctx.looks_up else _gradients(*given)
        return None, dx, None if factor is None else d_factor


# ---------------------------------------------------------------- SwiGLU's product on a GPU


@torch.library.custom_op("birthmark::silu_product", mutates_args=())
def _product(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    from .gated_kernel import product

    y = torch.empty_like(g)
    product(g, u, y)
    return y


@_product.register_fake
def _(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(g)


@torch.library.custom_op("birthmark::silu_product_gradients", mutates_args=())
def _gradients(d: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from .gated_kernel import gradients

    dg, du = torch.empty_like(g), torch.empty_like(u)
    gradients(d, g, u, dg, du)
    return dg, du


@_gradients.register_fake
def _(d: torch.Tensor, g: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(g), torch.empty_like(u)


# ---------------------------------------------------------------- smooth activations in bf16 on a CPU, looked up

_SOURCE = Path(__file__).with_suffix(".c")
#: Activations whose formula takes longer than a look at a table.
_LOOKED_UP = ("gelu", "gelu_tanh", "silu", "tanh")


@torch.compiler.assume_constant_result
def _is_built() -> bool:
    return isinstance(kernel(_SOURCE), ctypes.CDLL)


@cache
def _tables(activation: str) -> tuple[Tensor, Tensor]:
    """Compute value and derivative at every bf16 number, ordered by its bits: float32 ``[65536]``, from float64."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    return ACTIVATIONS[activation](x).float(), DERIVATIVES[activation](torch.ones_like(x), x).float()


def _call(name: str, n: int, *tensors: Tensor | None) -> None:
    library = kernel(_SOURCE)
    assert isinstance(library, ctypes.CDLL), library
    addresses = (None if x is None else ctypes.c_void_p(x.data_ptr()) for x in tensors)
    getattr(library, f"birthmark_{name}")(ctypes.c_int64(n), *addresses)


@torch.library.custom_op("birthmark::look_up", mutates_args=(), device_types="cpu")
def _look_up(activation: str, x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    y = torch.empty_like(x)
    _call("activation", x.numel(), _tables(activation)[0], x, factor, y)
    return y


@_look_up.register_fake
def _(activation: str, x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("birthmark::look_up_gradients", mutates_args=(), device_types="cpu")
def _look_up_gradients(
    activation: str, d: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, d_factor = torch.empty_like(x), x.new_empty(0) if factor is None else torch.empty_like(x)
    _call("activation_gradients", x.numel(), *_tables(activation), d, x, factor, dx, d_factor)
    return dx, d_factor


@_look_up_gradients.register_fake
def _(
    activation: str, d: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0) if factor is None else torch.empty_like(x)
