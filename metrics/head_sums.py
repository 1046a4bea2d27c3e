"""Sums over queries and outputs of heads; on a GPU by a kernel that reads them once.

Legend: B sequences, H heads, T positions, K head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernel_devices import fuses_rows

# ---------------------------------------------------------------- the kernel as an operator
# It is registered, so that a pass over tensors without values runs it.


@torch.library.custom_op("birthmark::head_sums", mutates_args=())
def _head_sums(
    x: torch.Tensor, mean: torch.Tensor | None, vectors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from .head_sums_kernel import sum_heads

    return sum_heads(x, mean, vectors)


@_head_sums.register_fake
def _(x: torch.Tensor, mean: torch.Tensor | None, vectors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    n_sequences, n_heads, length, width = x.shape
    of_rows = x.new_empty(n_sequences, length, n_heads, dtype=torch.float32)
    return of_rows, x.new_empty(length, n_heads, width, dtype=torch.float32)


# ---------------------------------------------------------------- sums


class QuerySums(NamedTuple):
    """Sums over the queries of a batch, and the first keys; float32 or wider."""

    first_BHK: Tensor
    """k_0 of each sequence; a copy."""
    total_HK: Tensor
    """``Σ q`` over sequences and positions."""
    moment_HKK: Tensor
    """``Σ q qᵀ`` over the same."""
    dots_BTH: Tensor
    """``q·k_0`` with the first key of its sequence."""


def query_sums(q_BHTK: Tensor, k_BHTK: Tensor) -> QuerySums:
    """Sum queries and multiply them with the first keys of their sequences, both ``[B, H, T, K]`` as they enter the
    scores. Products are float32's, or those of the queries' wider type.
    """
    n_sequences, n_heads = q_BHTK.shape[:2]
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    first_BHK = k_BHTK[:, :, 0].to(wide, copy=True, memory_format=torch.contiguous_format)
    # A sum over all vectors at once leaves a GPU idle: there each sequence has a product of its own.
    n_products = 1 if q_BHTK.device.type == "cpu" else max(n_sequences, 1)
    q_QNK = q_BHTK.to(wide).unflatten(0, (n_products, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        of_products_QHKK = torch.bmm(q_QNK.mT, q_QNK).unflatten(0, (n_products, n_heads))
    moment_HKK = of_products_QHKK[0] if n_products == 1 else of_products_QHKK.sum(0, dtype=torch.float64)
    if fuses_rows(q_BHTK):
        dots_BTH, total_THK = _head_sums(q_BHTK, None, first_BHK)
        return QuerySums(first_BHK, total_THK.sum(0), moment_HKK, dots_BTH)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        # As heads lie in memory. One vector per sequence is too little for a matrix product.
        dots_BTH = torch.linalg.vecdot(q_BHTK.to(wide).transpose(1, 2), first_BHK[:, None])
    total_HK = q_QNK.unflatten(0, (n_products, n_heads)).sum((0, 2))
    return QuerySums(first_BHK, total_HK, moment_HKK, dots_BTH)


class Deviations(NamedTuple):
    """Deviations of a batch of head outputs from a mean, in its type."""

    norm_BTH: Tensor
    """``‖o − mean‖``."""
    total_THK: Tensor
    """``Σ_b (o − mean)``."""


def deviations(o_BHTK: Tensor, mean_THK: Tensor) -> Deviations:
    """Sum deviations of head outputs ``[B, H, T, K]`` from a mean ``[T, H, K]``, positions before heads, as outputs lie
    in memory.
    """
    if mean_THK.dtype == torch.float32 and fuses_rows(o_BHTK):
        return Deviations(*_head_sums(o_BHTK, mean_THK, None))
    away_BTHK = o_BHTK.transpose(1, 2).to(mean_THK.dtype) - mean_THK
    return Deviations(torch.linalg.vector_norm(away_BTHK, dim=-1), away_BTHK.sum(0))
