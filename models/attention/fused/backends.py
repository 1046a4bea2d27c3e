"""Fused attention operators of each device, and one autograd function over them whose log-sum-exp has a gradient.

torch's operators hand out the log-sum-exp, but their backward passes take a gradient of the output alone. The score
gradient of (output, log-sum-exp) is ``p ∘ (dp − Δ + g)`` with ``Δ = rowsum(dO ∘ O)`` and ``g`` the gradient of the
log-sum-exp, and all of them compute Δ from the O that they receive. So they get ``O − g·dO/‖dO‖²``, whose product with
dO is ``Δ − g``: no channel is added, and no operator runs on a wider head than in the forward pass. A row whose dO is 0
gets 1e-15 instead, too little to change any gradient of that row.

Keys beside the tokens', given by their scores and values, cost little. With the whole softmax's output in place of O
and the log-sum-exp over all keys in place of the tokens', the operators' backward passes give the gradients of the
tokens in the whole softmax: they recompute the weights from the log-sum-exp that they receive.

Legend: B sequences, H query heads, G key/value heads, T positions, N keys beside the tokens', K head width, V that of
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....errors import UsageError
from .rows import beside, gradients_beside

# ---------------------------------------------------------------- grouped heads
# Keys and values that several query heads share (grouped-query attention, arXiv 2305.13245).
#
# Legend: B sequences, H query heads, G key/value heads, S keys, K head width.


def over_heads(x_BGSK: Tensor, n_heads: int) -> Tensor:
    """Repeat keys or values for the query heads that share them, ``[B, H, S, K]``."""
    n_kv_heads = x_BGSK.shape[1]
    return x_BGSK if n_kv_heads == n_heads else x_BGSK.repeat_interleave(n_heads // n_kv_heads, dim=1)


# ---------------------------------------------------------------- operators

_aten = torch.ops.aten
#: Stands for every channel of an upstream gradient that is 0.
_NEXT_TO_NOTHING = 1e-15


def _summed(d_BHSK: Tensor, n_kv_heads: int) -> Tensor:
    """Sum gradients of repeated keys or values over the query heads that share them, ``[B, G, S, K]``."""
    return d_BHSK if d_BHSK.shape[1] == n_kv_heads else d_BHSK.unflatten(1, (n_kv_heads, -1)).sum(2)


def _widened(x: Tensor, extra: int, value: float = 0.0) -> Tensor:
    """Pad the last axis by ``extra`` elements. Skips F.pad for none, which would copy."""
    return F.pad(x, (0, extra), value=value) if extra else x


def as_wide(q: Tensor, k: Tensor, v: Tensor, width: int = 0, of_values: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Pad queries, keys and values with zeros: to one width, or to the given ones."""
    width = width or max(q.shape[-1], v.shape[-1])
    more = width - q.shape[-1]
    return _widened(q, more), _widened(k, more), _widened(v, (of_values or width) - v.shape[-1])


@dataclass(frozen=True)
class Backend:
    """A pair of fused operators, forward and backward, with the inputs that it accepts.

    Attributes:
        name: torch's name.
        dtypes: types of queries, keys and values.
        widest: head width up to which it runs.
        multiple: head widths are padded to a multiple of this.
        grouped: True if it reads shared keys and values from one place; others get copies while they run.
        windows: True if it takes a window.
        narrow_values: True if values may have fewer channels than keys; for others they are padded.
        here: function that says if it is available, and preferred, on the device of the given queries.
        for_output: True if it replaces scaled_dot_product_attention where only the output is wanted.
        one_layout: True if its backward pass takes a gradient that lies in memory as the output does, and no other.
        forward: (q, k, v, scale, causal, window) → output, log-sum-exp ``[B, H, T or more]``, and further inputs of its
            backward pass.
        backward: (dO, q, k, v, output, log-sum-exp, those further inputs, scale, causal, window) → dq, dk, dv.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    widest: int
    multiple: int
    grouped: bool
    windows: bool
    narrow_values: bool
    forward: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    here: Callable[[Tensor], bool] = lambda q_BHTK: True
    for_output: bool = False
    one_layout: bool = False

    def takes(self, q_BHTK: Tensor, window: int | None = None) -> bool:
        """Return True if it runs on queries of this type and width."""
        fits = q_BHTK.dtype in self.dtypes and q_BHTK.shape[-1] <= self.widest and (self.windows or window is None)
        return fits and self.here(q_BHTK)

    def padded(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pad queries, keys and values with zeros to the channels that it requires."""
        of_values = -(-v_BGSV.shape[-1] // self.multiple) * self.multiple
        width = max(-(-q_BHTK.shape[-1] // self.multiple) * self.multiple, of_values)
        return as_wide(q_BHTK, k_BGSK, v_BGSV, width, of_values if self.narrow_values else width)


# ------------------------------------------------------------------------------------------------------------------
# CPU


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse, ()


def _cpu_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: tuple[Tensor, ...], scale: float,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_out, q, k, v, out, lse, 0.0, causal, scale=scale
    )
    return dq, dk, dv


# ------------------------------------------------------------------------------------------------------------------
# CUDA: cuDNN's, twice as fast as FlashAttention-2 on the GPUs that it is written for; its log-sum-exp has one more axis


#: Head widths of cuDNN, and from the version on that was tried, where it still takes .7 of FlashAttention-2's time.
_CUDNN_WIDTH, _CUDNN_WIDE = 128, (91900, 256)


@torch.compiler.assume_constant_result
def _cudnn_takes(index: int, width: int) -> bool:
    """Decide like ``scaled_dot_product_attention``: False for deterministic runs, and with cuDNN turned off.

    A compiled graph keeps the answer until deterministic algorithms are turned on or off.
    """
    if not torch.cuda.is_available() or torch.are_deterministic_algorithms_enabled():
        return False
    version, widest = _CUDNN_WIDE
    if width > (widest if (torch.backends.cudnn.version() or 0) >= version else _CUDNN_WIDTH):
        return False
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability(index)[0] in (9, 10)


def _cudnn_is_the_choice(q_BHTK: Tensor) -> bool:
    if not q_BHTK.is_cuda or q_BHTK.shape[2] == 1:
        return False
    return _cudnn_takes(q_BHTK.device.index, q_BHTK.shape[-1])


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    out, lse, _, _, _, _, *random, _ = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse.view(q.shape[:3]), tuple(random)


def _cudnn_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: tuple[Tensor, ...], scale: float,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse.unsqueeze(-1), *more, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv


# ------------------------------------------------------------------------------------------------------------------
# CUDA: FlashAttention-2 (bf16), whose windows need the operators below scaled_dot_product_attention's


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    if window is None:
        out, lse, _, _, _, _, *random, _ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse, tuple(random)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *random, _ = _aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return out.transpose(1, 2), lse, tuple(random)


def _flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: tuple[Tensor, ...], scale: float,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if window is None:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *more, scale=scale
        )
        return dq, dk, dv
    d_out, q, k, v, out = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
    dq, dk, dv = _aten._flash_attention_backward(
        d_out, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *more,
        scale=scale, window_size_left=window - 1, window_size_right=0,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------------
# CUDA: the memory-efficient kernel (float32, and widths beyond flash); its log-sum-exp is padded to 32s, also in the
# backward pass


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    k, v = (over_heads(x, q.shape[1]) for x in (k, v))
    out, lse, *random = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse, tuple(random)


def _efficient_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, more: tuple[Tensor, ...], scale: float,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n_kv_heads, (k, v) = k.shape[1], (over_heads(x, q.shape[1]) for x in (k, v))
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, None, out, lse, *more, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, _summed(dk, n_kv_heads), _summed(dv, n_kv_heads)


# ------------------------------------------------------------------------------------------------------------------

_ANY = 1 << 30
#: By type of device, the first that takes the queries is used.
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "cpu": (
        Backend(
            "flash for CPU", (torch.float32, torch.float64, torch.bfloat16), _ANY, 1, True, False, False,
            _cpu_forward, _cpu_backward,
        ),
    ),
    "cuda": (
        Backend(
            "cuDNN", (torch.bfloat16,), _CUDNN_WIDE[1], 8, True, False, True,
            _cudnn_forward, _cudnn_backward, _cudnn_is_the_choice, for_output=True,
            # torch keeps cuDNN's graphs by the layouts of queries, keys and values alone.
            one_layout=True,
        ),
        Backend("flash", (torch.bfloat16,), 256, 8, True, True, False, _flash_forward, _flash_backward),
        Backend(
            "memory-efficient", (torch.float32, torch.bfloat16), _ANY, 8, False, False, False,
            _efficient_forward, _efficient_backward,
        ),
    ),
}  # fmt: skip


def backend_for(device: str, q_BHTK: Tensor, window: int | None = None) -> Backend:
    """Choose the operators for these queries on a type of device, with a window if one of them takes it.

    Raises:
        UsageError: the device has none.
    """
    for taken in (window, None):
        for backend in BACKENDS.get(device, ()):
            if backend.takes(q_BHTK, taken):
                return backend
    raise UsageError(f"attention in {str(q_BHTK.dtype).removeprefix('torch.')} on {device}: no fused kernel is known")


def _with_gradient_of_lse(out: Tensor, d_out: Tensor | None, d_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an output and upstream gradient whose product by rows equals that of the given ones, minus the
    log-sum-exp's gradient.
    """
    d_lse = d_lse.to(torch.promote_types(out.dtype, torch.float32))[..., None]
    if d_out is None:
        d_out = torch.zeros_like(out)
    size = torch.linalg.vector_norm(d_out, dim=-1, keepdim=True, dtype=d_lse.dtype)
    nothing = (size < _NEXT_TO_NOTHING) & (d_lse != 0)
    # The first operand decides the result's layout. (With ``out=`` a graph breaks here when it is compiled.)
    d_out = torch.lerp(d_out, d_out.new_full((), _NEXT_TO_NOTHING), nothing.to(d_out.dtype))
    size = torch.where(nothing, _NEXT_TO_NOTHING * out.shape[-1] ** 0.5, size)
    # Divided twice: the square of a small size has few digits, or none.
    share = torch.where(d_lse == 0, 0, d_lse / size / size)
    # In the type of the share, rounded once.
    return out.clone().addcmul_(d_out, share, value=-1), d_out


class FusedAttention(torch.autograd.Function):
    """Softmax attention on the operators of a :class:`Backend`.

    Returns the output ``[B, H, T, V]`` and the log-sum-exp of the tokens' scores ``[B, H, T]``. Keys beside the tokens'
    are given by their scores ``[B, H, T, N]`` and by their values ``[H, N, V]``, if these are not 0: then the output is
    the whole softmax's, and the log-sum-exp over all keys comes third.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        others: Tensor | None,
        values_of_others: Tensor | None,
        backend: Backend,
        scale: float,
        causal: bool,
        window: int | None,
    ) -> tuple[Tensor, ...]:
        """Save the tensors that the operator's backward pass needs; grouped keys and values without repeats."""
        ctx.widths, ctx.how = (q.shape[-1], v.shape[-1]), (scale, causal, window)
        ctx.backend, ctx.beside = backend, others is not None
        ctx.brings = values_of_others is not None
        q, k, v = backend.padded(q, k, v)
        out, lse, more = backend.forward(q, k, v, *ctx.how)
        # Asked for here: in the backward pass a compiler does not know strides, and copies gradients to know them.
        strides = out.stride()
        ctx.order = sorted(range(4), key=lambda axis: -strides[axis]) if backend.one_layout else None
        lse_BHT, total = lse[..., : q.shape[2]], None
        of_others: tuple[Tensor, ...] = ()
        if others is not None:
            of_others = (lse_BHT, others)
            if values_of_others is not None:
                values_of_others = _widened(values_of_others, out.shape[-1] - ctx.widths[1])
                of_others = (*of_others, values_of_others)
            out, total = beside(out, lse_BHT, others, values_of_others)
            # Padded as the operator's own is.
            lse = _widened(total, lse.shape[2] - q.shape[2], torch.inf)
        ctx.save_for_backward(q, k, v, out, lse, *of_others, *more)
        ctx.set_materialize_grads(False)
        out = out[..., : ctx.widths[1]] if out.shape[-1] > ctx.widths[1] else out
        # No None among them: torch 2.11 breaks a compiled graph at it.
        return (out, lse_BHT) if total is None else (out, lse_BHT, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of queries, keys, values, and of the other keys' scores and values."""
        q, k, v, out, lse, *more = ctx.saved_tensors
        d_out, d_lse, d_total = grads if ctx.beside else (*grads, None)
        d_others = d_values = values = None
        width, width_of_values = ctx.widths
        if d_out is not None:
            d_out = _widened(d_out.to(q.dtype), out.shape[-1] - width_of_values)
        if ctx.beside:
            lse_tokens, others, *more = more
            total = lse[..., : q.shape[2]]
            if ctx.brings:
                values, *more = more
            if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
                d_others, d_values = gradients_beside(d_out, out, total, d_total, others, values)
                if d_values is not None:
                    assert values is not None
                    d_values = d_values[..., :width_of_values].to(values.dtype)
            if d_lse is not None:
                # The weights in the softmax over tokens are those in the whole one, times a number for each row.
                d_lse = d_lse * (total - lse_tokens).exp()
            given = [d for d in (d_lse, d_total) if d is not None]
            d_lse = sum(given[1:], given[0]) if given else None
        if d_lse is not None:
            out, d_out = _with_gradient_of_lse(out, d_out, d_lse)
        if d_out is None:
            return (None,) * 9
        if ctx.order is not None:
            d_out = d_out.permute(ctx.order).contiguous().permute([ctx.order.index(axis) for axis in range(4)])
        of_each = ctx.backend.backward(d_out, q, k, v, out, lse, tuple(more), *ctx.how)
        dq, dk = (x[..., :width] for x in of_each[:2])
        dv = of_each[2][..., :width_of_values] if ctx.needs_input_grad[2] else None
        return dq, dk, dv, d_others, d_values, None, None, None, None
