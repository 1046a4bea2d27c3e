"""GPU kernels of sums over the rows of heads: each row is read once and written once, in its own type.

Separate operators would move each row once for every product and every sum. All else is float32. No sum is split over
programs but that over all rows of a head, whose parts are added afterwards: reruns are equal bit for bit.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, H heads, T rows, N vectors of each head, K head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .one_walk_kernel import strides

#: Numbers of a tile that a program holds at once, and its warps.
_TILE, _WARPS = 4096, 4


@triton.jit
def _block_of(n_heads, length, K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the head of a program's block among all, its sequence and its number there, rows, channels, places of the
    rows among all, and masks of the rows and channels that exist.
    """
    head = tl.program_id(1).to(tl.int64)
    row, channel = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, K_BLOCK)
    return head, head // n_heads, head % n_heads, row, channel, head * length + row, row < length, channel < K


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    x, a, b, v, y, x_batch, x_head, x_row, y_batch, y_head, y_row, n_heads, length,
    HAS_X: tl.constexpr, HAS_A: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Process a block of rows of one head."""
    _, sequence, h, row, channel, at, there, wide = _block_of(n_heads, length, K, K_BLOCK, M)
    seen = there[:, None] & wide[None, :]
    found = tl.zeros([M, K_BLOCK], tl.float32)
    if HAS_X:
        x += sequence * x_batch + h * x_head
        found += tl.load(x + row[:, None] * x_row + channel[None, :], mask=seen, other=0.0).to(tl.float32)
        if HAS_A:
            found *= tl.load(a + at, mask=there, other=0.0)[:, None]
    for n in tl.static_range(N):
        vector = tl.load(v + (h * N + n) * K + channel, mask=wide, other=0.0)
        found += tl.load(b + at * N + n, mask=there, other=0.0)[:, None] * vector[None, :]
    y += sequence * y_batch + h * y_head
    tl.store(y + row[:, None] * y_row + channel[None, :], found.to(y.dtype.element_ty), mask=seen)


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    d, x, a, b, v, dx, by_x, by_v, parts, d_batch, d_head, d_row, x_batch, x_head, x_row, dx_batch, dx_head, dx_row,
    n_heads, length,
    HAS_X: tl.constexpr, HAS_A: tl.constexpr, HAS_B: tl.constexpr, HAS_V: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Process a block of rows of one head."""
    head, sequence, h, row, channel, at, there, wide = _block_of(n_heads, length, K, K_BLOCK, M)
    seen = there[:, None] & wide[None, :]
    d += sequence * d_batch + h * d_head
    tile = tl.load(d + row[:, None] * d_row + channel[None, :], mask=seen, other=0.0).to(tl.float32)
    if HAS_X:
        x += sequence * x_batch + h * x_head
        of_x = tl.load(x + row[:, None] * x_row + channel[None, :], mask=seen, other=0.0).to(tl.float32)
        tl.store(by_x + at, tl.sum(tile * of_x, 1), mask=there)
    if HAS_A:
        dx += sequence * dx_batch + h * dx_head
        scaled = tile * tl.load(a + at, mask=there, other=0.0)[:, None]
        tl.store(dx + row[:, None] * dx_row + channel[None, :], scaled.to(dx.dtype.element_ty), mask=seen)
    for n in tl.static_range(N):
        if HAS_V:
            vector = tl.load(v + (h * N + n) * K + channel, mask=wide, other=0.0)
            tl.store(by_v + at * N + n, tl.sum(tile * vector[None, :], 1), mask=there)
        if HAS_B:
            share = tl.load(b + at * N + n, mask=there, other=0.0)
            part = ((head * tl.num_programs(0) + tl.program_id(0)) * N + n) * K
            tl.store(parts + part + channel, tl.sum(tile * share[:, None], 0), mask=wide)


@triton.jit
def _beside(  # type: ignore[no-untyped-def]
    o, lse, others, v, y, total, o_batch, o_head, o_row, y_batch, y_head, y_row, n_heads, length,
    HAS_V: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Process a block of rows of one head."""
    _, sequence, h, row, channel, at, there, wide = _block_of(n_heads, length, K, K_BLOCK, M)
    seen = there[:, None] & wide[None, :]
    of_tokens = tl.load(lse + at, mask=there, other=0.0)
    highest = of_tokens
    for n in tl.static_range(N):
        highest = tl.maximum(highest, tl.load(others + at * N + n, mask=there, other=0.0))
    summed = tl.exp(of_tokens - highest)
    for n in tl.static_range(N):
        summed += tl.exp(tl.load(others + at * N + n, mask=there, other=0.0) - highest)
    of_all = highest + tl.log(summed)
    tl.store(total + at, of_all, mask=there)
    o += sequence * o_batch + h * o_head
    found = tl.load(o + row[:, None] * o_row + channel[None, :], mask=seen, other=0.0).to(tl.float32)
    found *= tl.exp(of_tokens - of_all)[:, None]
    if HAS_V:
        for n in tl.static_range(N):
            share = tl.exp(tl.load(others + at * N + n, mask=there, other=0.0) - of_all)
            found += share[:, None] * tl.load(v + (h * N + n) * K + channel, mask=wide, other=0.0)[None, :]
    y += sequence * y_batch + h * y_head
    tl.store(y + row[:, None] * y_row + channel[None, :], found.to(y.dtype.element_ty), mask=seen)


@triton.jit
def _from_beside(  # type: ignore[no-untyped-def]
    d, out, total, d_total, others, v, d_others, parts, d_batch, d_head, d_row, out_batch, out_head, out_row, n_heads,
    length, HAS_TOTAL: tl.constexpr, HAS_V: tl.constexpr, N: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Process a block of rows of one head."""
    head, sequence, h, row, channel, at, there, wide = _block_of(n_heads, length, K, K_BLOCK, M)
    seen = there[:, None] & wide[None, :]
    d += sequence * d_batch + h * d_head
    out += sequence * out_batch + h * out_head
    d_tile = tl.load(d + row[:, None] * d_row + channel[None, :], mask=seen, other=0.0).to(tl.float32)
    of_all = tl.load(out + row[:, None] * out_row + channel[None, :], mask=seen, other=0.0).to(tl.float32)
    along = tl.sum(d_tile * of_all, 1)
    if HAS_TOTAL:
        along -= tl.load(d_total + at, mask=there, other=0.0)
    level = tl.load(total + at, mask=there, other=0.0)
    for n in tl.static_range(N):
        share = tl.exp(tl.load(others + at * N + n, mask=there, other=0.0) - level)
        found = -along
        if HAS_V:
            vector = tl.load(v + (h * N + n) * K + channel, mask=wide, other=0.0)
            found += tl.sum(d_tile * vector[None, :], 1)
            part = ((head * tl.num_programs(0) + tl.program_id(0)) * N + n) * K
            tl.store(parts + part + channel, tl.sum(d_tile * share[:, None], 0), mask=wide)
        tl.store(d_others + at * N + n, share * found, mask=there)


def tile_of(width: int) -> tuple[int, int]:
    """Return the rows and the channels of a tile."""
    block = triton.next_power_of_2(width)
    return max(1, _TILE // block), block


def combine(y: Tensor, x: Tensor | None, a: Tensor | None, b: Tensor | None, v: Tensor | None) -> None:
    """Fill in ``y = a·x + Σ_n b_n·v_n`` ``[B, H, T, K]``.

    Args:
        y: result; the last axis of it and of ``x`` is contiguous.
        x: rows ``[B, H, T, K]``; None: none.
        a: their factors, float32 ``[B, H, T]``, contiguous; None: 1.
        b: factors of vectors, float32 ``[B, H, T, N]``, contiguous; None: no vectors.
        v: vectors of each head, float32 ``[H, N, K]``, contiguous; None where ``b`` is.
    """
    n_sequences, n_heads, length, width = y.shape
    rows, block = tile_of(width)
    with torch.cuda.device_of(y):
        _combine[(triton.cdiv(length, rows), n_sequences * n_heads)](
            y if x is None else x, y if a is None else a, y if b is None else b, y if v is None else v, y,
            *strides(y if x is None else x), *strides(y), n_heads, length, HAS_X=x is not None, HAS_A=a is not None,
            N=0 if b is None else b.shape[-1], K=width, K_BLOCK=block, M=rows, num_warps=_WARPS,
        )  # fmt: skip


def n_parts(d: Tensor) -> int:
    """Return the number of blocks of rows of each head."""
    return triton.cdiv(d.shape[2], tile_of(d.shape[3])[0])


def reduce(
    d: Tensor, x: Tensor | None, a: Tensor | None, b: Tensor | None, v: Tensor | None, dx: Tensor | None,
    by_x: Tensor | None, by_v: Tensor | None, parts: Tensor | None,
) -> None:  # fmt: skip
    """Fill in sums over the rows ``d`` ``[B, H, T, K]``; those that are None are left out.

    Args:
        d: rows; the last axis of rows is contiguous.
        x: other rows.
        a: factors of ``dx``, see :func:`combine`.
        b: factors of ``parts``.
        v: vectors of ``by_v``.
        dx: ``a·d``, rows.
        by_x: ``Σ_k d·x``, float32 ``[B, H, T]``, contiguous.
        by_v: ``Σ_k d·v_n``, float32 ``[B, H, T, N]``, contiguous.
        parts: ``Σ_t b_n·d`` over each of :func:`n_parts` blocks of rows, float32 ``[B, H, blocks, N, K]``, contiguous.
    """
    n_sequences, n_heads, length, width = d.shape
    rows, block = tile_of(width)
    given = [d if tensor is None else tensor for tensor in (x, a, b, v, dx, by_x, by_v, parts)]
    n_vectors = next((tensor.shape[axis] for tensor, axis in ((b, -1), (v, 1)) if tensor is not None), 0)
    with torch.cuda.device_of(d):
        _reduce[(triton.cdiv(length, rows), n_sequences * n_heads)](
            d, *given, *strides(d), *strides(given[0]), *strides(given[4]), n_heads, length, HAS_X=x is not None,
            HAS_A=a is not None, HAS_B=b is not None, HAS_V=v is not None, N=n_vectors, K=width, K_BLOCK=block,
            M=rows, num_warps=_WARPS,
        )  # fmt: skip


def set_beside(y: Tensor, total: Tensor, o: Tensor, lse: Tensor, others: Tensor, v: Tensor | None) -> None:
    """Fill in an output over all keys, and their log-sum-exp; see :func:`.rows.beside`.

    Args:
        y: result ``[B, H, T, K]``; the last axis of it and of ``o`` is contiguous.
        total: result ``[B, H, T]``; it and what follows are float32 and contiguous.
        o: output over tokens.
        lse: log-sum-exp of their scores ``[B, H, T]``.
        others: scores of the further keys ``[B, H, T, N]``.
        v: their values ``[H, N, K]``; None: zero.
    """
    n_sequences, n_heads, length, width = o.shape
    rows, block = tile_of(width)
    with torch.cuda.device_of(o):
        _beside[(triton.cdiv(length, rows), n_sequences * n_heads)](
            o, lse, others, lse if v is None else v, y, total, *strides(o), *strides(y), n_heads, length,
            HAS_V=v is not None, N=others.shape[-1], K=width, K_BLOCK=block, M=rows, num_warps=_WARPS,
        )  # fmt: skip


def take_from_beside(
    d_others: Tensor, parts: Tensor | None, d: Tensor, out: Tensor, total: Tensor, d_total: Tensor | None,
    others: Tensor, v: Tensor | None,
) -> None:  # fmt: skip
    """Fill in the gradients of :func:`set_beside`'s further keys.

    Args:
        d_others: gradient of ``others``.
        parts: that of ``v`` over each of :func:`n_parts` blocks of rows, float32 ``[B, H, blocks, N, K]``, contiguous;
            None where ``v`` is.
        d: gradient of the output ``[B, H, T, K]``.
        out: the output over all keys, which :func:`set_beside` filled in.
        total: log-sum-exp over all keys.
        d_total: its gradient; None: 0.
        others: see :func:`set_beside`.
        v: values.
    """
    n_sequences, n_heads, length, width = d.shape
    rows, block = tile_of(width)
    with torch.cuda.device_of(d):
        _from_beside[(triton.cdiv(length, rows), n_sequences * n_heads)](
            d, out, total, total if d_total is None else d_total, others, total if v is None else v, d_others,
            total if parts is None else parts, *strides(d), *strides(out), n_heads, length,
            HAS_TOTAL=d_total is not None, HAS_V=v is not None, N=others.shape[-1], K=width, K_BLOCK=block, M=rows,
            num_warps=_WARPS,
        )  # fmt: skip
