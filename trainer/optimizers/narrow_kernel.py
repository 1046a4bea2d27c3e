"""GPU kernel of a step of AdamW with both moments in bf16: 20 bytes for each parameter, read and written.

Separate operators would move 66: they hold the moments in float32 beside those that are kept. Moments are read and
written as sixteen bits, so that how they are rounded is decided here.

Triton reads the annotations of its functions: only constants have one.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers that a program holds at once, and its warps.
_BLOCK, _WARPS = 1024, 4


@triton.jit
def _one_minus_exp(x):  # type: ignore[no-untyped-def]
    """Compute ``1 − exp(x)`` for a number that is not positive, with all digits of float32 near 0 too."""
    series = 1.0 + x / 2 * (1.0 + x / 3 * (1.0 + x / 4 * (1.0 + x / 5 * (1.0 + x / 6 * (1.0 + x / 7 * (1.0 + x / 8))))))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _mean(kept, new, gain):  # type: ignore[no-untyped-def]
    """Move a running mean by ``gain`` of the way to a new value, and to that itself for 1, however large it was."""
    return tl.where(gain < 0.5, kept + gain * (new - kept), new - (1.0 - gain) * (new - kept))


@triton.jit
def _wide(bits):  # type: ignore[no-untyped-def]
    """Read bf16 as float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _step(  # type: ignore[no-untyped-def]
    p, g, mean, square, step, of_row, of_column, grad_scale, found_inf, n, start, rate, kept, gain1, gain2, log1, log2,
    eps, HAS_SCALE: tl.constexpr, HAS_FOUND: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    stop = n
    if HAS_FOUND:
        stop = tl.where(tl.load(found_inf) == 0.0, n, 0)
    there = at < stop
    gradient = tl.load(g + at, mask=there, other=0.0)
    if HAS_SCALE:
        gradient /= tl.load(grad_scale)
        tl.store(g + at, gradient, mask=there)
    m = _wide(tl.load(mean + at, mask=there, other=0))
    v = _wide(tl.load(square + at, mask=there, other=0))
    m = _mean(m, gradient, gain1)
    v = _mean(v, gradient * gradient, gain2)
    count = tl.load(step)
    denominator = tl.sqrt(v) / tl.sqrt(_one_minus_exp(count * log2)) + eps
    value = tl.load(p + at, mask=there, other=0.0) * kept
    value -= rate / _one_minus_exp(count * log1) * m / denominator
    tl.store(p + at, value, mask=there)
    # To the nearest, of two the even one; a number that is none stays so.
    m_bits = m.to(tl.int32, bitcast=True)
    m_bits += 0x7FFF + ((m_bits >> 16) & 1)
    tl.store(mean + at, tl.where(m == m, m_bits >> 16, 0x7FC0).to(tl.int16), mask=there)
    place = start + at
    noise = tl.load(of_row + place // ROW, mask=there, other=0) ^ tl.load(of_column + place % ROW, mask=there, other=0)
    v_bits = (v.to(tl.int32, bitcast=True) + noise) >> 16
    # A GPU's NaN has all bits: noise would carry it over to −0.
    tl.store(square + at, tl.where(v == v, v_bits, 0x7FC0).to(tl.int16), mask=there)


def _log(beta: float) -> float:
    """Return the logarithm of a decay; for 0 a finite one, since the kernel multiplies it."""
    return math.log(beta) if beta else -1e30


def step_adamw(
    p: Tensor, g: Tensor, mean: Tensor, square: Tensor, step: Tensor, of_row: Tensor, of_column: Tensor,
    grad_scale: Tensor | None, found_inf: Tensor | None, start: int, lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Take a step in place.

    Args:
        p: parameters, float32 ``[n]``, contiguous, as are all others of their size.
        g: gradients, float32; divided by ``grad_scale``, if it is given.
        mean: mean of gradients, bf16; rounded to the nearest.
        square: mean of their squares, bf16; rounded at random.
        step: number of this step, from 1 on, float32 ``[]``.
        of_row: random bits of each row of elements of the whole tensor, int32.
        of_column: those of the columns; the bits of an element are the exclusive or of both.
        grad_scale: divisor of the gradients, float32.
        found_inf: 1 where nothing may change, float32.
        start: place of the first parameter in the whole tensor.
        lr: learning rate.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squares.
        eps: offset of the denominator.
        weight_decay: decoupled weight decay.
    """
    with torch.cuda.device_of(p):
        _step[(triton.cdiv(p.numel(), _BLOCK),)](
            p, g, mean.view(torch.int16), square.view(torch.int16), step, of_row, of_column,
            step if grad_scale is None else grad_scale, step if found_inf is None else found_inf, p.numel(), start,
            lr, 1 - lr * weight_decay, 1 - beta1, 1 - beta2, _log(beta1), _log(beta2), eps,
            HAS_SCALE=grad_scale is not None, HAS_FOUND=found_inf is not None, ROW=of_column.numel(), BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
