"""The loss of the output head: a linear map and the cross-entropy of its logits, in one.

Legend: N rows (positions of all sequences), D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: A target that counts nowhere.
IGNORED = -100


class TokenLosses(NamedTuple):
    """Losses of next-token predictions, in nats, float32 or wider. Only ``objective`` carries gradients."""

    objective: Tensor
    """Scalar that training minimises: ``cross_entropy + z_loss``."""
    cross_entropy: Tensor
    """Scalar: mean of −log p(target) over the targets that count."""
    z_loss: Tensor
    """Scalar: the coefficient times the mean of the squared log-sum-exp of the logits (PaLM, arXiv 2204.02311)."""
    per_token: Tensor
    """−log p(target) of every target, in the targets' shape; 0 where it is ignored."""


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """``cap · tanh(logits / cap)`` (Gemma 2, arXiv 2408.00118); ``None`` leaves logits as they are."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def row_weights(targets_N: Tensor, dtype: torch.dtype) -> Tensor:
    """What each row counts in the mean, ``[N]``: all that are not ignored alike, together 1."""
    counts_N = (targets_N != IGNORED).to(dtype)
    return counts_N / counts_N.sum()


def linear_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, z_loss: float = 0.0, cap: float | None = None
) -> TokenLosses:
    """Losses of the logits ``x @ weightᵀ``.

    Args:
        x_ND: hidden states.
        weight_VD: the table of output vectors.
        targets_N: int64 token ids, :data:`IGNORED` where a row counts nowhere. If none counts, means are NaN.
        z_loss: coefficient of the squared log-sum-exp.
        cap: of :func:`soft_capped`.
    """
    logits_NV = soft_capped(F.linear(x_ND, weight_VD), cap)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    weights_N = row_weights(targets_N, logits_NV.dtype)
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none", ignore_index=IGNORED)
    cross_entropy = (losses_N * weights_N).sum()
    z = torch.zeros_like(cross_entropy)
    if z_loss:
        z = z_loss * (logits_NV.logsumexp(-1).square() * weights_N).sum()
    return TokenLosses(cross_entropy + z, cross_entropy.detach(), z.detach(), losses_N.detach())
