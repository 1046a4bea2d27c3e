"""Base of optimizers with one momentum per parameter: the loop over the parameters that have a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .closure import loss_of


class MomentumOptimizer(Optimizer):
    """Optimizer that steps one parameter at a time, so that updates of the whole model are never in memory at once."""

    momentum_name: ClassVar[str]
    """Key of the momentum in a parameter's state."""

    def update(self, parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        """Move a parameter and its momentum, in place; ``group`` has its settings."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the present gradients. Collective if an update is: call on every rank."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient: Tensor | None = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state[self.momentum_name] = torch.zeros_like(parameter)
                self.update(parameter, gradient, state[self.momentum_name], group)
        return loss
