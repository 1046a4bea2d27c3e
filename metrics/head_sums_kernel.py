"""GPU kernel of sums over queries and outputs of heads: one read gives what separate operators take up to five for.

All is float32. Sums that several programs share are added afterwards: reruns are equal bit for bit.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, H heads, T positions, K head width; P parts of the sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers of a tile, and programs that keep a GPU busy.
_TILE, _PROGRAMS = 2048, 1024


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    x, mean, vectors, of_rows, totals, x_batch, x_head, x_row, n_sequences, n_heads, n_rows, of_part,
    HAS_MEAN: tl.constexpr, HAS_VECTORS: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Process a block of the rows (position, head) of some sequences."""
    part = tl.program_id(1).to(tl.int64)
    row, channel = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, K_BLOCK)
    there = row < n_rows
    seen = there[:, None] & (channel < K)[None, :]
    t, h = (row // n_heads).to(tl.int64), (row % n_heads).to(tl.int64)
    at = (row.to(tl.int64) * K)[:, None] + channel[None, :]
    total, centre = tl.zeros([M, K_BLOCK], tl.float32), tl.zeros([M, K_BLOCK], tl.float32)
    if HAS_MEAN:
        centre += tl.load(mean + at, mask=seen, other=0.0)
    for b in range(part * of_part, tl.minimum((part + 1) * of_part, n_sequences)):
        place = x + (b * x_batch + h * x_head + t * x_row)[:, None] + channel[None, :]
        away = tl.load(place, mask=seen, other=0.0).to(tl.float32) - centre
        if HAS_VECTORS:
            vector = tl.load(vectors + ((b * n_heads + h) * K)[:, None] + channel[None, :], mask=seen, other=0.0)
            found = tl.sum(away * vector, 1)
        else:
            found = tl.sqrt(tl.sum(away * away, 1))
        tl.store(of_rows + b * n_rows + row, found, mask=there)
        total += away
    tl.store(totals + part * n_rows * K + at, total, mask=seen)


def sum_heads(x_BHTK: Tensor, mean_THK: Tensor | None, vectors_BHK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute for every row its product with the vector of its head, or without vectors its norm ``[B, T, H]``, and
    sums of rows over sequences ``[T, H, K]``; float32.

    Args:
        x_BHTK: bf16, fp16 or float32; the last axis is contiguous.
        mean_THK: what is taken from the rows first, float32, contiguous; None: nothing.
        vectors_BHK: float32, contiguous.
    """
    n_sequences, n_heads, length, width = x_BHTK.shape
    n_rows, block = length * n_heads, triton.next_power_of_2(width)
    rows = max(1, _TILE // block)
    n_blocks = triton.cdiv(n_rows, rows)
    # With few positions, sequences are divided too.
    n_parts = max(1, min(n_sequences, triton.cdiv(_PROGRAMS, n_blocks)))
    of_part = triton.cdiv(n_sequences, n_parts)
    of_rows_BTH = x_BHTK.new_empty(n_sequences, length, n_heads, dtype=torch.float32)
    totals_PTHK = x_BHTK.new_empty(n_parts, length, n_heads, width, dtype=torch.float32)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(x_BHTK):
        _sums[(n_blocks, n_parts)](
            x_BHTK, of_rows_BTH if mean_THK is None else mean_THK, of_rows_BTH if vectors_BHK is None else vectors_BHK,
            of_rows_BTH, totals_PTHK, *x_BHTK.stride()[:3], n_sequences, n_heads, n_rows, of_part,
            HAS_MEAN=mean_THK is not None, HAS_VECTORS=vectors_BHK is not None, K=width, K_BLOCK=block, M=rows,
            num_warps=4,
        )  # fmt: skip
    return of_rows_BTH, totals_PTHK[0] if n_parts == 1 else totals_PTHK.sum(0)
