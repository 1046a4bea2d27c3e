"""GPU kernels of the normalised difference of two softmaxes' outputs, and of its gradients.

Separate operators would write the difference, read it for the norm, and write each gradient several times. All
arithmetic is float32. No sum is split over programs but those of the gain and of λ, whose parts are added afterwards:
reruns are equal bit for bit.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, G pairs of heads, T positions, K head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .one_walk_kernel import strides

#: Numbers of a tile that a program holds at once; rows of a pair that one program of the backward pass takes.
_TILE, _PART = 1024, 64


@triton.jit
def _loaded(x, head, row, x_head, x_row, seen, channel):  # type: ignore[no-untyped-def]
    """Load a tile of two neighbouring heads."""
    at = x + head * x_head + row[:, None] * x_row + channel[None, :]
    first, second = tl.load(at, mask=seen, other=0.0), tl.load(at + x_head, mask=seen, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _stored(y, first, second, head, row, y_head, y_row, seen, channel):  # type: ignore[no-untyped-def]
    """Write a tile of two neighbouring heads."""
    at = y + head * y_head + row[:, None] * y_row + channel[None, :]
    tl.store(at, first.to(y.dtype.element_ty), mask=seen)
    tl.store(at + y_head, second.to(y.dtype.element_ty), mask=seen)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x, z, share, gain, y, x_batch, x_head, x_row, z_batch, z_head, z_row, y_batch, y_head, y_row, n_pairs, length,
    eps, times, K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Process a block of positions of one pair."""
    pair = tl.program_id(1).to(tl.int64)
    b, head = pair // n_pairs, 2 * (pair % n_pairs)
    row, channel = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, K_BLOCK)
    wide = channel < K
    seen = (row < length)[:, None] & wide[None, :]
    part = tl.load(share)
    x_1, x_2 = _loaded(x + b * x_batch, head, row, x_head, x_row, seen, channel)
    z_1, z_2 = _loaded(z + b * z_batch, head, row, z_head, z_row, seen, channel)
    of_x, of_z = x_1 - part * x_2, z_1 - part * z_2
    scale = times * tl.rsqrt((tl.sum(of_x * of_x, 1) + tl.sum(of_z * of_z, 1)) / (2 * K) + eps)[:, None]
    gain_x = tl.load(gain + channel, mask=wide, other=0.0)[None, :]
    gain_z = tl.load(gain + K + channel, mask=wide, other=0.0)[None, :]
    _stored(y + b * y_batch, of_x * scale * gain_x, of_z * scale * gain_z, head, row, y_head, y_row, seen, channel)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    d, x, z, share, gain, dx, dz, of_gain, of_share, d_batch, d_head, d_row, x_batch, x_head, x_row, z_batch, z_head,
    z_row, dx_batch, dx_head, dx_row, dz_batch, dz_head, dz_row, n_pairs, length, eps, times,
    K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Process a part of the positions of one pair, block by block."""
    pair = tl.program_id(1).to(tl.int64)
    b, head = pair // n_pairs, 2 * (pair % n_pairs)
    channel = tl.arange(0, K_BLOCK)
    wide = channel < K
    part = tl.load(share)
    gain_x = times * tl.load(gain + channel, mask=wide, other=0.0)[None, :]
    gain_z = times * tl.load(gain + K + channel, mask=wide, other=0.0)[None, :]
    sum_x, sum_z = tl.zeros([K_BLOCK], tl.float32), tl.zeros([K_BLOCK], tl.float32)
    by_share = tl.zeros([K_BLOCK], tl.float32)
    for block in range(0, PART, M):
        row = tl.program_id(0) * PART + block + tl.arange(0, M)
        seen = (row < length)[:, None] & wide[None, :]
        x_1, x_2 = _loaded(x + b * x_batch, head, row, x_head, x_row, seen, channel)
        z_1, z_2 = _loaded(z + b * z_batch, head, row, z_head, z_row, seen, channel)
        d_x, d_z = _loaded(d + b * d_batch, head, row, d_head, d_row, seen, channel)
        of_x, of_z = x_1 - part * x_2, z_1 - part * z_2
        scale = tl.rsqrt((tl.sum(of_x * of_x, 1) + tl.sum(of_z * of_z, 1)) / (2 * K) + eps)[:, None]
        of_x, of_z = of_x * scale, of_z * scale
        sum_x += tl.sum(d_x * of_x, 0)
        sum_z += tl.sum(d_z * of_z, 0)
        d_x, d_z = d_x * gain_x, d_z * gain_z
        along = ((tl.sum(d_x * of_x, 1) + tl.sum(d_z * of_z, 1)) / (2 * K))[:, None]
        d_x, d_z = (d_x - of_x * along) * scale, (d_z - of_z * along) * scale
        by_share -= tl.sum(d_x * x_2 + d_z * z_2, 0)
        _stored(dx + b * dx_batch, d_x, -part * d_x, head, row, dx_head, dx_row, seen, channel)
        _stored(dz + b * dz_batch, d_z, -part * d_z, head, row, dz_head, dz_row, seen, channel)
    at = pair * tl.num_programs(0) + tl.program_id(0)
    tl.store(of_gain + at * 2 * K + channel, times * sum_x, mask=wide)
    tl.store(of_gain + at * 2 * K + K + channel, times * sum_z, mask=wide)
    tl.store(of_share + at, tl.sum(by_share, 0))


def _tile(width: int) -> tuple[int, int]:
    """Return the rows and the channels of a tile."""
    block = triton.next_power_of_2(width)
    return min(_PART, max(1, _TILE // block)), block


def normed_difference_into(
    y: Tensor, x: Tensor, z: Tensor, share: Tensor, gain: Tensor, eps: float, times: float
) -> None:
    """Fill in the normalised difference ``[B, H, T, K]``.

    Args:
        y: result; the last axis of it, of ``x`` and of ``z`` is contiguous.
        x: outputs of all heads with the values of the first head of each pair, ``[B, H, T, K]``.
        z: outputs with the values of the second head.
        share: λ, float32, one number.
        gain: float32 ``[2·K]``, contiguous.
        eps: added to the mean square.
        times: factor of all.
    """
    n_sequences, n_heads, length, width = x.shape
    rows, block = _tile(width)
    with torch.cuda.device_of(x):
        _forward[(triton.cdiv(length, rows), n_sequences * n_heads // 2)](
            x, z, share, gain, y, *strides(x), *strides(z), *strides(y), n_heads // 2, length, eps, times,
            K=width, K_BLOCK=block, M=rows, num_warps=4,
        )  # fmt: skip


def gradients_into(
    dx: Tensor, dz: Tensor, d: Tensor, x: Tensor, z: Tensor, share: Tensor, gain: Tensor, eps: float, times: float
) -> tuple[Tensor, Tensor]:
    """Fill in the gradients of ``x`` and ``z``; return those of λ, ``[]``, and of the gain ``[2·K]``, float32.

    Args:
        dx: gradient of ``x``; the last axis of all rows is contiguous.
        dz: gradient of ``z``.
        d: upstream gradient ``[B, H, T, K]``.
        x: see :func:`normed_difference_into`, as the others.
    """
    n_sequences, n_heads, length, width = x.shape
    rows, block = _tile(width)
    grid = triton.cdiv(length, _PART), n_sequences * n_heads // 2
    of_gain, of_share = gain.new_empty(*grid, 2 * width), gain.new_empty(grid)
    with torch.cuda.device_of(x):
        _backward[grid](
            d, x, z, share, gain, dx, dz, of_gain, of_share, *strides(d), *strides(x), *strides(z), *strides(dx),
            *strides(dz), n_heads // 2, length, eps, times, K=width, K_BLOCK=block, M=rows, PART=_PART, num_warps=4,
        )  # fmt: skip
    return of_share.sum(), of_gain.sum((0, 1))
