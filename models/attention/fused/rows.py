"""Sums over the rows of heads, ``a·x + Σ_n b_n·v_n``, and their gradients: rows times factors, and keys and values that
belong to no token.

On a GPU, in a pass that is not compiled, the kernels of ``rows_kernel.py`` read and write each row once. Elsewhere, and
for many vectors, torch's operators do it.

Legend: B sequences, H query heads, T queries, N vectors of each head, K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....kernel_devices import fuses_rows
from .native import whole_rows

#: Vectors of a head that the kernels take, one after the other.
_MOST = 16


def fuses(rows: Tensor, n_vectors: int = 0) -> bool:
    """Return True if kernels take these rows with so many vectors of each head."""
    return fuses_rows(rows) and n_vectors <= _MOST


# ---------------------------------------------------------------- the kernels as operators
# Both are registered, so that a plan runs them on tensors without values. A tensor without elements stands for none.


@torch.library.custom_op("birthmark::combined_rows", mutates_args=())
def _combined(
    x: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, v: torch.Tensor | None,
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    from .rows_kernel import combine

    y = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    combine(y, x, a, b, v)
    return y


@_combined.register_fake
def _(
    x: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, v: torch.Tensor | None,
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _like(rows: Tensor) -> tuple[Any, ...]:
    """Return shape, strides, type and device of a new tensor like these rows."""
    return rows.shape, torch.empty_like(rows, device="meta").stride(), rows.dtype, rows.device


def _empty_sums(
    d: Tensor, x: Tensor | None, a: Tensor | None, b: Tensor | None, v: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_vectors, by_row = 0 if v is None else v.shape[1], d.shape[:3]
    return (
        d.new_empty(0) if a is None else torch.empty_like(d),
        d.new_empty(0 if x is None else by_row, dtype=torch.float32),
        d.new_empty(0 if v is None else (*by_row, n_vectors), dtype=torch.float32),
        d.new_empty(0 if b is None else (d.shape[1], b.shape[-1], d.shape[3]), dtype=torch.float32),
    )


@torch.library.custom_op("birthmark::reduced_rows", mutates_args=())
def _reduced(
    d: torch.Tensor, x: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from .rows_kernel import n_parts, reduce

    dx, by_x, by_v, _ = _empty_sums(d, x, a, b, v)
    parts = None
    if b is not None:
        parts = d.new_empty((*d.shape[:2], n_parts(d), b.shape[-1], d.shape[3]), dtype=torch.float32)
    reduce(d, x, a, b, v, None if a is None else dx, None if x is None else by_x, None if v is None else by_v, parts)
    return dx, by_x, by_v, by_x.new_empty(0) if parts is None else parts.sum((0, 2))


@_reduced.register_fake
def _(
    d: torch.Tensor, x: torch.Tensor | None, a: torch.Tensor | None, b: torch.Tensor | None, v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _empty_sums(d, x, a, b, v)


def _whole(x: Tensor) -> Tensor:
    return x.float().contiguous()


# ---------------------------------------------------------------- keys beside the tokens'


@torch.library.custom_op("birthmark::beside", mutates_args=())
def _beside(
    o: torch.Tensor, lse: torch.Tensor, others: torch.Tensor, v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from .rows_kernel import set_beside

    y, total = torch.empty_like(o), torch.empty_like(lse)
    set_beside(y, total, o, lse, others, v)
    return y, total


@_beside.register_fake
def _(
    o: torch.Tensor, lse: torch.Tensor, others: torch.Tensor, v: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(o), torch.empty_like(lse)


@torch.library.custom_op("birthmark::beside_backward", mutates_args=())
def _from_beside(
    d: torch.Tensor, out: torch.Tensor, total: torch.Tensor, d_total: torch.Tensor | None, others: torch.Tensor,
    v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from .rows_kernel import n_parts, take_from_beside

    d_others, parts = torch.empty_like(others), None
    if v is not None:
        parts = v.new_empty(*d.shape[:2], n_parts(d), *v.shape[1:])
    take_from_beside(d_others, parts, d, out, total, d_total, others, v)
    return d_others, others.new_empty(0) if parts is None else parts.sum((0, 2))


@_from_beside.register_fake
def _(
    d: torch.Tensor, out: torch.Tensor, total: torch.Tensor, d_total: torch.Tensor | None, others: torch.Tensor,
    v: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(others), others.new_empty(0) if v is None else torch.empty_like(v)


def logsumexp_of_all(lse_BHT: Tensor, others_BHTN: Tensor) -> Tensor:
    """Return the log-sum-exp over all keys ``[B, H, T]``, from that of tokens and the scores of the others."""
    others_BHT = others_BHTN[..., 0] if others_BHTN.shape[-1] == 1 else others_BHTN.logsumexp(-1)
    return torch.logaddexp(lse_BHT, others_BHT)


def beside(o_BHTK: Tensor, lse_BHT: Tensor, others_BHTN: Tensor, v_HNK: Tensor | None) -> tuple[Tensor, Tensor]:
    """Set an output over tokens beside further keys. Carries no gradient.

    Args:
        o_BHTK: the output.
        lse_BHT: log-sum-exp of the tokens' scores, float32 or wider.
        others_BHTN: scores of the further keys.
        v_HNK: their values; None: zero.

    Returns:
        The output over all keys, in the type and layout of ``o_BHTK``, and their log-sum-exp ``[B, H, T]``.
    """
    n_vectors = others_BHTN.shape[-1]
    if fuses(o_BHTK, n_vectors):
        found: tuple[Tensor, Tensor] = _beside(
            o_BHTK, _whole(lse_BHT), _whole(others_BHTN), None if v_HNK is None else _whole(v_HNK)
        )
        return found
    total_BHT = logsumexp_of_all(lse_BHT, others_BHTN)
    # In the layout of ``o``, as the first operand has it.
    out = o_BHTK * (lse_BHT - total_BHT).exp_()[..., None].to(o_BHTK.dtype)
    if v_HNK is None:
        return out, total_BHT
    b_BHTN, v_HNK = (others_BHTN - total_BHT[..., None]).exp_().to(out.dtype), v_HNK.to(out.dtype)
    # Not in place: torch 2.11 compiles that to a graph in which the output has no gradient.
    return torch.addcmul(out, b_BHTN, v_HNK) if n_vectors == 1 else out + b_BHTN @ v_HNK, total_BHT


def gradients_beside(
    d_BHTK: Tensor | None,
    out_BHTK: Tensor,
    total_BHT: Tensor,
    d_total_BHT: Tensor | None,
    others_BHTN: Tensor,
    v_HNK: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of the scores of further keys ``[B, H, T, N]`` and of their values ``[H, N, K]``, from
    those of :func:`beside`'s results, None: 0. Without values, or without a gradient of the output, the second is None.
    """
    if d_BHTK is not None and fuses(d_BHTK, others_BHTN.shape[-1]) and out_BHTK.stride(-1) == 1:
        given = [None if x is None else _whole(x) for x in (total_BHT, d_total_BHT, others_BHTN, v_HNK)]
        d_others, d_v = _from_beside(d_BHTK, out_BHTK, *given)
        return d_others, None if v_HNK is None else d_v
    shares = (others_BHTN - total_BHT[..., None]).exp()
    d_shares = torch.zeros_like(shares) if d_total_BHT is None else d_total_BHT[..., None].expand_as(shares)
    if d_BHTK is None:
        return d_shares * shares, None
    d_shares = d_shares - (d_BHTK * out_BHTK).sum(-1, keepdim=True, dtype=shares.dtype)
    if v_HNK is None:
        return d_shares * shares, None
    d_v = torch.einsum("bhtn,bhtk->hnk", shares.to(d_BHTK.dtype), d_BHTK)
    if v_HNK.shape[1] == 1:
        d_shares = d_shares + (d_BHTK * v_HNK.to(d_BHTK.dtype)).sum(-1, keepdim=True, dtype=shares.dtype)
    else:
        d_shares = d_shares + d_BHTK.to(shares.dtype) @ v_HNK.to(shares.dtype).mT
    return d_shares * shares, d_v


# ---------------------------------------------------------------- with gradients


class _Scaled(torch.autograd.Function):
    """Autograd function of rows times a factor each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, factor)
        found: Tensor = _combined(x, _whole(factor), None, None, *_like(x))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor | None]:
        x, factor = ctx.saved_tensors
        dx, d_factor, _, _ = _reduced(whole_rows(d), x, _whole(factor), None, None)
        return dx, None if x is None else d_factor.to(factor.dtype)


def scaled(x_BHTK: Tensor, factor_BHT: Tensor) -> Tensor:
    """Multiply every row by its factor, in the type of the rows. Both carry gradients."""
    if fuses(x_BHTK):
        found: Tensor = _Scaled.apply(x_BHTK, factor_BHT.expand(x_BHTK.shape[:3]))
        return found
    return x_BHTK * factor_BHT[..., None].to(x_BHTK.dtype)


def vector_gradients(x_BHTK: Tensor, d_BHTN: Tensor) -> Tensor:
    """Compute ``Σ_bt d_n·x`` ``[H, N, K]`` on a GPU: the gradient of vectors from that of their products with rows."""
    found: Tensor = _reduced(x_BHTK, None, None, d_BHTN, None)[3]
    return found


class _Products(torch.autograd.Function):
    """Autograd function of rows, and of their products with the vectors of their head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        v = _whole(v)
        ctx.save_for_backward(x, v)
        ctx.set_materialize_grads(False)
        by_v: Tensor = _reduced(x, None, None, None, v)[2]
        return x.view_as(x), by_v

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_x: Tensor | None, d: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if d is None:
            return d_x, None
        (x, v), d = ctx.saved_tensors, d.contiguous()
        d_x = None if d_x is None else whole_rows(d_x)
        return _combined(d_x, None, d, v, *_like(x)), vector_gradients(x, d)


def products(x_BHTK: Tensor, v_HNK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows, and ``Σ_k x·v_n`` ``[B, H, T, N]`` in float32 or wider. Both carry gradients.

    Other readers take the rows that are returned: what reaches them is then added to the gradient as it is written.
    """
    wide = torch.promote_types(x_BHTK.dtype, torch.float32)
    if fuses(x_BHTK, v_HNK.shape[1]):
        found: tuple[Tensor, Tensor] = _Products.apply(x_BHTK, v_HNK.to(wide))
        return found
    with torch.autocast(x_BHTK.device.type, enabled=False):
        return x_BHTK, x_BHTK.to(wide) @ v_HNK.to(wide).mT
