"""Weights in fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .change import Change, ModelWeights, is_block_matrix
from .round_to_nearest import rounded

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class Rounding(Change):
    """Weights rounded to nearest. They keep their dtype, with fewer distinct values."""

    to: Literal["bf16", "fp16", "int8", "int4"]
    """``bf16``, ``fp16``: all tensors. ``int8``, ``int4``: the linear maps of the blocks, on a symmetric grid for each
    output channel (definitions §14); embedding, head, gains and biases stay as they are."""

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        return model._replace(tensors={name: self._rounded(name, tensor) for name, tensor in model.tensors.items()})

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        if self.to in _FLOATS:
            return tensor.to(_FLOATS[self.to]).to(tensor.dtype) if tensor.is_floating_point() else tensor
        return rounded(tensor, _BITS[self.to], 1) if is_block_matrix(name, tensor) else tensor
