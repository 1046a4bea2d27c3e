"""Attention, its log-sum-exp and the sum of the squares of its weights in one walk over the keys, on a GPU.

The kernels are ``one_walk_kernel.py``'s, in Triton, registered as operators, so that a compiled graph calls them
unchanged and a plan runs them on tensors without values.

Legend: B sequences, H query heads, G key/value heads, T queries, S keys, K head width, V that of values. Queries are
those of the last T keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .native import by_positions, whole_rows


def last_queries(first_BT: Tensor, n_keys: int) -> Tensor:
    """Return the last query that sees each key, int32 ``[B, S]``, from the first key that each query sees."""
    keys_BS = torch.arange(n_keys, device=first_BT.device, dtype=first_BT.dtype).expand(len(first_BT), -1).contiguous()
    # A query after the last that begins at a key or before it does not see the key.
    return torch.searchsorted(first_BT.contiguous(), keys_BS, right=True, out_int32=True) - 1


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return by_positions(q, v.shape[-1]), lse, torch.empty_like(lse)


class Calibration(NamedTuple):
    """Calibration of an output by the sum of squared weights, ``√(R/(ρ + (1−ρ)·Σa²))`` times it (definitions §9)."""

    rho: Tensor | None
    """ρ, broadcastable to ``[B, H, T]``; None: 0."""
    smallest: float
    """The least that Σa² counts."""
    inverse: float | None
    """R is ``ρ + (1−ρ)·inverse``; None: 1."""
    learns: bool
    """False if no gradient goes through the factors."""


# Operators take it in parts, of which ``smallest`` is None without any.


def _calibration(rho: Tensor | None, smallest: float | None, inverse: float | None, learns: bool) -> Calibration | None:
    return None if smallest is None else Calibration(rho, smallest, inverse, learns)


@torch.library.custom_op("birthmark::causal_walk", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, others: torch.Tensor | None,
    rho: torch.Tensor | None, scale: float, smallest: float | None, inverse: float | None, learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from . import one_walk_kernel

    out, lse, squares = _empty(q, v)
    one_walk_kernel.forward(
        q, k, v, first, others, out, lse, squares, scale,
        calibration=_calibration(rho, smallest, inverse, learns),
    )  # fmt: skip
    return out, lse, squares


@_forward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, others: torch.Tensor | None,
    rho: torch.Tensor | None, scale: float, smallest: float | None, inverse: float | None, learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _empty(q, v)


def _like_rows(lse: Tensor, x: Tensor | None) -> Tensor:
    return lse.new_empty(0) if x is None else torch.empty_like(lse)


@torch.library.custom_op("birthmark::causal_walk_backward", mutates_args=())
def _backward(
    d_out: torch.Tensor | None, d_lse: torch.Tensor | None, d_squares: torch.Tensor | None, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, others: torch.Tensor | None,
    rho: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, squares: torch.Tensor, scale: float,
    smallest: float | None, inverse: float | None, learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    from . import one_walk_kernel

    dq, dk, dv = (by_positions(x, x.shape[-1]) for x in (q, k, v))
    d_others, d_rho = _like_rows(lse, others), _like_rows(lse, rho)
    last = None if first is None else last_queries(first, k.shape[2])
    one_walk_kernel.backward(
        d_out, d_lse, d_squares, q, k, v, first, last, others, out, lse, squares, dq, dk, dv,
        None if others is None else d_others, scale, _calibration(rho, smallest, inverse, learns),
        None if rho is None else d_rho,
    )  # fmt: skip
    return dq, dk, dv, d_others, d_rho


@_backward.register_fake
def _(
    d_out: torch.Tensor | None, d_lse: torch.Tensor | None, d_squares: torch.Tensor | None, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, first: torch.Tensor | None, others: torch.Tensor | None,
    rho: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, squares: torch.Tensor, scale: float,
    smallest: float | None, inverse: float | None, learns: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk, dv = (by_positions(x, x.shape[-1]) for x in (q, k, v))
    return dq, dk, dv, _like_rows(lse, others), _like_rows(lse, rho)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.smallest, ctx.inverse, ctx.learns = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, d_squares: Tensor | None
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: under activation checkpointing each time would compute them again
    d_out = None if d_out is None else whole_rows(d_out)
    d_lse, d_squares = (None if d is None else d.contiguous() for d in (d_lse, d_squares))
    numbers = ctx.scale, ctx.smallest, ctx.inverse, ctx.learns
    dq, dk, dv, d_others, d_rho = _backward(d_out, d_lse, d_squares, *saved, *numbers)
    of_others, of_rho = (None if x is None else d for x, d in zip(saved[4:6], (d_others, d_rho), strict=True))
    return dq, dk, dv, None, of_others, of_rho, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def walk(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, scale: float, first_BT: Tensor | None = None,
    others_BHT: Tensor | None = None, calibration: Calibration | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute causal attention over tokens, and over further keys that have no value. Return the output ``[B, H, T,
    V]`` and, in float32 ``[B, H, T]``, the log-sum-exp over all keys, and ``Σ a²`` of the weights on tokens. All carry
    gradients.

    Args:
        q_BHTK: queries; bf16, fp16 or float32, as keys and values.
        k_BGSK: keys.
        v_BGSV: values.
        scale: scale of the scores.
        first_BT: the first key that each query sees, int32, never falling along a sequence; B may be 1 for all; None:
            the first of all.
        others_BHT: log-sum-exp of the scores of the further keys.
        calibration: calibration of the output; None: none.
    """
    q, k, v = map(whole_rows, (q_BHTK, k_BGSK, v_BGSV))
    others = None if others_BHT is None else others_BHT.float().contiguous()
    first = None if first_BT is None else first_BT.expand(len(q), -1)
    rho, *numbers = calibration or (None, None, None, False)
    rho = None if rho is None else rho.float().expand(q.shape[:3]).contiguous()
    found: tuple[Tensor, Tensor, Tensor] = _forward(q, k, v, first, others, rho, scale, *numbers)
    return found
