"""Weight that queries give to the keys of an adapter's prefix (definitions §12)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from ..additive import AdditiveMetric
from ..quantity import Sizes


class _Weights(Protocol):
    def prefix_share(self) -> Tensor | None:
        """Return each query's weight on the keys of a prefix ``[B, H, T]``; None without a prefix."""


class ShownWeights(Protocol):
    """The part of an attention that :class:`PrefixMass` reads."""

    @property
    def weights(self) -> _Weights:
        """Attention weights of the layer."""


class PrefixMass(AdditiveMetric):
    """Mean weight of the queries after the first on all keys of a prefix. States are sums: additive.

    Args:
        sizes: sizes of the model and the probe.
    """

    mass_sum: Tensor
    n_queries: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.add_sums(mass_sum=(sizes.n_layers, sizes.n_heads), n_queries=(sizes.n_layers,))

    def attention(self, layer: int, attended: ShownWeights) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.weights.prefix_share())

    def update(self, layer: int, share_BHT: Tensor | None) -> None:
        """Add a batch of one layer (from 0): every query's weight on the prefix, None without a prefix. Position 0 does
        not count, as in the sink mass, so that the two can be compared.
        """
        if share_BHT is None:
            return
        self.mass_sum[layer].add_(share_BHT[..., 1:].double().sum((0, 2)))
        self.n_queries[layer].add_(share_BHT[:, 0, 1:].numel())

    def compute(self) -> dict[str, np.ndarray]:
        """Return the mean weight per layer and head ``[L, H]``; empty if no layer has a prefix."""
        if not self.n_queries.any():
            return {}
        return {"prefix_mass": (self.mass_sum / self.n_queries[:, None]).cpu().numpy()}
