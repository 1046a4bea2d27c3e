"""Entropy of each head's attention, and its largest logit (definitions §13)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..additive import AdditiveMetric, largest_over_ranks
from ..quantity import Sizes
from ..sinks import KeySums, entropy_queries
from .shown_attention import ShownAttention


class HeadEntropy(AdditiveMetric):
    """Mean entropy of attention per head, and its largest logit. The states, a sum and a maximum, do not depend on how
    the probe is split.

    Args:
        sizes: sizes of the model and the probe.
    """

    entropy_sum: Tensor
    n_sequences: Tensor
    largest: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.queries = entropy_queries(sizes.seq_len)
        self.add_sums(entropy_sum=(sizes.n_layers, sizes.n_heads), n_sequences=(sizes.n_layers,))
        least = torch.full((sizes.n_layers, sizes.n_heads), -torch.inf, dtype=torch.float64)
        self.add_state("largest", least, dist_reduce_fx="max")

    def attention(self, layer: int, attended: ShownAttention) -> None:
        """See models/observe.py."""
        self.update(layer - 1, attended.sums)

    def update(self, layer: int, sums: KeySums) -> None:
        """Add a batch of one layer (from 0)."""
        assert sums.entropy_BH is not None
        self.entropy_sum[layer].add_(sums.entropy_BH.sum(0, dtype=torch.float64))
        self.n_sequences[layer].add_(len(sums.entropy_BH))
        if sums.largest_BH is not None and len(sums.largest_BH):
            self.largest[layer] = self.largest[layer].maximum(sums.largest_BH.amax(0))

    def reduce_over(self, group: Any) -> None:
        """See :class:`AdditiveMetric`."""
        super().reduce_over(group)
        self.largest = largest_over_ranks(self.largest, group)

    def compute(self) -> dict[str, np.ndarray | float]:
        """Return entropies ``[L, H]``, the entropy of uniform attention, and the largest logits (NaN for layers without
        data).
        """
        largest = self.largest.masked_fill(self.largest == -torch.inf, torch.nan)
        return {
            "attention_entropy_uniform": sum(math.log(t + 1) for t in self.queries) / len(self.queries),
            "attention_entropy": (self.entropy_sum / self.n_sequences[:, None]).cpu().numpy(),
            "largest_logit": largest.cpu().numpy(),
        }
