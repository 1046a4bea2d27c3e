"""Lion: the sign of an interpolated momentum (arXiv 2302.06675)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .momentum import MomentumOptimizer


class Lion(MomentumOptimizer):
    """Lion with decoupled weight decay, algorithm 2 of the paper.

    These ten lines replace a package: ``pytorch-optimizer`` computes the same, but would be a further dependency.

    Args:
        params: parameters or groups. Each element depends on its own gradients only, so shards may be stepped.
        lr: learning rate; every element moves by it.
        betas: factors of the interpolation whose sign is taken, and of the momentum.
        weight_decay: decoupled weight decay.
    """

    momentum_name = "exp_avg"

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        """See :class:`MomentumOptimizer`."""
        beta1, beta2 = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)
