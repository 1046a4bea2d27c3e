"""One optimizer for matrices and AdamW for the rest, combined into one optimizer for stepping, saving and
scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .closure import loss_of


class MatricesAndRest(Optimizer):
    """Two optimizers over the groups of one model.

    Groups and state are one list and one table, so that a checkpoint and a schedule see a single optimizer.

    Args:
        matrices: steps the first groups.
        rest: steps those that follow.
    """

    def __init__(self, matrices: Optimizer, rest: Optimizer) -> None:
        super().__init__([*matrices.param_groups, *rest.param_groups], {})
        self.inner = (matrices, rest)
        self._link()

    def _link(self) -> None:
        """Give the inner optimizers the current groups and state: loading replaces both."""
        n_matrices = len(self.inner[0].param_groups)
        for inner, groups in zip(
            self.inner, (self.param_groups[:n_matrices], self.param_groups[n_matrices:]), strict=True
        ):
            inner.param_groups, inner.state = groups, self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See :class:`torch.optim.Optimizer`."""
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of both."""
        loss = loss_of(closure)
        for inner in self.inner:
            inner.step()
        return loss
