"""Causal attention in bf16 by this project's kernel ``causal.c``, on CPUs that have AVX-512 BF16 instructions.

Between torch's products every score goes through main memory; here a tile of scores stays in the cache, and the
products of bf16 numbers add in float32 (benchmarks/results/causal_attention.md has the times of both). They are
registered operators, so that a compiled graph calls them unchanged.

Legend: B sequences, H query heads, G key/value heads, T positions, K head width, V that of values.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...c_library import kernel

_SOURCE = Path(__file__).with_name("causal.c")


@torch.compiler.assume_constant_result
def is_built() -> bool:
    """Return True if the kernel runs on this machine; compiles it at the first call."""
    return not why_not()


def why_not() -> str:
    """Return the reason why the kernel does not run on this machine; empty if it does."""
    library = kernel(_SOURCE)
    return library if isinstance(library, str) else ""


class _Tensor(ctypes.Structure):
    """``tensor`` struct of the C file."""

    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("sequence", "head", "position"))]


class _Attention(ctypes.Structure):
    """``attention`` struct of the C file."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("n_sequences", "n_heads", "n_kv_heads", "length", "width", "value_width", "window")
        ),
        ("scale", ctypes.c_float),
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        *((name, ctypes.c_void_p) for name in ("rest", "lse", "squares")),
        *((name, _Tensor) for name in ("d_out", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("d_lse", "d_squares")),
    ]


def _call(name: str, window: int, scale: float, q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None) -> None:
    """Call a function of the kernel. Tensors in bf16 are ``[B, heads, T, width]``, their last axis contiguous. The
    others are contiguous: ``[B, H, T]`` in float32, and the remainder of the output beyond bf16, ``[B, T, H, V]`` in
    int8. None, or a tensor without elements: not wanted.
    """
    library = kernel(_SOURCE)
    assert isinstance(library, ctypes.CDLL), library
    call = _Attention(*q.shape[:2], k.shape[1], *q.shape[2:], v.shape[3], window, scale)
    for field, x in {"q": q, "k": k, "v": v, **others}.items():
        if x is not None and x.numel():
            in_bf16 = x.dtype == torch.bfloat16
            setattr(call, field, _Tensor(x.data_ptr(), *x.stride()[:3]) if in_bf16 else x.data_ptr())
    if getattr(library, f"birthmark_causal_{name}")(ctypes.byref(call)):
        raise MemoryError(f"attention over {q.shape[2]} positions: no memory is left for its workspace")


def by_positions(x_BHTK: Tensor, width: int) -> Tensor:
    """Allocate ``[B, H, T, width]`` with the heads of a position side by side in memory, as projections want them."""
    n_sequences, n_heads, length, _ = x_BHTK.shape
    return x_BHTK.new_empty(n_sequences, length, n_heads, width).transpose(1, 2)


def _empty_results(
    q: Tensor, v: Tensor, wants_squares: bool, wants_rest: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_sequences, n_heads, length, width = *q.shape[:3], v.shape[-1]
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    squares = torch.empty_like(lse) if wants_squares else lse.new_empty(0)
    rest = q.new_empty((n_sequences, length, n_heads, width) if wants_rest else 0, dtype=torch.int8)
    return by_positions(q, width), lse, squares, rest


@torch.library.custom_op("birthmark::causal_native", mutates_args=(), device_types="cpu")
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float, wants_squares: bool, wants_rest: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    out, lse, squares, rest = _empty_results(q, v, wants_squares, wants_rest)
    if out.numel():
        _call("forward", window, scale, q, k, v, out=out, rest=rest, lse=lse, squares=squares)
    return out, lse, squares, rest


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float, wants_squares: bool, wants_rest: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_results(q, v, wants_squares, wants_rest)


@torch.library.custom_op("birthmark::causal_native_backward", mutates_args=(), device_types="cpu")
def _backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    d_squares: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    squares: torch.Tensor,
    rest: torch.Tensor,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (by_positions(x, x.shape[-1]) for x in (q, k, v))
    given = {"d_out": d_out, "d_lse": d_lse, "d_squares": d_squares, "out": out, "rest": rest}
    if out.numel():
        _call("backward", window, scale, q, k, v, **given, lse=lse, squares=squares, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@_backward.register_fake
def _(
    d_out: torch.Tensor, d_lse: torch.Tensor | None, d_squares: torch.Tensor | None, *qkv_and_more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (by_positions(x, x.shape[-1]) for x in qkv_and_more[:3])
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    q, k, v, *ctx.how, _, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)


def whole_rows(x: Tensor) -> Tensor:
    """Make the last axis contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _gradients(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, d_squares: Tensor | None, _rest: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, out, *more = ctx.saved_tensors  # once: under activation checkpointing each time would compute them again
    d_out = torch.zeros_like(out) if d_out is None else whole_rows(d_out)
    d_lse, d_squares = (None if d is None else d.contiguous() for d in (d_lse, d_squares))
    return *_backward(d_out, d_lse, d_squares, q, k, v, out, *more, *ctx.how), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def causal_tiles(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float, wants_sums: bool, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, V]`` in bf16 and, in float32 ``[B, H, T]``, the log-sum-exp of each query's scores
    and, on request, the sum of its squared weights. With a window, each query sees itself and the ``window − 1`` keys
    before it.
    """
    q, k, v = map(whole_rows, (q_BHTK, k_BGTK, v_BGTK))
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, lse, squares, _ = _forward(q, k, v, window or q.shape[2], scale, wants_sums, needs_gradient)
    return out, lse, squares
