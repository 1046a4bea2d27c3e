"""Experts of a mixture: those that the first position is sent to, and their hidden units (definitions §7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .declarations.sink_causes import EXPERTS
from .neurons import super_neurons
from .quantity import Sizes
from .summed_metrics import AdditiveMetric


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


# ---------------------------------------------------------------- hidden units of experts
# Hidden units of a mixture's experts, counted for each of them: super neurons and dead units (definitions §7).


class ExpertUnits(AdditiveMetric):
    """Mean |activation| of every hidden unit of every expert at position 0 and elsewhere, over the tokens routed to the
    expert, and the counts that follow from it. States are sums: additive.

    For an expert that receives no token of a kind, its units count as silent there.

    Args:
        sizes: sizes of the model and the probe.
    """

    size_sum: Tensor
    count: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        # X: position 0, and the others.
        self.add_sums(
            size_sum=(sizes.n_layers, sizes.n_experts, 2, sizes.d_expert), count=(sizes.n_layers, sizes.n_experts, 2)
        )

    def expert_units(self, layer: int, expert: int, a_RF: Tensor, position_R: Tensor) -> None:
        """See models/observe.py."""
        self.update(layer - 1, expert, a_RF, position_R)

    def update(self, layer: int, expert: int, a_RF: Tensor, position_R: Tensor) -> None:
        """Add tokens of one layer and expert (from 0): hidden activations, as they enter the down projection."""
        is_first_R = position_R == 0
        is_X_XR = torch.stack([is_first_R, ~is_first_R])
        wide = torch.promote_types(a_RF.dtype, torch.float32)
        with torch.autocast(a_RF.device.type, enabled=False):
            size_XF = is_X_XR.to(wide) @ a_RF.abs().to(wide)
        self.size_sum[layer, expert].add_(size_XF)
        self.count[layer, expert].add_(is_X_XR.sum(1))

    def compute(self) -> dict[str, np.ndarray]:
        """Return counts ``[L, E]``; NaN for experts that received no token."""
        first_LEF, others_LEF = (self.size_sum / self.count.clamp_min(1)[..., None]).unbind(2)
        is_super_LEF = super_neurons(first_LEF.cpu().numpy(), others_LEF.cpu().numpy()).is_super
        is_dead_LEF = (self.size_sum.sum(2) == 0).cpu().numpy()
        unused_LE = (self.count.sum(-1) == 0).cpu().numpy()
        return {
            name: np.where(unused_LE, np.nan, units_LEF.sum(-1))
            for name, units_LEF in (("expert_super_neurons", is_super_LEF), ("expert_dead_units", is_dead_LEF))
        }
