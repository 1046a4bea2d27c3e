"""Hidden units of a mixture's experts, counted for each of them: super neurons and dead units (definitions §7)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..additive import AdditiveMetric
from ..neurons import super_neurons
from ..quantity import Sizes


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
