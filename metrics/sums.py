"""Metrics whose states are sums, kept once and all-reduced over ranks, and sizes of tensors along an axis."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

# ---------------------------------------------------------------- metrics whose states are sums


class FreedMetric(Metric):
    """A metric that is freed with the last reference to it.

    A ``torchmetrics.Metric`` keeps wrappers of its own methods, which hold it: with all of its states it lives on until
    Python's collector comes by, and that one counts objects, not their gigabytes. Here the wrappers hold it weakly.
    """

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        weak: Any = proxy(self)
        return Metric._wrap_update(weak, MethodType(type(self).update, weak))

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        weak: Any = proxy(self)
        return Metric._wrap_compute(weak, MethodType(type(self).compute, weak))


class AdditiveMetric(FreedMetric):
    """A metric whose states are sums over sequences: additive over batches and ranks.

    A ``torchmetrics.Metric`` keeps a copy of each state's default, makes another when processes come together, and
    gathers the states of all of them to add them up: (3 + processes) times the memory, which for second moments of
    wide models is tens of gigabytes. Here a sum starts at zero, which needs no copy, and is all-reduced: twice at most.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self._sums: list[str] = []

    def add_sums(self, dtype: torch.dtype = torch.float64, /, **shapes: tuple[int, ...]) -> None:
        """Register sums by name and shape, all zero at first."""
        for name, shape in shapes.items():
            # torchmetrics keeps a single zero as the default; see :meth:`reset`.
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
            setattr(self, name, torch.zeros(shape, dtype=dtype))
            self._sums.append(name)

    def reset(self) -> None:
        """Set all sums to zero."""
        zeros = {name: torch.zeros_like(getattr(self, name)) for name in self._sums}
        super().reset()
        for name, zero in zeros.items():
            setattr(self, name, zero)

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        # Nothing here writes into a state that stands in such a copy: they are replaced, and put back.
        return {name: getattr(self, name) for name in self._defaults}

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        if dist_sync_fn is not gather_all_tensors:
            super()._sync_dist(dist_sync_fn, process_group)
            return
        self.reduce_over(process_group or self.process_group)

    def reduce_over(self, group: Any) -> None:
        """Replace every state by its sum over the processes of ``group`` (default: the run's)."""
        for name in self._sums:
            setattr(self, name, sum_over_ranks(getattr(self, name), group))


def sum_over_ranks(x: Tensor, group: Any = None) -> Tensor:
    """Sum ``x`` over the ranks of ``group`` (default: the run's) into a new tensor; return ``x`` itself in a single
    process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return x
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def largest_over_ranks(x: Tensor, group: Any = None) -> Tensor:
    """Take the maximum of each element over the ranks of ``group`` (default: the run's) into a new tensor; return ``x``
    itself in a single process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return x
    largest = x.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest


# ---------------------------------------------------------------- sizes along an axis
# Largest and total |x| along an axis, and norms of few channels. On a GPU these are norms, which read x once and keep
# no copy; on the CPU norms are several times slower than the explicit forms here.

#: On the CPU: elements whose absolute values are kept together, which stay in cache.
_CACHED = 1 << 20


def largest_size(x: Tensor, dim: int) -> Tensor:
    """Compute ``max |x|`` along an axis, in the type of x."""
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x, torch.inf, dim=dim)
    return torch.maximum(x.amax(dim), x.amin(dim).neg_())


def channel_norms(x_BHTK: Tensor) -> Tensor:
    """Compute Euclidean norms over the last axis, ``[B, H, T]``, float32 or wider."""
    wide = torch.promote_types(x_BHTK.dtype, torch.float32)
    if x_BHTK.device.type != "cpu":
        return torch.linalg.vector_norm(x_BHTK, dim=-1, dtype=wide)
    # As heads lie in memory, and of the type that is wanted: the other ways are several times slower.
    return torch.linalg.vector_norm(x_BHTK.transpose(1, 2).to(wide), dim=-1).transpose(1, 2)


def total_size(x_BTF: Tensor) -> Tensor:
    """Compute ``Σ_t |x|``, ``[B, F]``, float32 or wider."""
    wide = torch.promote_types(x_BTF.dtype, torch.float32)
    if x_BTF.device.type != "cpu":
        return torch.linalg.vector_norm(x_BTF, 1, dim=1, dtype=wide)
    at_once = max(_CACHED // max(x_BTF[:, :1].numel(), 1), 1)
    parts = [part_BTF.abs().sum(1, dtype=wide) for part_BTF in x_BTF.split(at_once, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
