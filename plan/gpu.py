"""Kernels and autocast of a GPU, for fake tensors on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..models.attention.fused import kernels
from ..models.attention.fused.backends import FusedAttention, backend_for

#: Functions that autocast runs in float32 on a GPU, and on a CPU in the dtype of its inputs: those that models call.
WIDE = {"layer_norm", "rms_norm", "norm", "softmax", "softplus", "logsumexp"}
WIDE |= {"exp", "log", "log2", "pow", "rsqrt", "sum", "cumsum"}
_LOW = (torch.bfloat16, torch.float16)


class _FusedRMSNorm(torch.autograd.Function):
    """Stand-in that keeps the tensors that the fused kernel keeps for its backward pass; it computes no values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, gain, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(gain)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    out: Tensor = FusedAttention.apply(q, k, v, None, None, backend_for("cuda", q), scale, is_causal, None)[0]
    return out


#: Functions that run another kernel on a GPU, by name.
KERNELS: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "rms_norm": _rms_norm,
}


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _LOW else value


class _OnGPU(TorchFunctionMode):
    """Dispatch mode with the kernels and autocast of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs)
        return KERNELS.get(name, func)(*args, **kwargs)


@contextmanager
def as_on(device: str) -> Iterator[None]:
    """Run passes over CPU tensors as on ``cuda``, or unchanged for ``cpu``. Only for fake tensors: the stand-ins for a
    GPU's kernels compute no values.
    """
    kernels.chosen_for = device
    try:
        if device == "cpu":
            yield
        else:
            with _OnGPU():
                yield
    finally:
        kernels.chosen_for = None
