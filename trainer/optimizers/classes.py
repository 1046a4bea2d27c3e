"""Optimizers that torch has not: Lion, Muon, and one for matrices beside AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from typing_extensions import override

from ...models.tensor_shards import full_tensor


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step, which computes gradients, and return its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# ---------------------------------------------------------------- base of optimizers with one momentum per parameter
# The loop over the parameters that have a gradient.


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


# ---------------------------------------------------------------- Lion
# The sign of an interpolated momentum (arXiv 2302.06675).


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

    @override
    def update(self, parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum.lerp(gradient, 1 - beta1).sign_(), alpha=-group["lr"])
        momentum.lerp_(gradient, 1 - beta2)


# ---------------------------------------------------------------- Muon
# Momentum whose matrices are nearly orthogonalised before each update (kellerjordan.github.io/posts/muon).
#
# Torch's version (``torch.optim.Muon``, since 2.9) iterates in bfloat16 on every device, and on a sharded matrix
# inside DTensor operations with other rounding: a step would differ between strategies by bfloat16's rounding. Here a
# sharded update is gathered once, and on a CPU the iteration runs in float32.

#: Coefficients of Newton and Schulz's iteration: the slope at 0 is as steep as possible, so that small singular values
#: grow fast.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_STEPS, _EPS = 5, 1e-7

#: Factor on the learning rate of a matrix ``[rows, columns]``.
UPDATE_SCALES: dict[str, Callable[[int, int], float]] = {
    # The root mean square of AdamW's updates, so that its learning rates and decay serve (arXiv 2502.16982 eq. 4).
    "adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # Keller Jordan's: the largest change of an output per input.
    "spectral": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


def orthogonalized(matrix: Tensor) -> Tensor:
    """Keep the singular vectors and set singular values near 1 (about .7 to 1.2): ``[m, n]`` → ``[m, n]``.

    Computes in bfloat16 as published, which a GPU multiplies fast; in float32 on a CPU.
    """
    x = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    if tall := matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.T if tall else x).to(matrix.dtype)


def _sharded_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return the shard of a tensor that each process has whole, sharded like ``parameter``; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


class Muon(MomentumOptimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay. Matrices only.

    For a matrix that FSDP2 shards, each process gathers the update, orthogonalises all of it and takes its shard, so
    that the step equals that of a single process.

    Args:
        params: matrices, or groups of them.
        lr: learning rate, before ``update_scale``.
        momentum: decay of the momentum.
        weight_decay: decoupled weight decay.
        update_scale: see :data:`UPDATE_SCALES`.
    """

    momentum_name = "momentum_buffer"

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        update_scale: str = "adamw",
    ) -> None:
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "update_scale": update_scale}
        )

    def update(self, parameter: Tensor, gradient: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        """See :class:`MomentumOptimizer`. Collective if matrices are sharded."""
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = orthogonalized(full_tensor(gradient.lerp(momentum, group["momentum"])))
        scale = UPDATE_SCALES[group["update_scale"]]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(_sharded_like(update, parameter), alpha=-group["lr"] * scale(*parameter.shape))


# ---------------------------------------------------------------- one optimizer for matrices, AdamW for the rest
# One optimizer for matrices and AdamW for the rest, combined into one optimizer for stepping, saving and scheduling.


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

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of both."""
        loss = loss_of(closure)
        for inner in self.inner:
            inner.step()
        return loss
