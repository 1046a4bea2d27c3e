"""GPU kernels of sums over activations: two reads give what separate operators take about twenty for.

All is float32. No sum is split over programs but those over positions, whose parts are added afterwards: reruns are
equal bit for bit.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, T positions, D channels; M rows of a tile, C chunks of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers of a tile that a program holds at once, its warps, and rows of a program: the parts that it writes are one
#: in so many of what it reads.
_TILE, _WARPS, _CHUNK = 8192, 8, 32


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    x, b, first, x_batch, x_row, length, channel, D: tl.constexpr, M: tl.constexpr
):  # fmt: skip
    """Return the rows of a tile of one sequence, masks of the rows and numbers that exist, and the numbers."""
    row = first + tl.arange(0, M)
    there = row < length
    seen = there[:, None] & (channel < D)[None, :]
    at = x + b * x_batch + row[:, None].to(tl.int64) * x_row + channel[None, :]
    return row, there, seen, tl.load(at, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    x, of_rows, units, x_batch, x_row, n_rows, length,
    D: tl.constexpr, D_BLOCK: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Process a chunk of one sequence's rows."""
    b, c = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, D_BLOCK)
    unit_sum = tl.zeros([D_BLOCK], tl.float32)
    for first in range(0, CHUNK, M):
        row, there, _, tile = _tile(x, b, c * CHUNK + first, x_batch, x_row, length, channel, D, M)
        size, square = tl.abs(tile), tl.sum(tile * tile, 1)
        out = of_rows + b * length + row
        tl.store(out, tl.sum(tile, 1), mask=there)
        tl.store(out + n_rows, tl.sum(size, 1), mask=there)
        tl.store(out + 2 * n_rows, square, mask=there)
        tl.store(out + 3 * n_rows, tl.max(size, 1), mask=there)
        # As `inverse_norms`.
        inverse = 1.0 / tl.maximum(tl.sqrt(square), 1.7347235e-18)
        unit_sum += tl.sum(tile * inverse[:, None], 0)
    tl.store(units + (b * tl.num_programs(0) + c) * D + channel, unit_sum, mask=channel < D)


@triton.jit
def _about(  # type: ignore[no-untyped-def]
    x, mean, second, fourth_root, away, x_batch, x_row, length,
    D: tl.constexpr, D_BLOCK: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Process a chunk of one sequence's rows."""
    b, c = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = tl.arange(0, D_BLOCK)
    centre = tl.load(mean + b)
    largest = tl.zeros([D_BLOCK], tl.float32)
    for first in range(0, CHUNK, M):
        row, there, seen, tile = _tile(x, b, c * CHUNK + first, x_batch, x_row, length, channel, D, M)
        square = tl.where(seen, (tile - centre) * (tile - centre), 0.0)
        tl.store(second + b * length + row, tl.sum(square, 1), mask=there)
        tl.store(fourth_root + b * length + row, tl.sqrt(tl.sum(square * square, 1)), mask=there)
        largest = tl.maximum(largest, tl.max(square, 0))
    tl.store(away + (b * tl.num_programs(0) + c) * D + channel, largest, mask=channel < D)


def _tiling(x_BTD: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid and the sizes of a program."""
    n_sequences, length, width = x_BTD.shape
    block = triton.next_power_of_2(width)
    rows = min(max(1, _TILE // block), _CHUNK)
    grid = triton.cdiv(length, _CHUNK), n_sequences
    return grid, {"D": width, "D_BLOCK": block, "M": rows, "CHUNK": _CHUNK, "num_warps": _WARPS}


def sum_rows(x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Sum rows: ``Σ x``, ``Σ |x|``, ``Σ x²`` and ``max |x|`` over channels ``[4, B, T]``, and ``Σ_t x/‖x‖`` ``[B, D]``;
    float32.

    Args:
        x_BTD: bf16, fp16 or float32; the last axis is contiguous.
    """
    n_sequences, length, width = x_BTD.shape
    grid, sizes = _tiling(x_BTD)
    of_rows = x_BTD.new_empty(4, n_sequences, length, dtype=torch.float32)
    units_BCD = x_BTD.new_empty(n_sequences, grid[0], width, dtype=torch.float32)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(x_BTD):
        _rows[grid](x_BTD, of_rows, units_BCD, *x_BTD.stride()[:2], n_sequences * length, length, **sizes)
    return of_rows, units_BCD.sum(1)


def sum_about(x_BTD: Tensor, mean_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum rows about a mean of their sequence: ``Σ (x − μ)²`` and ``√Σ (x − μ)⁴`` over channels ``[B, T]``, and the
    largest ``(x − μ)²`` over positions ``[B, D]``; float32.

    Args:
        x_BTD: see :func:`sum_rows`.
        mean_B: float32, contiguous.
    """
    n_sequences, length, width = x_BTD.shape
    grid, sizes = _tiling(x_BTD)
    second, fourth_root = (x_BTD.new_empty(n_sequences, length, dtype=torch.float32) for _ in range(2))
    away_BCD = x_BTD.new_empty(n_sequences, grid[0], width, dtype=torch.float32)
    with torch.cuda.device_of(x_BTD):
        _about[grid](x_BTD, mean_B, second, fourth_root, away_BCD, *x_BTD.stride()[:2], length, **sizes)
    return second, fourth_root, away_BCD.amax(1)
