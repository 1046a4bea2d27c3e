"""GPU kernels of causal attention that sum the squares of the weights in the same walk over the keys.

Forward, a row keeps its running largest score m, ``l = Σ exp(s − m)`` and ``r = Σ exp(2(s − m))``; a new largest score
multiplies l by α and r by α². Then ``lse = m + ln l`` and ``Σa² = r/l²``. On request it keeps ``d = Σ (s − m)·exp(s −
m)`` too, whose terms have one sign: its entropy is ``ln l − d/l``. Backward, with g and h the gradients of the
log-sum-exp and of Σa², ``δ = rowsum(dO ∘ O) − g + 2h·Σa²`` and ``dS = P ∘ (dP − δ + 2h·P)``. Products are of the type
of their inputs and add in float32, in which all else is computed. No sum is split over programs: reruns are equal bit
for bit.

An output may be calibrated as it is written: times ``f = √(R/V)``, with ``V = ρ + (1 − ρ)·Σa²`` and R 1 or ``ρ + (1 −
ρ)/t_ref``. As ``e = rowsum(dO ∘ O)`` is f times the gradient of f, V has the gradient ``−e/2V`` and R ``e/2R``. With
``f·P = exp(S − (lse − ln f))`` in place of P, ``δ/f`` of δ and ``h/f²`` of h, the gradients have the form above.

Triton reads the annotations of its functions: only constants have one.

Legend: B sequences, H query heads, G key/value heads, T queries, S keys, K head width, V that of values. Queries are
those of the last T keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: ρ ``[B, H, T]`` or None, the least that Σa² counts, ``1/t_ref`` or None, and False if no gradient goes through f: see
#: ``one_walk.Calibration``.
Calibration = tuple[Tensor | None, float, float | None, bool]
_UNCALIBRATED: Calibration = (None, 1.0, None, False)
#: Types of queries, keys and values that the kernels take.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOG2_E = math.log2(math.e)
TO_POWERS, _TO_LOGS = tl.constexpr(LOG2_E), tl.constexpr(1 / LOG2_E)
#: Below every score, and finite: the difference of two of them is no NaN.
_LOWEST = tl.constexpr(-1e30)


class Tile(NamedTuple):
    """Queries and keys that a program holds at once, its warps, and the tiles that it loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


#: Tiles of each kernel for heads up to 64 channels and for wider ones, in 16 bits, and in 32. The first three in 16
#: bits are the fastest of nine on an H200 (docs/gpu.md); of the others the compiler spilled least from registers.
TILES: dict[str, tuple[Tile, Tile, Tile]] = {
    "forward": (Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 32, 8, 2)),
    "keys": (Tile(32, 64, 4, 3), Tile(64, 64, 4, 2), Tile(32, 64, 4, 1)),
    "queries": (Tile(64, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 32, 4, 1)),
    "sums": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 2)),
    "received": (Tile(64, 128, 8, 3), Tile(64, 128, 8, 3), Tile(32, 64, 4, 2)),
}
#: Channels of products in float32, whose operands lie in registers: with whole heads of 128 the compiler gives up.
_CHUNK = 16
_NARROW, _ROWS = 64, 64


@triton.jit
def rows_of(x, row, stride, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load rows of a head, 0 past the last row and the last channel."""
    channel = tl.arange(0, BLOCK)
    seen = (row < n_rows)[:, None]
    if WIDTH != BLOCK:
        seen = seen & (channel < WIDTH)[None, :]
    return tl.load(x + row[:, None] * stride + channel[None, :], mask=seen, other=0.0)


@triton.jit
def products(  # type: ignore[no-untyped-def]
    a_tile, a, a_at, a_row, n_a, b, b_at, b_row, n_b, K: tl.constexpr, K_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply rows of a head, given as a tile, by those of another one; by ``CHUNK`` channels of both at a time, read
    anew, if that is below ``K_BLOCK``.
    """
    if CHUNK == K_BLOCK:
        found = tl.dot(a_tile, tl.trans(rows_of(b, b_at, b_row, n_b, K, K_BLOCK)), input_precision=PRECISION)
    else:
        found = tl.zeros([a_at.shape[0], b_at.shape[0]], tl.float32)
        for c in tl.static_range(0, K_BLOCK, CHUNK):
            a_part = rows_of(a + c, a_at, a_row, n_a, K - c, CHUNK)
            b_part = rows_of(b + c, b_at, b_row, n_b, K - c, CHUNK)
            found = tl.dot(a_part, tl.trans(b_part), found, input_precision=PRECISION)
    return found


@triton.jit
def _calibration(squares, rho, smallest, inverse, ATTENUATES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return Σa², no smaller than a number, and V and R of it."""
    limited = tl.maximum(squares, smallest)
    variance = rho + (1.0 - rho) * limited
    reference = variance * 0.0 + 1.0
    if ATTENUATES:
        reference = rho + (1.0 - rho) * inverse
    return limited, variance, reference


@triton.jit
def _store_rows(x, values, row, stride, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    channel = tl.arange(0, BLOCK)
    seen = (row < n_rows)[:, None] & (channel < WIDTH)[None, :]
    tl.store(x + row[:, None] * stride + channel[None, :], values.to(x.dtype.element_ty), mask=seen)


@triton.jit
def _bounds(first, start, n_before, n_queries, n_keys, HAS_FIRST: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the keys where a block of queries starts, where all of its queries see all keys, where that ends, and
    where the block ends; multiples of N but for the last. The first keys of queries never fall.
    """
    stop = tl.minimum(start + M + n_before, n_keys)
    last_full = (start + n_before + 1) // N * N
    begin, first_full = start * 0, start * 0
    if HAS_FIRST:
        begin = tl.load(first + start) // N * N
        latest = tl.load(first + tl.minimum(start + M, n_queries) - 1)
        first_full = tl.minimum((latest + N - 1) // N * N, last_full)
        first_full = tl.maximum(first_full, begin)
    return begin, first_full, tl.maximum(last_full, first_full), stop


@triton.jit
def _add_keys(  # type: ignore[no-untyped-def]
    o, top, total, squares, below, q_tile, q, row, k, v, start, stop, position, first_of, q_row, k_row, v_row,
    n_queries, n_keys, power, slope,
    HAS_FIRST: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_ENTROPY: tl.constexpr, MASKED: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys ``start … stop − 1`` to the sums of a block of queries."""
    for at in range(start, stop, N):
        key = at + tl.arange(0, N)
        scores = products(q_tile, q, row, q_row, n_queries, k, key, k_row, n_keys, K, K_BLOCK, CHUNK, PRECISION)
        scores *= power
        if HAS_SLOPES:
            scores -= slope * (position[:, None] - key[None, :])
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if HAS_FIRST:
                seen = seen & (key[None, :] >= first_of[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(top - higher)
        if HAS_ENTROPY:
            gaps = scores - higher[:, None]
            if MASKED:  # −inf · 0
                gaps = tl.where(seen, gaps, 0.0)
            below = (below + (top - higher) * total) * shrink + tl.sum(gaps * weights, 1)
        total = total * shrink + tl.sum(weights, 1)
        squares = squares * (shrink * shrink) + tl.sum(weights * weights, 1)
        v_tile = rows_of(v, key, v_row, n_keys, V, V_BLOCK)
        o = o * shrink[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        top = higher
    return o, top, total, squares, below


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, first, slopes, others, rho, out, lse, squares, entropy, largest,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, out_batch, out_head, out_row, first_batch,
    n_heads, n_shared, n_queries, n_keys, power, smallest, inverse,
    HAS_FIRST: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_OTHERS: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    CALIBRATES: tl.constexpr, HAS_RHO: tl.constexpr, ATTENUATES: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Process a block of queries of one head; the last blocks, which see the most keys, first."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1).to(tl.int64)
    b, h = head // n_heads, head % n_heads
    q += b * q_batch + h * q_head
    k += b * k_batch + h // n_shared * k_head
    v += b * v_batch + h // n_shared * v_head
    out += b * out_batch + h * out_head
    first += b * first_batch
    row = start + tl.arange(0, M)
    there = row < n_queries
    position = row + (n_keys - n_queries)
    q_tile = rows_of(q, row, q_row, n_queries, K, K_BLOCK)
    first_of, slope = row * 0, power
    if HAS_FIRST:
        first_of = tl.load(first + row, mask=there, other=0)
    if HAS_SLOPES:
        slope = tl.load(slopes + h) * TO_POWERS
    o = tl.zeros([M, V_BLOCK], tl.float32)
    top = tl.full([M], _LOWEST, tl.float32)
    total, sum_squares, below = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    if HAS_OTHERS:  # keys without a value: they begin the sums, and bring neither squares of tokens nor output
        top = tl.load(others + head * n_queries + row, mask=there, other=0.0) * TO_POWERS
        total += 1.0
    begin, first_full, last_full, stop = _bounds(first, start, n_keys - n_queries, n_queries, n_keys, HAS_FIRST, M, N)
    if HAS_FIRST:
        o, top, total, sum_squares, below = _add_keys(
            o, top, total, sum_squares, below, q_tile, q, row, k, v, begin, first_full, position, first_of,
            q_row, k_row, v_row, n_queries, n_keys, power, slope, HAS_FIRST, HAS_SLOPES, HAS_ENTROPY, True, K, V,
            K_BLOCK, V_BLOCK, N, CHUNK, PRECISION,
        )  # fmt: skip
    o, top, total, sum_squares, below = _add_keys(
        o, top, total, sum_squares, below, q_tile, q, row, k, v, first_full, last_full, position, first_of,
        q_row, k_row, v_row, n_queries, n_keys, power, slope, HAS_FIRST, HAS_SLOPES, HAS_ENTROPY, False, K, V, K_BLOCK,
        V_BLOCK, N, CHUNK, PRECISION,
    )  # fmt: skip
    o, top, total, sum_squares, below = _add_keys(
        o, top, total, sum_squares, below, q_tile, q, row, k, v, last_full, stop, position, first_of, q_row,
        k_row, v_row, n_queries, n_keys, power, slope, HAS_FIRST, HAS_SLOPES, HAS_ENTROPY, True, K, V, K_BLOCK,
        V_BLOCK, N, CHUNK, PRECISION,
    )  # fmt: skip
    at = head * n_queries + row
    sum_squares /= total * total
    tl.store(lse + at, top * _TO_LOGS + tl.log(total), mask=there)
    tl.store(squares + at, sum_squares, mask=there)
    o /= total[:, None]
    if CALIBRATES:
        of_row = total * 0.0
        if HAS_RHO:
            of_row = tl.load(rho + at, mask=there, other=0.0)
        _, variance, reference = _calibration(sum_squares, of_row, smallest, inverse, ATTENUATES)
        o *= tl.sqrt(reference / variance)[:, None]
    _store_rows(out, o, row, out_row, n_queries, V, V_BLOCK)
    if HAS_ENTROPY:
        tl.store(entropy + at, tl.log(total) - below * _TO_LOGS / total, mask=there)
        tl.store(largest + at, top * _TO_LOGS, mask=there)


@triton.jit
def _delta(  # type: ignore[no-untyped-def]
    out, d_out, lse, squares, d_lse, d_squares, others, rho, delta, d_others, of_squares, level, d_rho,
    out_batch, out_head, out_row, d_batch, d_head, d_row, n_heads, n_queries, smallest, inverse,
    HAS_OUT: tl.constexpr, HAS_LSE: tl.constexpr, HAS_SQUARES: tl.constexpr, HAS_OTHERS: tl.constexpr,
    CALIBRATES: tl.constexpr, HAS_RHO: tl.constexpr, ATTENUATES: tl.constexpr, LEARNS: tl.constexpr,
    V: tl.constexpr, V_BLOCK: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute δ of a block of queries of one head, and the gradient of the other keys' scores, ``−a·δ``. With
    calibration, compute ``δ/f``, ``h/f²`` and ``lse − ln f``, and the gradient of ρ; nothing goes through f unless it
    ``LEARNS``.
    """
    head = tl.program_id(1).to(tl.int64)
    b, h = head // n_heads, head % n_heads
    row = tl.program_id(0) * M + tl.arange(0, M)
    at, there = head * n_queries + row, row < n_queries
    found = tl.zeros([M], tl.float32)
    if HAS_OUT:
        o_tile = rows_of(out + b * out_batch + h * out_head, row, out_row, n_queries, V, V_BLOCK).to(tl.float32)
        d_tile = rows_of(d_out + b * d_batch + h * d_head, row, d_row, n_queries, V, V_BLOCK).to(tl.float32)
        found += tl.sum(o_tile * d_tile, 1)
    sums, h_of = tl.load(squares + at, mask=there, other=1.0), tl.zeros([M], tl.float32)
    if HAS_SQUARES:
        h_of += tl.load(d_squares + at, mask=there, other=0.0)
    if CALIBRATES:
        of_row = h_of * 0.0
        if HAS_RHO:
            of_row = tl.load(rho + at, mask=there, other=0.0)
        limited, variance, reference = _calibration(sums, of_row, smallest, inverse, ATTENUATES)
        ratio = reference / variance
        tl.store(level + at, tl.load(lse + at, mask=there, other=0.0) - 0.5 * tl.log(ratio), mask=there)
        by_variance = h_of * 0.0
        if LEARNS:
            by_variance = -0.5 * found / variance
        if HAS_RHO:
            by_rho = by_variance * (1.0 - limited)
            if ATTENUATES and LEARNS:
                by_rho += 0.5 * found / reference * (1.0 - inverse)
            tl.store(d_rho + at, by_rho, mask=there)
        h_of += tl.where(sums >= smallest, by_variance * (1.0 - of_row), 0.0)
        tl.store(of_squares + at, h_of / ratio, mask=there)
    if HAS_LSE:
        found -= tl.load(d_lse + at, mask=there, other=0.0)
    found += 2.0 * h_of * sums
    if HAS_OTHERS:
        share = tl.exp(tl.load(others + at, mask=there, other=0.0) - tl.load(lse + at, mask=there, other=0.0))
        tl.store(d_others + at, -share * found, mask=there)
    if CALIBRATES:
        found /= tl.sqrt(ratio)
    tl.store(delta + at, found, mask=there)


@triton.jit
def _add_to_queries(  # type: ignore[no-untyped-def]
    dq, q, d_out, lse, delta, twice, k, v, start, stop, position, first_of, k_row, v_row, n_keys, power,
    HAS_FIRST: tl.constexpr, HAS_SQUARES: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys ``start … stop − 1`` give to the gradient of a block of queries."""
    for at in range(start, stop, N):
        key = at + tl.arange(0, N)
        k_tile = rows_of(k, key, k_row, n_keys, K, K_BLOCK)
        v_tile = rows_of(v, key, v_row, n_keys, V, V_BLOCK)
        scores = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION) * power
        weights = tl.exp2(scores - lse[:, None])
        if MASKED:
            seen = key[None, :] <= position[:, None]
            if HAS_FIRST:
                seen = seen & (key[None, :] >= first_of[:, None])
            weights = tl.where(seen, weights, 0.0)
        d_scores = tl.dot(d_out, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None]
        if HAS_SQUARES:
            d_scores += twice[:, None] * weights
        d_scores *= weights
        dq += tl.dot(d_scores.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    return dq


@triton.jit
def _to_queries(  # type: ignore[no-untyped-def]
    q, k, v, first, d_out, lse, delta, d_squares, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_batch, d_head, d_row,
    dq_batch, dq_head, dq_row, first_batch, n_heads, n_shared, n_queries, n_keys, scale, power,
    HAS_FIRST: tl.constexpr, HAS_SQUARES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries of one head."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    head = tl.program_id(1).to(tl.int64)
    b, h = head // n_heads, head % n_heads
    k += b * k_batch + h // n_shared * k_head
    v += b * v_batch + h // n_shared * v_head
    first += b * first_batch
    row = start + tl.arange(0, M)
    at, there = head * n_queries + row, row < n_queries
    position = row + (n_keys - n_queries)
    q_tile = rows_of(q + b * q_batch + h * q_head, row, q_row, n_queries, K, K_BLOCK)
    d_tile = rows_of(d_out + b * d_batch + h * d_head, row, d_row, n_queries, V, V_BLOCK)
    lse_of = tl.load(lse + at, mask=there, other=0.0) * TO_POWERS
    delta_of = tl.load(delta + at, mask=there, other=0.0)
    first_of, twice = row * 0, delta_of
    if HAS_FIRST:
        first_of = tl.load(first + row, mask=there, other=0)
    if HAS_SQUARES:
        twice = 2.0 * tl.load(d_squares + at, mask=there, other=0.0)
    found = tl.zeros([M, K_BLOCK], tl.float32)
    begin, first_full, last_full, stop = _bounds(first, start, n_keys - n_queries, n_queries, n_keys, HAS_FIRST, M, N)
    if HAS_FIRST:
        found = _add_to_queries(
            found, q_tile, d_tile, lse_of, delta_of, twice, k, v, begin, first_full, position, first_of, k_row, v_row,
            n_keys, power, HAS_FIRST, HAS_SQUARES, True, K, V, K_BLOCK, V_BLOCK, N, PRECISION,
        )  # fmt: skip
    found = _add_to_queries(
        found, q_tile, d_tile, lse_of, delta_of, twice, k, v, first_full, last_full, position, first_of, k_row, v_row,
        n_keys, power, HAS_FIRST, HAS_SQUARES, False, K, V, K_BLOCK, V_BLOCK, N, PRECISION,
    )  # fmt: skip
    found = _add_to_queries(
        found, q_tile, d_tile, lse_of, delta_of, twice, k, v, last_full, stop, position, first_of, k_row, v_row,
        n_keys, power, HAS_FIRST, HAS_SQUARES, True, K, V, K_BLOCK, V_BLOCK, N, PRECISION,
    )  # fmt: skip
    _store_rows(dq + b * dq_batch + h * dq_head, found * scale, row, dq_row, n_queries, K, K_BLOCK)


@triton.jit
def _add_to_keys(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q, d_out, lse, delta, d_squares, first, start, stop, key, q_row, d_row, n_queries, n_before, power,
    HAS_FIRST: tl.constexpr, HAS_SQUARES: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries ``start … stop − 1`` of a head give to the gradients of a block of keys and values."""
    for at in range(start, stop, M):
        row = at + tl.arange(0, M)
        there = row < n_queries
        q_tile = rows_of(q, row, q_row, n_queries, K, K_BLOCK)
        d_tile = rows_of(d_out, row, d_row, n_queries, V, V_BLOCK)
        # Queries past the last one get weights of 0: exp2(−inf).
        lse_of = tl.load(lse + row, mask=there, other=float("inf")) * TO_POWERS
        scores = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION) * power
        weights = tl.exp2(scores - lse_of[None, :])
        if MASKED:
            seen = key[:, None] <= (row + n_before)[None, :]
            if HAS_FIRST:
                seen = seen & (key[:, None] >= tl.load(first + row, mask=there, other=0)[None, :])
            weights = tl.where(seen, weights, 0.0)
        dv += tl.dot(weights.to(d_tile.dtype), d_tile, input_precision=PRECISION)
        d_scores = tl.dot(v, tl.trans(d_tile), input_precision=PRECISION)
        d_scores -= tl.load(delta + row, mask=there, other=0.0)[None, :]
        if HAS_SQUARES:
            d_scores += 2.0 * tl.load(d_squares + row, mask=there, other=0.0)[None, :] * weights
        d_scores *= weights
        dk += tl.dot(d_scores.to(q_tile.dtype), q_tile, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _to_keys(  # type: ignore[no-untyped-def]
    q, k, v, first, last, d_out, lse, delta, d_squares, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, d_batch, d_head, d_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, first_batch, last_batch,
    n_heads, n_shared, n_queries, n_keys, scale, power,
    HAS_FIRST: tl.constexpr, HAS_SQUARES: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values of one head, from all query heads that share it."""
    start = tl.program_id(0) * N
    group = tl.program_id(1).to(tl.int64)
    n_groups = n_heads // n_shared
    b, g = group // n_groups, group % n_groups
    key = start + tl.arange(0, N)
    k_tile = rows_of(k + b * k_batch + g * k_head, key, k_row, n_keys, K, K_BLOCK)
    v_tile = rows_of(v + b * v_batch + g * v_head, key, v_row, n_keys, V, V_BLOCK)
    first += b * first_batch
    n_before = n_keys - n_queries
    # Queries from ``begin`` on see one of these keys, from ``first_full`` to ``last_full`` all of them.
    begin = tl.maximum(start - n_before, 0) // M * M
    first_full = tl.maximum(start + N - 1 - n_before, 0)
    first_full = tl.minimum((first_full + M - 1) // M * M, (n_queries + M - 1) // M * M)
    last_full, stop = (n_queries + M - 1) // M * M, n_queries
    if HAS_FIRST:
        last += b * last_batch
        stop = tl.load(last + tl.minimum(start + N, n_keys) - 1) + 1
        last_full = (tl.load(last + start) + 1) // M * M
        first_full = tl.minimum(first_full, (stop + M - 1) // M * M)
        last_full = tl.maximum(last_full, first_full)
    of_k, of_v = tl.zeros([N, K_BLOCK], tl.float32), tl.zeros([N, V_BLOCK], tl.float32)
    for shared in range(n_shared):
        h = g * n_shared + shared
        q_of, d_of = q + b * q_batch + h * q_head, d_out + b * d_batch + h * d_head
        row = (b * n_heads + h) * n_queries
        lse_of, delta_of, h_of = lse + row, delta + row, d_squares + row
        of_k, of_v = _add_to_keys(
            of_k, of_v, k_tile, v_tile, q_of, d_of, lse_of, delta_of, h_of, first, begin, first_full, key,
            q_row, d_row, n_queries, n_before, power, HAS_FIRST, HAS_SQUARES, True, K, V, K_BLOCK, V_BLOCK, M,
            PRECISION,
        )  # fmt: skip
        of_k, of_v = _add_to_keys(
            of_k, of_v, k_tile, v_tile, q_of, d_of, lse_of, delta_of, h_of, first, first_full, last_full,
            key, q_row, d_row, n_queries, n_before, power, HAS_FIRST, HAS_SQUARES, False, K, V, K_BLOCK, V_BLOCK, M,
            PRECISION,
        )  # fmt: skip
        if HAS_FIRST:
            of_k, of_v = _add_to_keys(
                of_k, of_v, k_tile, v_tile, q_of, d_of, lse_of, delta_of, h_of, first, last_full, stop,
                key, q_row, d_row, n_queries, n_before, power, HAS_FIRST, HAS_SQUARES, True, K, V, K_BLOCK, V_BLOCK,
                M, PRECISION,
            )  # fmt: skip
    _store_rows(dk + b * dk_batch + g * dk_head, of_k * scale, key, dk_row, n_keys, K, K_BLOCK)
    _store_rows(dv + b * dv_batch + g * dv_head, of_v, key, dv_row, n_keys, V, V_BLOCK)


# ---------------------------------------------------------------- launches


def tile_for(kernel: str, q: Tensor, v: Tensor) -> Tile:
    """Return the tile of a kernel, a key of :data:`TILES`, for these queries and values."""
    narrow, wide, single = TILES[kernel]
    if q.element_size() > 2:
        return single
    return narrow if max(q.shape[-1], v.shape[-1]) <= _NARROW else wide


def constants_of(q: Tensor, v: Tensor, first: Tensor | None) -> dict[str, object]:
    """Return the constants that all kernels over scores take."""
    return {
        "HAS_FIRST": first is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",  # the latter has no influence in 16 bits
        **_widths(q, v),
    }


def chunk_of(q: Tensor) -> int:
    """Return the channels that :func:`products` takes at a time."""
    return _CHUNK if q.dtype == torch.float32 else _padded(q.shape[-1])


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))  # the smallest product has 16 channels


def _widths(q: Tensor, v: Tensor) -> dict[str, object]:
    n_k, n_v = q.shape[-1], v.shape[-1]
    return {"K": n_k, "V": n_v, "K_BLOCK": _padded(n_k), "V_BLOCK": _padded(n_v)}


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of a tensor ``[B, heads, rows, width]`` whose last axis is contiguous."""
    sequence, head, row, channel = x.stride()
    assert channel == 1
    return sequence, head, row


def _constants_of_calibration(calibration: Calibration | None) -> dict[str, object]:
    rho, _, inverse, _ = calibration or _UNCALIBRATED
    return {
        "CALIBRATES": calibration is not None,
        "HAS_RHO": rho is not None,
        "ATTENUATES": inverse is not None,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, others: Tensor | None, out: Tensor, lse: Tensor,
    squares: Tensor, scale: float, entropy: Tensor | None = None, largest: Tensor | None = None,
    slopes: Tensor | None = None, calibration: Calibration | None = None,
) -> None:  # fmt: skip
    """Fill in the output ``[B, H, T, V]`` and, in float32 ``[B, H, T]``, the log-sum-exp over all keys and ``Σa²`` over
    those of tokens.

    Args:
        q: queries ``[B, H, T, K]``; of all tensors of four axes the last is contiguous.
        k: keys ``[B, G, S, K]``.
        v: values ``[B, G, S, V]``.
        first: the first key that each query sees, int32 ``[B, T]``, its last axis contiguous, never falling; None: 0.
        others: log-sum-exp of the scores of further keys without a value, float32 ``[B, H, T]``, contiguous.
        out: output.
        lse: log-sum-exp, contiguous.
        squares: sums of squares, contiguous.
        scale: scale of the scores.
        entropy: the entropy of each row, contiguous; if wanted, then with ``largest`` and without ``others``.
        largest: the largest score of each row, contiguous.
        slopes: penalty of each head on its scores per position of distance, float32 ``[H]``.
        calibration: calibration of the output, its ρ float32 ``[B, H, T]``, contiguous; None: none.
    """
    assert entropy is None or (largest is not None and others is None)
    of_row, smallest, inverse, _ = calibration or _UNCALIBRATED
    n_sequences, n_heads, n_queries, _ = q.shape
    tile, constants = tile_for("forward" if entropy is None else "sums", q, v), constants_of(q, v, first)
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(q):
        _forward[(triton.cdiv(n_queries, tile.queries), n_sequences * n_heads)](
            q, k, v, q if first is None else first, lse if slopes is None else slopes,
            q if others is None else others, lse if of_row is None else of_row, out, lse, squares,
            lse if entropy is None else entropy, lse if largest is None else largest,
            *strides(q), *strides(k), *strides(v), *strides(out), 0 if first is None else first.stride(0),
            n_heads, n_heads // k.shape[1], n_queries, k.shape[2], scale * LOG2_E, smallest, inverse or 1.0,
            HAS_SLOPES=slopes is not None, HAS_OTHERS=others is not None, HAS_ENTROPY=entropy is not None,
            **_constants_of_calibration(calibration),
            M=tile.queries, N=tile.keys,
            CHUNK=chunk_of(q), num_warps=tile.warps, num_stages=tile.stages, **constants,
        )  # fmt: skip


def backward(
    d_out: Tensor | None, d_lse: Tensor | None, d_squares: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    first: Tensor | None, last: Tensor | None, others: Tensor | None, out: Tensor, lse: Tensor, squares: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, d_others: Tensor | None, scale: float,
    calibration: Calibration | None = None, d_rho: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill in the gradients of what :func:`forward` was given, from those of its results, None: 0.

    Args:
        d_out: that of the output.
        d_lse: that of the log-sum-exp, float32, contiguous; d_squares too.
        d_squares: that of the sums of squares.
        q: and what follows: as :func:`forward` was given and has filled in.
        k: keys.
        v: values.
        first: first keys.
        last: the last query that sees each key, int32 ``[B, S]``, its last axis contiguous; None where ``first`` is.
        others: log-sum-exp of further keys.
        out: output.
        lse: log-sum-exp.
        squares: sums of squares.
        dq: gradient of the queries, ``[B, H, T, K]``.
        dk: that of the keys.
        dv: that of the values.
        d_others: that of ``others``, float32 ``[B, H, T]``, contiguous.
        scale: scale of the scores.
        calibration: as :func:`forward` was given.
        d_rho: gradient of its ρ, as ``d_others``; None where ρ is.
    """
    n_sequences, n_heads, n_queries, _ = q.shape
    n_kv_heads, n_keys = k.shape[1:3]
    delta = torch.empty_like(lse)
    given, h = out if d_out is None else d_out, lse if d_squares is None else d_squares
    constants, sizes = constants_of(q, v, first), (n_heads, n_heads // n_kv_heads, n_queries, n_keys)
    widths, has_squares = _widths(q, v), d_squares is not None
    of_row, smallest, inverse, learns = calibration or _UNCALIBRATED
    of_squares, level = lse, lse
    if calibration is not None:
        of_squares, level = torch.empty_like(lse), torch.empty_like(lse)
    first_of, last_of = (q if x is None else x for x in (first, last))
    first_batch, last_batch = (0 if x is None else x.stride(0) for x in (first, last))
    with torch.cuda.device_of(q):
        _delta[(triton.cdiv(n_queries, _ROWS), n_sequences * n_heads)](
            out, given, lse, squares, lse if d_lse is None else d_lse, h, lse if others is None else others,
            lse if of_row is None else of_row, delta, lse if d_others is None else d_others, of_squares, level,
            lse if d_rho is None else d_rho, *strides(out), *strides(given), n_heads, n_queries, smallest,
            inverse or 1.0, HAS_OUT=d_out is not None, HAS_LSE=d_lse is not None, HAS_SQUARES=has_squares,
            HAS_OTHERS=d_others is not None, **_constants_of_calibration(calibration), LEARNS=learns, V=widths["V"],
            V_BLOCK=widths["V_BLOCK"], M=_ROWS,
        )  # fmt: skip
        if calibration is not None:
            h, has_squares = of_squares, has_squares or learns
        if d_out is None:
            given = torch.zeros_like(out)
        tile = tile_for("keys", q, v)
        _to_keys[(triton.cdiv(n_keys, tile.keys), n_sequences * n_kv_heads)](
            q, k, v, first_of, last_of, given, level, delta, h, dk, dv, *strides(q), *strides(k), *strides(v),
            *strides(given), *strides(dk), *strides(dv), first_batch, last_batch, *sizes, scale, scale * LOG2_E,
            HAS_SQUARES=has_squares, M=tile.queries, N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            **constants,
        )  # fmt: skip
        tile = tile_for("queries", q, v)
        _to_queries[(triton.cdiv(n_queries, tile.queries), n_sequences * n_heads)](
            q, k, v, first_of, given, level, delta, h, dq, *strides(q), *strides(k), *strides(v), *strides(given),
            *strides(dq), first_batch, *sizes, scale, scale * LOG2_E, HAS_SQUARES=has_squares, M=tile.queries,
            N=tile.keys, num_warps=tile.warps, num_stages=tile.stages, **constants,
        )  # fmt: skip
