"""Lion: the sign of an interpolated momentum (arXiv 2302.06675)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Lion with decoupled weight decay, as algorithm 2 of the paper has it.

    Its own ten lines in place of a package: that of ``pytorch-optimizer`` computes the same, but this row then needs
    no other dependency. One parameter at a time, so that updates of the whole model never lie beside its weights.

    Args:
        params: parameters or groups. Each element depends on its own gradients only, so shards may be stepped.
        lr: learning rate; every element moves by it.
        betas: of the interpolation whose sign is taken, and of the momentum.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step from the gradients that there are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient: Tensor | None = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                momentum = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - beta2)
        return loss
