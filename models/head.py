"""Output of the decoder from its last hidden states: logits, or losses of targets.

Both are computed inside one module's forward pass, so that a strategy that shards weights gathers the table once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import ModelConfig
from .init import Linear
from .linear_cross_entropy import TokenLosses, linear_cross_entropy, soft_capped
from .parameter_roles import ParameterRole


def read_out(
    x: Tensor, weight_VD: Tensor, targets: Tensor | None = None, z_loss: float = 0.0, cap: float | None = None
) -> Tensor | TokenLosses:
    """Compute logits ``[…, D] → […, V]``, soft-capped if ``cap`` is given; or the losses of ``targets`` ``[…]``.

    Computes in the dtype of ``x``, or of autocast: a strategy may have gathered the weights in a narrower one.
    """
    if targets is None:
        narrower = not torch.is_autocast_enabled(x.device.type)
        return soft_capped(F.linear(x, weight_VD.to(x.dtype) if narrower else weight_VD), cap)
    losses = linear_cross_entropy(x.flatten(0, -2), weight_VD, targets.flatten(), z_loss=z_loss, cap=cap)
    # Not by _replace: torch 2.11 cannot compile its result.
    return TokenLosses(*losses[:3], per_token=losses.per_token.view(targets.shape))


class Head(Linear):
    """Output head: a separate table of vectors, ``weight`` ``[V, D]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.parameter_roles = {"weight": ParameterRole.HEAD}
        self.cap = config.logit_softcap

    def forward(  # type: ignore[override]
        self, x: Tensor, targets: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor | TokenLosses:
        """See :func:`read_out`."""
        return read_out(x, self.weight, targets, z_loss, self.cap)
