"""GPU kernel of a causal softmax over a block of scores, in place, with the sums over its weights.

Separate operators would read the block six times: for the mask, the largest score, the softmax, squares, entropy, and
the sums over queries. A program holds some rows and walks over their keys twice; the second walk finds them in cache.
Sums over queries are taken by programs and added afterwards: reruns are equal bit for bit.

Triton reads the annotations of its functions: only constants have one.

Legend: N sequences and heads, R queries of the block, S keys, T positions; P programs of a head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .one_walk_kernel import TO_POWERS

#: Keys of a tile, and warps of a program.
_KEYS, _WARPS = 128, 8
#: Below every score, and finite: the difference of two of them is no NaN.
_LOWEST = tl.constexpr(-1e30)


@triton.jit
def _softmax(  # type: ignore[no-untyped-def]
    scores, others, lse, squares, entropy, largest, share, received, shared, start, n_rows, n_keys, length,
    HAS_OTHERS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Process some queries of one head."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = part * M + tl.arange(0, M)
    there, query = row < n_rows, start + row
    at = head * length + query
    scores += (head * n_rows + row)[:, None] * n_keys
    top, total = tl.full([M], _LOWEST, tl.float32), tl.zeros([M], tl.float32)
    # Behind the last of these queries they see no key.
    for first in range(0, tl.minimum(start + part * M + M, n_keys), N):
        key = first + tl.arange(0, N)
        # By a mask that is alike for neighbouring keys, which are then loaded together.
        tile = tl.load(scores + key[None, :], mask=there[:, None] & (key < n_keys)[None, :], other=float("-inf"))
        tile = tl.where(key[None, :] <= query[:, None], tile, float("-inf"))
        found = tl.maximum(top, tl.max(tile, 1))
        total = total * tl.exp2((top - found) * TO_POWERS) + tl.sum(tl.exp2((tile - found[:, None]) * TO_POWERS), 1)
        top = found
    total = tl.where(there, total, 1.0)
    level = tl.log(total)
    tl.store(largest + at, top, mask=there)
    tl.store(lse + at, top + level, mask=there)
    # Query 0 gives key 0 all of its share: what keys receive is without it.
    counts = tl.where(there & (query > 0), 1.0, 0.0)
    of_tokens = counts
    if HAS_OTHERS:
        excess = top + level - tl.load(others + at, mask=there, other=0.0)
        of_tokens = 1.0 / (1.0 + tl.exp2(-excess * TO_POWERS))
        tl.store(share + at, of_tokens, mask=there)
        of_tokens *= counts
    square, spread = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    received += (head * tl.num_programs(0) + part) * n_keys
    shared += (head * tl.num_programs(0) + part) * n_keys
    for first in range(0, n_keys, N):
        key = first + tl.arange(0, N)
        exists = key < n_keys
        tile = tl.load(scores + key[None, :], mask=there[:, None] & exists[None, :], other=float("-inf"))
        below = tile - top[:, None]
        weights = tl.where(key[None, :] <= query[:, None], tl.exp2(below * TO_POWERS) / total[:, None], 0.0)
        square += tl.sum(weights * weights, 1)
        spread -= tl.sum(tl.where(weights > 0, weights * below, 0.0), 1)
        tl.store(scores + key[None, :], weights, mask=there[:, None] & exists[None, :])
        tl.store(received + key, tl.sum(weights * counts[:, None], 0), mask=exists)
        if HAS_OTHERS:
            tl.store(shared + key, tl.sum(weights * of_tokens[:, None], 0), mask=exists)
    tl.store(squares + at, square, mask=there)
    tl.store(entropy + at, spread + level, mask=there)


def softmax_with_sums_(
    scores: Tensor, start: int, others: Tensor | None, lse: Tensor, squares: Tensor, entropy: Tensor, largest: Tensor,
    share: Tensor | None, received: Tensor, queries: int,
) -> None:  # fmt: skip
    """Turn the scores of the queries from ``start`` on into weights, and fill in their sums.

    Args:
        scores: float32 ``[N, R, S]``, contiguous; −inf, or anything behind the query's own position, where a key is not
            seen.
        start: position of the first query.
        others: log-sum-exp of the scores of further keys, float32 ``[N, T]`` as all that follow, contiguous; None
            without any.
        lse: log-sum-exp of the scores of tokens.
        squares: ``Σ_j p²``.
        entropy: ``−Σ_j p ln p``.
        largest: largest score.
        share: share of the tokens in the whole softmax; None where ``others`` is.
        received: what keys receive from the queries t ≥ 1 of each program, ``[C, N, P, S]``: weights times the share,
            if there are further keys, and weights.
        queries: number of them in a program.
    """
    n, n_rows, n_keys = scores.shape
    with torch.cuda.device_of(scores):
        _softmax[(received.shape[2], n)](
            scores, lse if others is None else others, lse, squares, entropy, largest, lse if share is None else share,
            received[-1], received[0], start, n_rows, n_keys, lse.shape[-1], HAS_OTHERS=others is not None,
            M=queries, N=_KEYS, num_warps=_WARPS,
        )  # fmt: skip
