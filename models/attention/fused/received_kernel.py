"""GPU kernel of the attention that keys receive: sums of the weights of causal attention over the queries.

It computes each weight again from the log-sum-exp of its row, as a backward pass does, and takes products and tiles as
``one_walk_kernel.py`` does. Programs hold a block of keys and walk over the queries; no sum is split over programs:
reruns are equal bit for bit.

Legend: B sequences, H query heads, G key/value heads, T queries and keys, K head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .one_walk_kernel import LOG2_E, TO_POWERS, chunk_of, constants_of, products, rows_of, strides, tile_for


@triton.jit
def _add_queries(  # type: ignore[no-untyped-def]
    received, shared, k_tile, k, q, lse, share, first, start, stop, key, k_row, q_row, length, power, slope,
    HAS_FIRST: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SHARE: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr,
    K_BLOCK: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weights of the queries ``start … stop − 1`` on a block of keys, but for the query 0."""
    for at in range(start, stop, M):
        row = at + tl.arange(0, M)
        there = row < length
        # Queries past the last one get weights of 0: exp2(−inf).
        lse_of = tl.load(lse + row, mask=there, other=float("inf")) * TO_POWERS
        scores = products(k_tile, k, key, k_row, length, q, row, q_row, length, K, K_BLOCK, CHUNK, PRECISION) * power
        if HAS_SLOPES:
            scores -= slope * (row[None, :] - key[:, None])
        weights = tl.exp2(scores - lse_of[None, :])
        if MASKED:
            seen = (key[:, None] <= row[None, :]) & (row > 0)[None, :]
            if HAS_FIRST:
                seen = seen & (key[:, None] >= tl.load(first + row, mask=there, other=0)[None, :])
            weights = tl.where(seen, weights, 0.0)
        received += tl.sum(weights, 1)
        if HAS_SHARE:
            shared += tl.sum(weights * tl.load(share + row, mask=there, other=0.0)[None, :], 1)
    return received, shared


@triton.jit
def _received(  # type: ignore[no-untyped-def]
    q, k, first, last, slopes, lse, share, received, shared,
    q_batch, q_head, q_row, k_batch, k_head, k_row, first_batch, last_batch, n_heads, n_shared, length, power,
    HAS_FIRST: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SHARE: tl.constexpr, K: tl.constexpr,
    K_BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Process a block of keys for one query head; the first blocks, which most queries see, first."""
    start = tl.program_id(0) * N
    head = tl.program_id(1).to(tl.int64)
    b, h = head // n_heads, head % n_heads
    q += b * q_batch + h * q_head
    lse += head * length
    share += head * length
    first += b * first_batch
    key = start + tl.arange(0, N)
    k += b * k_batch + h // n_shared * k_head
    k_tile = rows_of(k, key, k_row, length, K, K_BLOCK)
    # Queries from ``begin`` on see one of these keys, from ``first_full`` to ``last_full`` all of them.
    last_full, stop = (length + M - 1) // M * M, length
    if HAS_FIRST:
        last += b * last_batch
        stop = tl.load(last + tl.minimum(start + N, length) - 1) + 1
        last_full = (tl.load(last + start) + 1) // M * M
    slope = power
    if HAS_SLOPES:
        slope = tl.load(slopes + h) * TO_POWERS
    begin = start // M * M
    first_full = tl.minimum((start + N - 1 + M - 1) // M * M, (stop + M - 1) // M * M)
    of_all, of_shared = tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)
    of_all, of_shared = _add_queries(
        of_all, of_shared, k_tile, k, q, lse, share, first, begin, first_full, key, k_row, q_row, length, power,
        slope, HAS_FIRST, HAS_SLOPES, HAS_SHARE, True, K, K_BLOCK, M, CHUNK, PRECISION,
    )  # fmt: skip
    last_full = tl.maximum(last_full, first_full)
    of_all, of_shared = _add_queries(
        of_all, of_shared, k_tile, k, q, lse, share, first, first_full, last_full, key, k_row, q_row, length, power,
        slope, HAS_FIRST, HAS_SLOPES, HAS_SHARE, False, K, K_BLOCK, M, CHUNK, PRECISION,
    )  # fmt: skip
    if HAS_FIRST:
        of_all, of_shared = _add_queries(
            of_all, of_shared, k_tile, k, q, lse, share, first, last_full, stop, key, k_row, q_row, length, power,
            slope, HAS_FIRST, HAS_SLOPES, HAS_SHARE, True, K, K_BLOCK, M, CHUNK, PRECISION,
        )  # fmt: skip
    at, there = head * length + key, key < length
    tl.store(received + at, of_all, mask=there)
    if HAS_SHARE:
        tl.store(shared + at, of_shared, mask=there)


def received_weights(
    q: Tensor, k: Tensor, first: Tensor | None, last: Tensor | None, lse: Tensor, share: Tensor | None,
    received: Tensor, shared: Tensor | None, scale: float, slopes: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill in ``Σ_t a[t, j]`` over the queries t ≥ 1 of each key j, float32 ``[B, H, T]``, contiguous. Query 0 sees key
    0 alone, and its weight is 1.

    Args:
        q: queries ``[B, H, T, K]``; the last axis of queries and keys is contiguous.
        k: keys ``[B, G, T, K]``.
        first: the first key that each query sees, int32 ``[B, T]``, its last axis contiguous, never falling; None: 0.
        last: the last query that sees each key, like ``first``; None where that is.
        lse: log-sum-exp of the scores of tokens, float32 ``[B, H, T]``, contiguous.
        share: share of the tokens in each query's whole softmax, float32 ``[B, H, T]``, contiguous; None: 1.
        received: sums of the softmax over tokens alone.
        shared: those of the whole softmax; None where ``share`` is.
        scale: scale of the scores.
        slopes: penalty of each head on its scores per position of distance, float32 ``[H]``; None: 0.
    """
    n_sequences, n_heads, length, _ = q.shape
    tile, constants = tile_for("received", q, q), constants_of(q, q, first)
    first_batch, last_batch = (0 if x is None else x.stride(0) for x in (first, last))
    with torch.cuda.device_of(q):
        _received[(triton.cdiv(length, tile.keys), n_sequences * n_heads)](
            q, k, q if first is None else first, q if last is None else last,
            lse if slopes is None else slopes, lse, lse if share is None else share, received,
            received if shared is None else shared, *strides(q), *strides(k), first_batch, last_batch,
            n_heads, n_heads // k.shape[1], length, scale * LOG2_E, HAS_FIRST=first is not None,
            HAS_SLOPES=slopes is not None, HAS_SHARE=share is not None, K=constants["K"],
            K_BLOCK=constants["K_BLOCK"], M=tile.queries, N=tile.keys, CHUNK=chunk_of(q),
            PRECISION=constants["PRECISION"], num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
