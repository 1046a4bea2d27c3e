"""GPU kernel for losses of rows of logits, with the objective's gradient written in place of the logits.

Each row is read twice and written once, in its own type: 6 bytes per bf16 logit, where separate operators move 36. Sums
are float32. Triton (arXiv 10.1145/3315508.3329973) comes with torch wherever there is CUDA on Linux.

Triton reads the annotations of its functions: only constants have one.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Types of logits that the kernel takes.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Logits that a row's threads hold at once, and the warps that do.
_BLOCK, _WARPS = 8192, 16


@triton.jit
def _capped(z, cap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``cap · tanh(z / cap)``."""
    if HAS_CAP:
        # tanh from the exponential of a number that is not positive, which overflows nowhere.
        shrunk = tl.exp(-2.0 * tl.abs(z) / cap)
        size = cap * (1.0 - shrunk) / (1.0 + shrunk)
        z = tl.where(z < 0, -size, size)
    return z


@triton.jit
def _losses(  # type: ignore[no-untyped-def]
    logits,
    targets,
    weights,
    losses,
    squares,
    stride,
    vocab_size,
    z_loss,
    cap,
    IGNORED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    WANTS_GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    top, total, of_target = -float("inf"), 0.0, 0.0
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        seen = token < vocab_size
        z = _capped(tl.load(logits + token, mask=seen, other=0.0).to(tl.float32), cap, HAS_CAP)
        z = tl.where(seen, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher))
        top = higher
        # In this pass: the next one writes where the target's logit stands.
        of_target += tl.sum(tl.where(token == target, z, 0.0))
    log_total = tl.log(total)
    lse = top + log_total
    tl.store(losses + row, tl.where(target == IGNORED, 0.0, top - of_target + log_total))
    tl.store(squares + row, lse * lse)
    if WANTS_GRADIENTS:
        weight = tl.load(weights + row)
        share = weight * (1.0 + 2.0 * z_loss * lse)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            seen = token < vocab_size
            z = _capped(tl.load(logits + token, mask=seen, other=0.0).to(tl.float32), cap, HAS_CAP)
            gradient = share * tl.exp(z - top - log_total) - tl.where(token == target, weight, 0.0)
            if HAS_CAP:
                gradient *= 1.0 - (z / cap) * (z / cap)
            tl.store(logits + token, gradient.to(logits.dtype.element_ty), mask=seen)


def losses_of_rows(
    logits_RV: Tensor,
    targets_R: Tensor,
    weights_R: Tensor,
    losses_R: Tensor,
    squares_R: Tensor,
    wants_gradients: bool,
    *,
    ignored: int,
    z_loss: float,
    cap: float,
) -> None:
    """Fill in losses and squared log-sum-exps; if gradients are wanted, they replace ``logits``.

    Args:
        logits_RV: logits of a type of :data:`DTYPES`, rows contiguous.
        targets_R: int64; a row whose target is ``ignored`` has loss 0.
        weights_R: weights of the rows in the objective, float32; 0 where ignored.
        losses_R: −log p(target), float32, in nats.
        squares_R: squared log-sum-exps, float32.
        wants_gradients: replace the logits by gradients.
        ignored: target of rows that do not count.
        z_loss: coefficient of the squares in the objective.
        cap: cap of soft-capping; 0 for none.
    """
    n, vocab_size = logits_RV.shape
    block = min(_BLOCK, triton.next_power_of_2(vocab_size))
    # Triton launches on the current device, which need not be that of the tensors.
    with torch.cuda.device_of(logits_RV):
        _losses[(n,)](
            logits_RV, targets_R, weights_R, losses_R, squares_R, logits_RV.stride(0), vocab_size, z_loss, cap,
            IGNORED=ignored, HAS_CAP=cap != 0, WANTS_GRADIENTS=wants_gradients, BLOCK=block, num_warps=_WARPS,
        )  # fmt: skip
