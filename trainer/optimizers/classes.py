"""Optimizers that torch has not: AdamW with state in bf16, Lion, Muon, one for matrices beside AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from typing_extensions import override

from ...kernel_devices import runs_on, runs_triton
from ...models.tensor_shards import full_tensor, shard_of


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


# ---------------------------------------------------------------- AdamW with state in bf16
# A step computes in float32 and rounds what it keeps to bf16, which has eight bits: by one kernel on a GPU
# (``narrow_kernel.py``), elsewhere by torch's fused one on copies of the state.
#
# The mean of squares moves by 1 − β₂ of a difference, and a change below 1/512 of it would be lost: with β₂ .999 it
# could grow only where a square is three times the mean, and never fall. So it is rounded up or down at random, with
# probabilities that keep it on average. The mean of gradients moves by tenths and is rounded to the nearest.

#: Elements in float32 at a time: few enough for a CPU's cache, and many for a GPU's launches.
_CACHED, _AT_ONCE = 1 << 18, 1 << 24
#: Elements of a row of random bits.
_ROW = 1 << 12


def _random_bits(n: int, step: Tensor, salt: int) -> Tensor:
    """Compute sixteen bits for each of n numbers, int32 ``[n]``: the finaliser of splitmix64, on every device alike."""
    x = torch.arange(n, device=step.device) + (step.long() * 2 + salt) * 0x632BE59BD9B4E019
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return ((x ^ (x >> 31)) & 0xFFFF).int()


class _Noise:
    """Random bits of the elements of flattened tensors: a function of the step and an element's place in the whole
    tensor, so that every strategy, and a resumed run, rounds alike.

    Args:
        step: steps taken, ``[]``; the device is not waited for.
        n: elements of the longest tensor.
    """

    def __init__(self, step: Tensor, n: int) -> None:
        # Both are uniform, so their exclusive or is too.
        self.of_row, self.of_column = _random_bits(n // _ROW + 2, step, 0), _random_bits(_ROW, step, 1)

    def of(self, start: int, n: int) -> Tensor:
        """Return the bits of elements ``start …``, int32 ``[n]``."""
        first, last = start // _ROW, (start + n - 1) // _ROW + 1
        bits = (self.of_row[first:last, None] ^ self.of_column).view(-1)
        return bits[start - first * _ROW :][:n]


def round_at_random(x: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bf16: up in size where the bits that go, as a number, and ``bits`` add up to 1 or more.

    Overwrites ``x``, of which the result is a view. What bf16 holds stays as it is, NaN among it.
    """
    # A GPU's NaN has all bits, and one more would carry it over to −0: it gets those of a CPU's.
    whole = x.view(torch.int32).clamp_(max=0x7FC00000)
    # The upper halves of the sums, in place: every machine that torch runs on is little-endian.
    return whole.add_(bits).view(torch.bfloat16)[..., 1::2]


@torch.library.custom_op("birthmark::narrow_adamw", mutates_args=("p", "g", "mean", "square"))
def _step_in_triton(
    p: torch.Tensor, g: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, step: torch.Tensor,
    of_row: torch.Tensor, of_column: torch.Tensor, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None,
    start: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    from .narrow_kernel import step_adamw

    step_adamw(
        p, g, mean, square, step, of_row, of_column, grad_scale, found_inf, start, lr, beta1, beta2, eps, weight_decay
    )


@_step_in_triton.register_fake
def _(*_: Any) -> None:
    """Declare to torch that nothing new is made."""


class NarrowAdamW(Optimizer):
    """AdamW with both moments in bf16: 4 bytes per parameter in place of 8.

    Args:
        params: parameters or groups, float32. Each element depends on its own gradients only, so shards may be stepped.
        lr: learning rate.
        betas: decays of the mean of gradients and of their squares.
        eps: offset of the denominator.
        weight_decay: decoupled weight decay.
    """

    #: Reads ``grad_scale`` and ``found_inf`` as torch's fused kernels do.
    _step_supports_amp_scaling = True
    #: Keys of the state in bf16.
    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        # Torch loads step counts to the device of a parameter whose group is fused.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Torch casts state to the type of its parameter; values in bf16 come back as they were.
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({key: state[key].to(torch.bfloat16) for key in self.moments if key in state})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the present gradients."""
        loss, noise = loss_of(closure), None
        longest = max(parameter.numel() for group in self.param_groups for parameter in group["params"])
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state |= {key: torch.zeros_like(parameter, dtype=torch.bfloat16) for key in self.moments}
                state["step"] += 1
                noise = noise or _Noise(state["step"], longest)
                self._update(parameter, state, group, noise)
        return loss

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any], noise: _Noise) -> None:
        beta1, beta2 = group["betas"]
        given = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        scale, skipped = (None if x is None else x.to(parameter.device) for x in given)
        shard = shard_of(parameter)
        if not shard.runs.is_range:
            raise NotImplementedError("a shard of several runs")
        flat = [shard.local, *(_local(x) for x in (parameter.grad, *(state[key] for key in self.moments)))]
        at_once, in_triton = _CACHED if runs_on(parameter) == "cpu" else _AT_ONCE, runs_triton(parameter)
        pieces = zip(*(x.split(at_once) for x in flat), strict=True) if shard.local.numel() else ()
        for i, (p, gradient, mean, square) in enumerate(pieces):
            start = shard.start + i * at_once
            if in_triton:
                _step_in_triton(
                    p, gradient, mean, square, state["step"], noise.of_row, noise.of_column, scale, skipped, start,
                    group["lr"], beta1, beta2, group["eps"], group["weight_decay"],
                )  # fmt: skip
                continue
            wide_mean, wide_square = mean.float(), square.float()
            torch._fused_adamw_(
                [p], [gradient], [wide_mean], [wide_square], [], [state["step"]], lr=group["lr"], beta1=beta1,
                beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False,
                grad_scale=scale, found_inf=skipped,
            )  # fmt: skip
            mean.copy_(wide_mean)
            square.copy_(round_at_random(wide_square, noise.of(start, len(p))))
        if skipped is not None:
            state["step"] -= skipped


def _local(tensor: Tensor) -> Tensor:
    """Return this process's elements, flattened."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)


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
