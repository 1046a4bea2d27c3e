"""Sinks at the beginnings of documents that begin inside a sequence (definitions §5)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .additive import AdditiveMetric


class DocumentSinkResult(NamedTuple):
    """Float64; ``L`` layers, ``H`` heads. The normalised one is of ``|a|`` over its row's sum."""

    mass: np.ndarray
    """``[L, H]`` mean weight on the first token of a query's own document."""
    mass_normalised: np.ndarray
    uniform: float
    """Weight under attention that is uniform over the query's own document."""
    n_documents: int
    """Number of these documents that have queries behind their first token."""


class DocumentSinks(AdditiveMetric):
    """Mean of ``a[t, s]`` over the queries t behind the first token s of their document, of documents that begin behind
    position 0: that one is the sequence's, and has a sink mass of its own.

    Args:
        n_layers: layers that will be updated.
        n_heads: query heads per layer.
    """

    mass_sum: Tensor
    uniform_sum: Tensor
    n_queries: Tensor
    n_documents: Tensor

    def __init__(self, n_layers: int, n_heads: int) -> None:
        super().__init__()
        self.add_sums(
            mass_sum=(n_layers, 2, n_heads), uniform_sum=(n_layers,), n_queries=(n_layers,), n_documents=(n_layers,)
        )

    def update(self, layer: int, on_first_2BHT: Tensor, first_BT: Tensor) -> None:
        """Add a batch.

        Args:
            layer: index of the layer, from 0.
            on_first_2BHT: weight of every query on the first token of its document, as it is and over its row's sum.
            first_BT: position of that token.
        """
        place_T = torch.arange(first_BT.shape[1], device=first_BT.device)
        counts_BT = (first_BT > 0) & (place_T > first_BT)
        self.mass_sum[layer].add_((on_first_2BHT.double() * counts_BT[:, None]).sum((1, 3)))
        self.uniform_sum[layer].add_((counts_BT.double() / (place_T - first_BT + 1)).sum())
        self.n_queries[layer].add_(counts_BT.sum())
        self.n_documents[layer].add_((counts_BT & (place_T == first_BT + 1)).sum())

    def compute(self) -> DocumentSinkResult | None:
        """Return means over queries; None without any query."""
        if not self.n_queries.all():
            return None
        mass_L2H = (self.mass_sum / self.n_queries[:, None, None]).cpu().numpy()
        uniform = float(self.uniform_sum[0] / self.n_queries[0])
        return DocumentSinkResult(mass_L2H[:, 0], mass_L2H[:, 1], uniform, int(self.n_documents[0]))
