"""Random numbers added to weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..keyed_random import keyed_generator
from .change import Change, ModelWeights


@dataclass(frozen=True)
class Noise(Change):
    """Independent normal numbers are added to every matrix and table."""

    share: float
    """Standard deviation of the noise, as a share of the matrix's standard deviation."""

    def problems(self) -> list[str]:
        """See :class:`Change`."""
        return [] if 0 < self.share <= 100 else [f"share is {self.share}: give a number above 0, at most 100"]

    def changed(self, model: ModelWeights, seed: int, other: ModelWeights | None) -> ModelWeights:
        """See :class:`Change`."""
        return model._replace(
            tensors={
                name: self._disturbed(tensor, name, seed) if name.endswith(".weight") and tensor.ndim == 2 else tensor
                for name, tensor in model.tensors.items()
            }
        )

    def _disturbed(self, matrix: Tensor, name: str, seed: int) -> Tensor:
        normals = keyed_generator(seed, "noise", name).standard_normal(tuple(matrix.shape), dtype="float32")
        return matrix + self.share * matrix.std(correction=0) * torch.from_numpy(normals).to(matrix)
