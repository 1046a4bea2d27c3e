"""Weights set to 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .change import Change, ModelWeights, is_block_matrix, share_problem


@dataclass(frozen=True)
class Pruning(Change):
    """The smallest weights of every linear map of the blocks become 0 (magnitude pruning, arXiv 1506.02626)."""

    share: float
    """Share of a matrix's weights that become 0."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return share_problem("share", self.share)

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        return model._replace(
            tensors={
                name: self._pruned(tensor) if is_block_matrix(name, tensor) else tensor
                for name, tensor in model.tensors.items()
            }
        )

    def _pruned(self, matrix: Tensor) -> Tensor:
        pruned = matrix.clone(memory_format=torch.contiguous_format)
        smallest = matrix.abs().reshape(-1).argsort(stable=True)[: round(self.share * matrix.numel())]
        pruned.view(-1)[smallest] = 0
        return pruned
