"""Experts of a mixture that the first position is sent to, compared with the other positions (definitions §7)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .additive import AdditiveMetric
from .declarations.of_experts import EXPERTS
from .quantity import Sizes


class ExpertShares(AdditiveMetric):
    """Share of each of a layer's experts in the routing of a position, by position. States are sums: additive.

    Each token's chosen experts count alike, whatever weights the router gives them.

    Args:
        sizes: sizes of the model and the probe; ``n_experts`` 0 without experts.
    """

    quantities = EXPERTS
    count: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.add_sums(count=(sizes.n_layers, sizes.seq_len, sizes.n_experts))

    def routing(self, layer: int, chosen_BTK: Tensor) -> None:
        """See models/observe.py."""
        self.update(layer - 1, chosen_BTK)

    def update(self, layer: int, chosen_BTK: Tensor) -> None:
        """Add a batch of one layer (from 0): int64 ids of the experts that each token is sent to."""
        count_TE = self.count[layer]
        chosen_TN = chosen_BTK.transpose(0, 1).flatten(1)
        count_TE.scatter_add_(1, chosen_TN, torch.ones_like(chosen_TN, dtype=count_TE.dtype))

    def compute(self) -> dict[str, Any]:
        """Return the shares, and each position's distance from the shares of the positions after the first: the total
        variation distance ``½ Σ_e |p_t(e) − p(e)|``, 0 to 1.
        """
        by_position_LTE = self.count / self.count.sum(-1, keepdim=True)
        others_LE = by_position_LTE[:, 1:].mean(1)
        distance_LT = (by_position_LTE - others_LE[:, None]).abs().sum(-1) / 2
        median_L = distance_LT[:, 1:].quantile(0.5, dim=1)
        return {
            "expert_share_first": by_position_LTE[:, 0],
            "expert_share_others": others_LE,
            "routing_distance": distance_LT,
            "routing_first": distance_LT[:, 0],
            "routing_median": median_L,
        }
