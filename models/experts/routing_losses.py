"""What routers cost in training: uneven use of the experts, and large logits.

Legend: B sequences, T positions, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RoutingCost(NamedTuple):
    """Means over a model's blocks with experts, without their coefficients; scalars, float32 or wider."""

    load_balance: Tensor
    """``E · Σ_e f_e · P_e``: f_e is expert e's share of all choices, P_e the mean of its softmax share. 1 where all are
    used alike, E where one gets all (Switch Transformers, arXiv 2101.03961; with several choices for each token as in
    DeepSeekMoE, arXiv 2401.06066)."""
    router_z: Tensor
    """Mean of the squared log-sum-exp of the router's logits (ST-MoE, arXiv 2202.08906)."""


class RoutingLosses:
    """Collects what the routers of one training pass cost, block by block."""

    def __init__(self) -> None:
        self.by_block: list[Tensor] = []
        """``[2]`` of each block with experts: load balance and router z."""

    def add(self, logits_BTE: Tensor, share_BTE: Tensor, count_E: Tensor) -> None:
        """One block's: its router's logits, their softmax, and how often each expert is chosen."""
        chosen_E = count_E / count_E.sum()
        balance = len(count_E) * (chosen_E * share_BTE.flatten(0, -2).mean(0)).sum()
        self.by_block.append(torch.stack([balance, logits_BTE.logsumexp(-1).square().mean()]))

    def mean(self) -> RoutingCost:
        """Over the blocks that have experts."""
        return RoutingCost(*torch.stack(self.by_block).mean(0).unbind())
