"""GPU kernel of rotary positions: it reads each channel once and writes it once, in the type of the heads. On the way
it multiplies the turned heads with vectors, or adds vectors to heads before they turn.

Separate operators move 48 bytes for every channel in bf16, this kernel 4. Products and sums are float32, each rounded
by itself, so that the bits are those of the formula in :func:`.rotation.turned`.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, H heads, T positions, K head width; P pairs, of channels i and i + P; N vectors of each head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Types of queries and keys that the kernel takes; tables are float32.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Channels of one half of the heads that a program holds at once.
_CHANNELS = 2048


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x, out, cos, sin, v, b, x_batch, x_head, x_row, out_batch, out_head, out_row, table_batch, table_row, n_heads,
    length, ADDS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, K: tl.constexpr, P_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Process a block of positions of one head."""
    head = tl.program_id(1).to(tl.int64)
    sequence, h = head // n_heads, head % n_heads
    row = (tl.program_id(0) * M + tl.arange(0, M))[:, None]
    exists = row < length
    pair = tl.arange(0, P_BLOCK)[None, :]
    paired = pair < P
    there = exists & paired
    x += sequence * x_batch + h * x_head + row * x_row
    out += sequence * out_batch + h * out_head + row * out_row
    v += h * N * K
    b += (head * length + row) * N
    table = sequence * table_batch + row * table_row + pair
    c, s = tl.load(cos + table, mask=there, other=0.0), tl.load(sin + table, mask=there, other=0.0)
    first = tl.load(x + pair, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + P + pair, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        for n in tl.static_range(N):
            factor = tl.load(b + n, mask=exists, other=0.0)
            first += factor * tl.load(v + n * K + pair, mask=paired, other=0.0)
            second += factor * tl.load(v + n * K + P + pair, mask=paired, other=0.0)
    first_turned = (first * c - second * s).to(out.dtype.element_ty)
    second_turned = (second * c + first * s).to(out.dtype.element_ty)
    tl.store(out + pair, first_turned, mask=there)
    tl.store(out + P + pair, second_turned, mask=there)
    if K > 2 * P:
        channel = 2 * P + tl.arange(0, REST_BLOCK)[None, :]
        rest = channel < K
        still = tl.load(x + channel, mask=exists & rest, other=0.0)
        if ADDS:
            wide = still.to(tl.float32)
            for n in tl.static_range(N):
                factor = tl.load(b + n, mask=exists, other=0.0)
                wide += factor * tl.load(v + n * K + channel, mask=rest, other=0.0)
            still = wide.to(out.dtype.element_ty)
        tl.store(out + channel, still, mask=exists & rest)
    if not ADDS:
        # Of the numbers as they are written.
        for n in tl.static_range(N):
            found = first_turned.to(tl.float32) * tl.load(v + n * K + pair, mask=paired, other=0.0)
            found += second_turned.to(tl.float32) * tl.load(v + n * K + P + pair, mask=paired, other=0.0)
            total = tl.sum(found, 1, keep_dims=True)
            if K > 2 * P:
                more = still.to(tl.float32) * tl.load(v + n * K + channel, mask=rest, other=0.0)
                total += tl.sum(more, 1, keep_dims=True)
            tl.store(b + n, total, mask=exists)


def turn_into(
    out_BHTK: Tensor, x_BHTK: Tensor, cos: Tensor, sin: Tensor, v_HNK: Tensor | None = None,
    b_BHTN: Tensor | None = None, adds: bool = False,
) -> None:  # fmt: skip
    """Write heads whose channel pairs are turned; the other channels as they are.

    Args:
        out_BHTK: result, of the type of ``x_BHTK``; the last axis of all tensors is contiguous.
        x_BHTK: queries or keys.
        cos: cosines of the pairs, float32 ``[T, P]`` or ``[B, 1, T, P]``.
        sin: sines, in the layout of ``cos``.
        v_HNK: vectors of each head, float32, contiguous; None: none.
        b_BHTN: with vectors, the products of the result with them, which are filled in; float32, contiguous.
        adds: ``Σ_n b_n·v_n`` is added to the heads before they turn, and ``b_BHTN`` is read.
    """
    n_sequences, n_heads, length, width = x_BHTK.shape
    n_pairs = cos.shape[-1]
    block = triton.next_power_of_2(n_pairs)
    rows = max(1, _CHANNELS // block)
    of_sequence = cos.stride(0) if cos.dim() == 4 and len(cos) > 1 else 0
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(x_BHTK):
        _turn[(triton.cdiv(length, rows), n_sequences * n_heads)](
            x_BHTK, out_BHTK, cos, sin, cos if v_HNK is None else v_HNK, cos if b_BHTN is None else b_BHTN,
            *x_BHTK.stride()[:3], *out_BHTK.stride()[:3], of_sequence, cos.stride(-2), n_heads, length, ADDS=adds,
            N=0 if v_HNK is None else v_HNK.shape[1], P=n_pairs, K=width, P_BLOCK=block,
            REST_BLOCK=triton.next_power_of_2(max(1, width - 2 * n_pairs)), M=rows, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
