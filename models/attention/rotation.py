"""Rotary positions (arXiv 2104.09864): pairs of a head's channels rotate by angles that grow with the position.

A training pass on a CPU, and every pass on a GPU that is not compiled, keeps only the angles and writes each result
once, in the layout of the next reader: separate operators would join, split and copy the two halves of every head each
time. The values are equal to the bit.

Legend: B sequences, H heads, T positions, K head width; P pairs, of channels i and i + P.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernel_devices import fuses_rows, runs_on, trains_on_cpu
from ..c_library import kernel
from .fused.native import whole_rows
from .fused.rows import fuses, products, vector_gradients

_SOURCE = Path(__file__).with_suffix(".c")


def turning(angles_TP: Tensor) -> Tensor:
    """Compute the rotation for :func:`rotate`: the cosine of every channel, and the sine with the sign that it has in
    the sum.

    Args:
        angles_TP: angle of each position and channel pair, ``[T, P]`` or ``[B, 1, T, P]``.

    Returns:
        ``[2, T, 2P]`` or ``[2, B, 1, T, 2P]``, in the type of the angles.
    """
    cos, sin = angles_TP.cos(), angles_TP.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


def rotate(x_BHTK: Tensor, rotation: Tensor | None) -> Tensor:
    """Turn the channel pairs of queries or keys ``[B, H, T, K]`` by the angles of a placement, in float32 or more.

    The result has the type of the input. Products in bf16 would make the error of the scores 1.6 times as large.

    Args:
        x_BHTK: queries or keys.
        rotation: result of :func:`turning`; None leaves ``x_BHTK`` as it is.
    """
    if rotation is None:
        return x_BHTK
    # A compiler makes one kernel of the formula and its neighbours.
    if trains_on_cpu(x_BHTK) or _runs_in_triton(x_BHTK, rotation):
        turned_BHTK: Tensor = _Turn.apply(x_BHTK, rotation)
        return turned_BHTK
    return turned(x_BHTK, rotation)


def turned(x_BHTK: Tensor, rotation: Tensor) -> Tensor:
    """Apply the formula of :func:`rotate`."""
    cos, sin = rotation.unbind()
    width = cos.shape[-1]
    # Split, whose backward pass is one concatenation; that of a slice fills a tensor with zeros.
    x, *still = x_BHTK.split([width, x_BHTK.shape[-1] - width], dim=-1) if width < x_BHTK.shape[-1] else [x_BHTK]
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    # Each channel beside the other of its pair: four operations on whole heads, not seven on their halves. A model that
    # writes a token at a time pays for their number.
    y = (x * cos + x.roll(width // 2, dims=-1) * sin).to(x_BHTK.dtype)
    return torch.cat([y, *still], dim=-1) if still else y


def _of_pairs(rotation: Tensor, back: bool = False) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of channel pairs, ``[…, T, P]``, as views of equal layout; with ``back``, of the
    opposite angles.
    """
    cos, sin = rotation.unbind()
    half = cos.shape[-1] // 2
    return cos[..., :half], sin[..., :half] if back else sin[..., half:]


def _of_tensor(name: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p), *((f"{name}_{axis}", ctypes.c_int64) for axis in ("sequence", "head", "position"))]


class _TurnCall(ctypes.Structure):
    """``turn`` struct of ``rotation.c``."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("n_sequences", "n_heads", "length", "width", "n_pairs")),
        *_of_tensor("x"),
        *_of_tensor("to"),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((f"table_{axis}", ctypes.c_int64) for axis in ("sequence", "position")),
    ]


@torch.library.custom_op("birthmark::turn", mutates_args=("out",), device_types="cpu")
def _turn_by_kernel(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    library = kernel(_SOURCE)
    assert isinstance(library, ctypes.CDLL), library
    of_sequence = cos.stride(0) if cos.dim() == 4 and len(cos) > 1 else 0
    sizes, tables = (*x.shape, cos.shape[-1]), (cos.data_ptr(), sin.data_ptr(), of_sequence, cos.stride(-2))
    rows = [(tensor.data_ptr(), *tensor.stride()[:3]) for tensor in (x, out)]
    library.birthmark_turn(ctypes.byref(_TurnCall(*sizes, *rows[0], *rows[1], *tables)))


@_turn_by_kernel.register_fake
def _(out: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Declare to torch that only ``out`` changes."""


def _kernel_turns(out_BHTK: Tensor, x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> bool:
    types = x_BHTK.device.type, x_BHTK.dtype, cos.dtype
    if types != ("cpu", torch.bfloat16, torch.float32) or cos.stride() != sin.stride():
        return False
    rows = all(x.stride(-1) == 1 for x in (x_BHTK, out_BHTK, cos))
    return rows and isinstance(kernel(_SOURCE), ctypes.CDLL)


@torch.library.custom_op("birthmark::turn_in_triton", mutates_args=())
def _turn_in_triton(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    from .rotation_kernel import turn_into

    out = x.new_empty_strided(x.shape, strides)
    turn_into(out, x, cos, sin)
    return out


@_turn_in_triton.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    return x.new_empty_strided(x.shape, strides)


@torch.library.custom_op("birthmark::turn_beside", mutates_args=())
def _turn_beside(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, v: torch.Tensor, b: torch.Tensor | None,
    strides: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Turn ``x``, and return its products with vectors; or, given ``b``, turn ``x + Σ_n b_n·v_n``."""
    from .rotation_kernel import turn_into

    out = x.new_empty_strided(x.shape, strides)
    sums = x.new_empty((*x.shape[:3], v.shape[1]), dtype=torch.float32) if b is None else b
    turn_into(out, x, cos, sin, v, sums, adds=b is not None)
    return out, sums if b is None else sums.new_empty(0)


@_turn_beside.register_fake
def _(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, v: torch.Tensor, b: torch.Tensor | None,
    strides: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    sums = x.new_empty((*x.shape[:3], v.shape[1]) if b is None else 0, dtype=torch.float32)
    return x.new_empty_strided(x.shape, strides), sums


def _runs_in_triton(x_BHTK: Tensor, table: Tensor) -> bool:
    return table.dtype == torch.float32 and fuses_rows(x_BHTK)


def _written(x_BHTK: Tensor, strides: Sequence[int], cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of ``x_BHTK`` into a tensor with these strides."""
    if _runs_in_triton(x_BHTK, cos):
        found: Tensor = _turn_in_triton(x_BHTK, cos, sin, strides)
        return found
    out_BHTK = x_BHTK.new_empty_strided(x_BHTK.shape, strides)
    if _kernel_turns(out_BHTK, x_BHTK, cos, sin):
        _turn_by_kernel(out_BHTK, x_BHTK, cos, sin)
        return out_BHTK
    half, wide = cos.shape[-1], torch.promote_types(x_BHTK.dtype, cos.dtype)
    a, b = x_BHTK[..., : 2 * half].to(wide).split(half, dim=-1)
    out_BHTK[..., :half] = (a * cos).sub_(b * sin)
    out_BHTK[..., half : 2 * half] = (b * cos).add_(a * sin)
    if 2 * half < x_BHTK.shape[-1]:
        out_BHTK[..., 2 * half :] = x_BHTK[..., 2 * half :]
    return out_BHTK


class _Turn(torch.autograd.Function):
    """Autograd function of the rotation; its gradient rotates back."""

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        like = torch.empty_like(x_BHTK, device="meta")
        ctx.strides = like.stride()
        # A CPU's attention reads a head at a time, a GPU's all heads of a position.
        strides = like.contiguous().stride() if runs_on(x_BHTK) == "cpu" else ctx.strides
        return _written(x_BHTK, strides, *_of_pairs(rotation))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_BHTK: Tensor) -> tuple[Tensor, None]:
        # As the map that gave the queries or keys laid them out: its own gradients read them so.
        return _written(d_BHTK, ctx.strides, *_of_pairs(ctx.saved_tensors[0], back=True)), None


class _TurnBeside(torch.autograd.Function):
    """Autograd function of the rotation, and of products of its result with the vectors of each head."""

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, rotation: Tensor, v_HNK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.strides = torch.empty_like(x_BHTK, device="meta").stride()
        turned_BHTK, by_v_BHTN = _turn_beside(x_BHTK, *_of_pairs(rotation), v_HNK, None, ctx.strides)
        ctx.save_for_backward(rotation, turned_BHTK, v_HNK)
        ctx.set_materialize_grads(False)
        return turned_BHTK, by_v_BHTN

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_BHTK: Tensor | None, d_BHTN: Tensor | None) -> tuple[Tensor, None, Tensor | None]:
        rotation, turned_BHTK, v_HNK = ctx.saved_tensors
        tables = _of_pairs(rotation, back=True)
        d_BHTK = torch.zeros_like(turned_BHTK) if d_BHTK is None else d_BHTK
        if d_BHTN is None:
            return _written(d_BHTK, ctx.strides, *tables), None, None
        d_BHTN = d_BHTN.contiguous()
        dx_BHTK, _ = _turn_beside(whole_rows(d_BHTK), *tables, v_HNK, d_BHTN, ctx.strides)
        return dx_BHTK, None, vector_gradients(turned_BHTK, d_BHTN)


def rotate_and_multiply(x_BHTK: Tensor, rotation: Tensor | None, v_HNK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute :func:`rotate` and the products of its result with the vectors of each head ``[B, H, T, N]``, in float32
    or wider; see :func:`.fused.rows.products`.
    """
    if rotation is not None and _runs_in_triton(x_BHTK, rotation) and fuses(x_BHTK, v_HNK.shape[1]):
        found: tuple[Tensor, Tensor] = _TurnBeside.apply(x_BHTK, rotation, v_HNK.float().contiguous())
        return found
    return products(rotate(x_BHTK, rotation), v_HNK)
