"""GPU kernels of SwiGLU's product (arXiv 2002.05202): ``silu(g) · u`` and its gradients, of each number as it is read.

Separate operators move 5 tensors forward and 9 backward, and keep ``silu(g)``; these kernels move 3 and 5. All is
computed in float32 and rounded once.

Triton reads the annotations of its functions: only constants have one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Numbers that a program holds at once, and its warps.
_BLOCK, _WARPS = 2048, 4


@triton.jit
def _product(g, u, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    gate = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(u + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=there)


@triton.jit
def _gradients(d, g, u, dg, du, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    upstream = tl.load(d + at, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(u + at, mask=there, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    slope = share * (1.0 + gate * (1.0 - share))
    tl.store(dg + at, (upstream * up * slope).to(dg.dtype.element_ty), mask=there)
    tl.store(du + at, (upstream * gate * share).to(du.dtype.element_ty), mask=there)


def product(g: Tensor, u: Tensor, y: Tensor) -> None:
    """Fill in ``y = silu(g) · u``.

    Args:
        g: gate, bf16, fp16 or float32, contiguous.
        u: tensor that it multiplies, of the type and shape of ``g``, contiguous, as are all others.
        y: product.
    """
    with torch.cuda.device_of(g):
        _product[(triton.cdiv(g.numel(), _BLOCK),)](g, u, y, g.numel(), BLOCK=_BLOCK, num_warps=_WARPS)


def gradients(d: Tensor, g: Tensor, u: Tensor, dg: Tensor, du: Tensor) -> None:
    """Fill in the gradients of both factors of :func:`product`.

    Args:
        d: gradient of the product.
        g: gate.
        u: tensor that it multiplies.
        dg: gradient of the gate.
        du: gradient of ``u``.
    """
    with torch.cuda.device_of(g):
        _gradients[(triton.cdiv(g.numel(), _BLOCK),)](d, g, u, dg, du, g.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
