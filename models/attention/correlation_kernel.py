"""GPU kernels of the running moments of values: values are read once, and one program gives ρ of all heads.

Separate operators read values twice, and thirty more compute with what a few numbers hold. All is float32. Sums that
several programs share are added afterwards: reruns are equal bit for bit.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, G heads of values, H query heads, T positions, K head width, P parts of the positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fused.one_walk_kernel import strides
from .fused.rows_kernel import tile_of

#: Tiles of a program, and parts of a sequence at most: one program adds them all up.
_TILES, _PARTS = 8, 32


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    v, sums, squares, v_batch, v_head, v_row, n_heads, length,
    K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Process a part of the positions of one head."""
    head = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, K_BLOCK)
    wide = channel < K
    v += (head // n_heads) * v_batch + (head % n_heads) * v_head + channel[None, :]
    total, square = tl.zeros([K_BLOCK], tl.float32), tl.zeros([M], tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * M + tl.arange(0, M)
        seen = (row < length)[:, None] & wide[None, :]
        found = tl.load(v + row[:, None] * v_row, mask=seen, other=0.0).to(tl.float32)
        total += tl.sum(found, 0)
        square += tl.sum(found * found, 1)
    part = head * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + part * K + channel, total, mask=wide)
    tl.store(squares + part, tl.sum(square, 0))


@triton.jit
def _average(  # type: ignore[no-untyped-def]
    sums, squares, batch, n_sequences, n_groups, n_shared, n_parts, length,
    K: tl.constexpr, K_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr,
):  # fmt: skip
    """Process one query head."""
    h, n_heads = tl.program_id(0), tl.num_programs(0)
    part, channel = tl.arange(0, P_BLOCK), tl.arange(0, K_BLOCK)
    there, wide = part < n_parts, channel < K
    mean, of_means, square = tl.zeros([K_BLOCK], tl.float32), 0.0, 0.0
    for b in range(n_sequences):
        at = (b * n_groups + h // n_shared) * n_parts + part
        seen = there[:, None] & wide[None, :]
        over_positions = tl.sum(tl.load(sums + at[:, None] * K + channel[None, :], mask=seen, other=0.0), 0) / length
        mean += over_positions
        of_means += tl.sum(over_positions * over_positions, 0)
        square += tl.sum(tl.load(squares + at, mask=there, other=0.0), 0) / length
    tl.store(batch + h * K + channel, mean / n_sequences, mask=wide)
    tl.store(batch + n_heads * K + h, square / n_sequences)
    tl.store(batch + n_heads * (K + 1) + h, of_means / n_sequences)
    if h == 0:
        tl.store(batch + n_heads * (K + 2), length * 1.0)


@triton.jit
def _settle(  # type: ignore[no-untyped-def]
    batch, mean, square, of_means, n_batches, length, rho, momentum, smallest, largest,
    H: tl.constexpr, K: tl.constexpr, H_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Process all heads: one program, since all read what it changes."""
    n_before = tl.load(n_batches)
    share = tl.where(n_before == 0, 1.0, momentum)
    kept = tl.where(n_before == 0, 0.0, 1 - momentum)
    of_length = kept * tl.load(length) + share * tl.load(batch + H * (K + 2))
    head, channel = tl.arange(0, H_BLOCK), tl.arange(0, K_BLOCK)
    there = head < H
    at, seen = head[:, None] * K + channel[None, :], there[:, None] & (channel < K)[None, :]
    of_mean = kept * tl.load(mean + at, mask=seen, other=0.0) + share * tl.load(batch + at, mask=seen, other=0.0)
    of_square = kept * tl.load(square + head, mask=there, other=0.0)
    of_square += share * tl.load(batch + H * K + head, mask=there, other=0.0)
    of_sequences = kept * tl.load(of_means + head, mask=there, other=0.0)
    of_sequences += share * tl.load(batch + H * (K + 1) + head, mask=there, other=0.0)
    tl.store(mean + at, of_mean, mask=seen)
    tl.store(square + head, of_square, mask=there)
    tl.store(of_means + head, of_sequences, mask=there)
    tl.store(n_batches, n_before + 1)
    tl.store(length, of_length)
    centre = tl.sum(of_mean * of_mean, 1)
    apart, n = tl.maximum(of_square - centre, smallest), tl.maximum(of_length, 2.0)
    found = (n * (of_sequences - centre) - apart) / ((n - 1) * apart)
    tl.store(rho + head, tl.minimum(tl.maximum(found, 0.0), largest), mask=there)


def average(v_BGTK: Tensor, n_heads: int) -> Tensor:
    """Compute the moments of a batch of values: of every query head the mean ``[H, K]``, the mean square ``[H]`` and
    the mean square of the mean over positions ``[H]``, and the length; one after the other in float32
    ``[H·K + 2·H + 1]``.

    Args:
        v_BGTK: values in bf16, fp16 or float32; the last axis is contiguous.
        n_heads: query heads, a multiple of the heads of values.
    """
    n_sequences, n_groups, length, width = v_BGTK.shape
    rows, block = tile_of(width)
    tiles = max(_TILES, triton.next_power_of_2(triton.cdiv(length, rows * _PARTS)))
    n_parts = triton.cdiv(length, rows * tiles)
    sums_BGPK = v_BGTK.new_empty(n_sequences, n_groups, n_parts, width, dtype=torch.float32)
    squares_BGP = v_BGTK.new_empty(n_sequences, n_groups, n_parts, dtype=torch.float32)
    batch = v_BGTK.new_empty(n_heads * (width + 2) + 1, dtype=torch.float32)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(v_BGTK):
        _sum[(n_parts, n_sequences * n_groups)](
            v_BGTK, sums_BGPK, squares_BGP, *strides(v_BGTK), n_groups, length, K=width, K_BLOCK=block, M=rows,
            TILES=tiles, num_warps=4,
        )  # fmt: skip
        _average[(n_heads,)](
            sums_BGPK, squares_BGP, batch, n_sequences, n_groups, n_heads // n_groups, n_parts, length, K=width,
            K_BLOCK=block, P_BLOCK=triton.next_power_of_2(n_parts), num_warps=4,
        )  # fmt: skip
    return batch


def settle(
    batch: Tensor, mean_HK: Tensor, square_H: Tensor, square_of_mean_H: Tensor, n_batches: Tensor, length: Tensor,
    momentum: float, smallest: float, largest: float,
) -> Tensor:  # fmt: skip
    """Add the moments of a batch to the running ones, in place; return ρ of every head ``[H]``.

    Args:
        batch: see :func:`average`.
        mean_HK: running moments, float32, contiguous; so are those that follow.
        square_H: mean square.
        square_of_mean_H: mean square of the mean over positions.
        n_batches: batches so far ``[]``; the first sets the moments.
        length: positions ``[]``.
        momentum: share of a later batch.
        smallest: least variance.
        largest: largest ρ.
    """
    n_heads, width = mean_HK.shape
    rho_H = torch.empty_like(square_H)
    with torch.cuda.device_of(batch):
        _settle[(1,)](
            batch, mean_HK, square_H, square_of_mean_H, n_batches, length, rho_H, momentum, smallest, largest,
            H=n_heads, K=width, H_BLOCK=triton.next_power_of_2(n_heads), K_BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )  # fmt: skip
    return rho_H
