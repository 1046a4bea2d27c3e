"""A model's final hidden states at all positions, and their map to logits, some rows at a time.

Logits of all positions are a model's largest tensor. So comparisons of predictions compute those of a few rows at a
time and free them after use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import UsageError
from ...models.decoder import Decoder
from ...models.linear_cross_entropy import soft_capped
from ..foreign import ForeignModel

#: Largest distance of logits from final states to the model's logits, over their standard deviation.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
_TOLERANCE_HALF = 0.1


@dataclass(frozen=True)
class OutputHead:
    """Map of final hidden states ``[R, D]`` to logits ``[R, V]``."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    factor: float = 1.0
    """Logits are multiplied by it (Cohere, Granite)."""
    cap: float | None = None
    """Logits are soft-capped at it (Gemma 2)."""

    def __call__(self, x_RD: Tensor) -> Tensor:
        """Compute the logits, in the dtype of the table."""
        logits_RV = F.linear(x_RD.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)
        if self.factor != 1.0:
            logits_RV = logits_RV * self.factor
        return soft_capped(logits_RV, self.cap)


def output_head(model: Decoder | ForeignModel) -> OutputHead:
    """Return the head of a model; its tensors are shared with the model."""
    if isinstance(model, Decoder):
        table = model.embed if model.head is None else model.head
        return OutputHead(table.weight.detach(), cap=model.config.logit_softcap)
    theirs: Any = model.model
    linear, config = theirs.get_output_embeddings(), theirs.config.get_text_config()
    bias = getattr(linear, "bias", None)
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return OutputHead(linear.weight.detach(), None if bias is None else bias.detach(), factor, cap)


def check_head(model: Decoder | ForeignModel, head: OutputHead, x_BTD: Tensor, last_BV: Tensor) -> None:
    """Compare the head's logits of the last position with those that the model itself gave.

    Raises:
        UsageError: the logits differ: the model has a further step between final states and logits.
    """
    own = last_BV.float()
    worst, scale = (head(x_BTD[:, -1]).float() - own).abs().max(), own.std()
    if worst > _TOLERANCE.get(next(model.parameters()).dtype, _TOLERANCE_HALF) * scale + 1e-5:
        what = getattr(model.config, "model_type", "model")
        raise UsageError(f"this {what}'s logits are no linear map of its final states, so they cannot be compared")


@contextmanager
def final_states(model: Decoder | ForeignModel) -> Iterator[list[Tensor]]:
    """Keep the final hidden states ``[B, T, D]`` that the head reads: within the context, each forward pass replaces
    the content of the list.
    """
    kept: list[Tensor] = []

    def keep_ours(module: nn.Module, args: Any, x_BTD: Tensor) -> None:
        # The decoder may norm the last position alone.
        kept[:] = [model.norm(x_BTD)]  # type: ignore[operator]

    def keep_theirs(module: nn.Module, args: Any, output: Any) -> None:
        kept[:] = [output[0]]

    if isinstance(model, Decoder):
        handle = model.blocks[-1].register_forward_hook(keep_ours)
    else:
        handle = model.model.base_model.register_forward_hook(keep_theirs)
    try:
        yield kept
    finally:
        handle.remove()
