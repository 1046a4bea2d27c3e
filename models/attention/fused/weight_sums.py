"""Sums over the weights of causal attention by rows and by keys on a GPU: in two walks, which store no weight, or from
blocks of scores, which become weights in place.

The first walk is that of ``one_walk.py``, which also gives each row's entropy and largest score; the second one,
``received_kernel.py``, sums the weights that each key receives. ``softmax_kernel.py`` takes a block of scores. All are
registered as operators, so that a pass over tensors without values runs them.

Legend: B sequences, H query heads, G key/value heads, T positions, K head width, V that of values; C kinds of weights:
where keys that are no tokens take a share, those of the whole softmax and those of the softmax over tokens alone, else
one.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernel_devices import why_not_triton
from . import one_walk
from .native import by_positions, whole_rows

#: Types of queries, keys and values that the kernels take, and channels of a head at most.
DTYPES, WIDEST = (torch.bfloat16, torch.float16, torch.float32), 128
#: Queries of a block of scores that a program holds.
_QUERIES_OF_BLOCK = 32


def why_not(device_type: str) -> str:
    """Return the reason why the kernels do not run on a type of device; empty if they do. Triton's interpreter runs
    them on a CPU.
    """
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        return ""
    return why_not_triton(device_type)


class WeightSums(NamedTuple):
    """Output of an attention, and sums over its weights; float32 but for the output."""

    o_BHTV: Tensor
    """The weights over tokens alone times their values."""
    lse_BHT: Tensor
    """Log-sum-exp of the scores of tokens."""
    squares_BHT: Tensor
    """``Σ_j p²`` of the softmax p over tokens alone."""
    entropy_BHT: Tensor
    """``−Σ_j p ln p``."""
    largest_BHT: Tensor
    """Largest score of each query on a key that it sees."""
    received_CBHT: Tensor
    """``Σ_t a[t, j]`` over the queries t ≥ 1: query 0 gives key 0 all of its share."""
    share_BHT: Tensor | None
    """Share of the tokens in the whole softmax; None if they have all of it."""


def _empty_rows(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    lse, squares, entropy, largest = (q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(4))
    return by_positions(q, v.shape[-1]), lse, squares, entropy, largest


@torch.library.custom_op("birthmark::weight_sums_of_queries", mutates_args=())
def _of_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None,
    slopes: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from . import one_walk_kernel

    out, lse, squares, entropy, largest = found = _empty_rows(q, v)
    one_walk_kernel.forward(q, k, v, first, None, out, lse, squares, scale, entropy, largest, slopes)
    return found


@_of_queries.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None,
    slopes: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _empty_rows(q, v)


@torch.library.custom_op("birthmark::weight_sums_of_keys", mutates_args=())
def _of_keys(
    q: torch.Tensor, k: torch.Tensor, first: torch.Tensor | None, slopes: torch.Tensor | None, lse: torch.Tensor,
    share: torch.Tensor | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    from .received_kernel import received_weights

    received = lse.new_empty(1 if share is None else 2, *lse.shape)
    last = None if first is None else one_walk.last_queries(first, k.shape[2])
    shared = None if share is None else received[0]
    received_weights(q, k, first, last, lse, share, received[-1], shared, scale, slopes)
    return received


@_of_keys.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, first: torch.Tensor | None, slopes: torch.Tensor | None, lse: torch.Tensor,
    share: torch.Tensor | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    return lse.new_empty(1 if share is None else 2, *lse.shape)


@torch.library.custom_op(
    "birthmark::softmax_with_sums_", mutates_args=("scores", "lse", "squares", "entropy", "largest", "share")
)
def softmax_with_sums_(
    scores: torch.Tensor, start: int, others: torch.Tensor | None, lse: torch.Tensor, squares: torch.Tensor,
    entropy: torch.Tensor, largest: torch.Tensor, share: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Turn scores into weights, and fill in their sums (``softmax_kernel.py``); return what keys receive, ``[C, N, P,
    S]``.
    """
    from . import softmax_kernel

    received = _received_of(scores, share)
    softmax_kernel.softmax_with_sums_(
        scores, start, others, lse, squares, entropy, largest, share, received, _QUERIES_OF_BLOCK
    )
    return received


@softmax_with_sums_.register_fake
def _(
    scores: torch.Tensor, start: int, others: torch.Tensor | None, lse: torch.Tensor, squares: torch.Tensor,
    entropy: torch.Tensor, largest: torch.Tensor, share: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return _received_of(scores, share)


def _received_of(scores_NRS: Tensor, share: Tensor | None) -> Tensor:
    n, n_rows, n_keys = scores_NRS.shape
    return scores_NRS.new_empty(1 if share is None else 2, n, -(-n_rows // _QUERIES_OF_BLOCK), n_keys)


def weight_sums(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTV: Tensor, scale: float, first_BT: Tensor | None = None,
    others_BHT: Tensor | None = None, slopes_H: Tensor | None = None,
) -> WeightSums:  # fmt: skip
    """Compute causal attention over tokens and the sums over its weights. Nothing carries a gradient.

    Args:
        q_BHTK: queries; bf16, fp16 or float32, as keys and values. Products of float32 are IEEE's.
        k_BGTK: keys.
        v_BGTV: values.
        scale: scale of the scores.
        first_BT: the first key that each query sees, int32, never falling along a sequence; B may be 1 for all; None:
            the first of all.
        others_BHT: log-sum-exp of the scores of keys that are no tokens, which take a share of each query; None
            without any.
        slopes_H: penalty of each head on its scores per position of distance; None: 0.
    """
    q, k, v = map(whole_rows, (q_BHTK, k_BGTK, v_BGTV))
    first = None if first_BT is None else first_BT.expand(len(q), -1)
    slopes = None if slopes_H is None else slopes_H.float().contiguous()
    out, lse, squares, entropy, largest = _of_queries(q, k, v, first, slopes, scale)
    share = None if others_BHT is None else (lse - others_BHT.float()).sigmoid_().contiguous()
    received = _of_keys(q, k, first, slopes, lse, share, scale)
    return WeightSums(out, lse, squares, entropy, largest, received, share)
