"""Muon: momentum whose matrices are nearly orthogonalised before each update (kellerjordan.github.io/posts/muon).

Torch's version (``torch.optim.Muon``, since 2.9) iterates in bfloat16 on every device, and on a sharded matrix inside
DTensor operations with other rounding: a step would differ between strategies by bfloat16's rounding. Here a sharded
update is gathered once, and on a CPU the iteration runs in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ...models.tensor_shards import full_tensor
from .momentum import MomentumOptimizer

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
