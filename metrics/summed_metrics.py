"""Metrics whose states are sums, kept once and all-reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import groupby
from types import MethodType
from typing import Any
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

# ---------------------------------------------------------------- metrics whose states are sums

#: Bytes that a metric keeps before it adds them up.
_KEPT_BYTES = 1 << 26


class PlaceMetric(Metric):
    """A metric of many places of a pass, which adds up what several of them give together, and is freed with the last
    reference to it.

    A ``torchmetrics.Metric`` keeps wrappers of its own methods, which hold it: with all of its states it lives on until
    Python's collector comes by, and that one counts objects, not their gigabytes. Here the wrappers hold it weakly.
    """

    _kept: dict[int, tuple[Tensor, ...]]

    def __init__(self) -> None:
        super().__init__()
        self._kept_shapes: list[torch.Size] = []
        self._kept_bytes = 0

    @property
    def _defaults(self) -> dict[str, Any]:
        """States by name. ``torchmetrics`` asks for the names before it reads, compares, stores or loads states: what
        is kept is added up by then.
        """
        self.flush()
        return self._by_name

    @_defaults.setter
    def _defaults(self, by_name: dict[str, Any]) -> None:
        self._by_name, self._kept = by_name, {}

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        weak: Any = proxy(self)
        return Metric._wrap_update(weak, MethodType(type(self).update, weak))

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        weak: Any = proxy(self)
        own = type(self).compute

        @wraps(own)
        def flushed(metric: Any) -> Any:
            metric.flush()
            return own(metric)

        return Metric._wrap_compute(weak, MethodType(flushed, weak))

    # A pass has many places, and each gives a metric small tensors: on a GPU every operator on them is a launch. What
    # the places give in one batch is kept, and added up together when one of them gives more.

    def keep(self, place: int, *tensors: Tensor) -> None:
        """Keep the tensors that a batch gives at one place for :meth:`_add`. They must be copies: what a pass shows is
        overwritten.
        """
        shapes = [x.shape for x in tensors]
        self.settle(place)
        if self._kept_bytes > _KEPT_BYTES or (self._kept and shapes != self._kept_shapes):
            self.flush()
        self._kept[place], self._kept_shapes = tensors, shapes
        self._kept_bytes += sum(x.nbytes for x in tensors)

    def settle(self, place: int) -> None:
        """Add up all that is kept if it has something of this place, whose states are then those of all its batches."""
        if place in self._kept:
            self.flush()

    def flush(self) -> None:
        """Add up all that is kept."""
        kept, self._kept, self._kept_bytes = self._kept, {}, 0
        # Neighbours together: a slice of a state is a view, and an index would be sent to the device.
        for _, numbered in groupby(enumerate(sorted(kept)), lambda entry: entry[1] - entry[0]):
            places = [place for _, place in numbered]
            together = zip(*(kept[place] for place in places), strict=True)
            tensors_P = [torch.stack(parts) if len(parts) > 1 else parts[0][None] for parts in together]
            self._add(slice(places[0], places[-1] + 1), *tensors_P)

    def _add(self, places: slice, *tensors_P: Tensor) -> None:
        """Add a batch of several places to the states.

        Args:
            places: places that follow one another.
            tensors_P: what each of them gave to :meth:`keep`, stacked in front.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything."""
        self._kept, self._kept_bytes = {}, 0
        super().reset()

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """See `torchmetrics.Metric`; what is kept is added up first."""
        self.flush()
        super().merge_state(incoming_state)

    def _apply(self, fn: Callable[..., Any], exclude_state: Sequence[str] = ()) -> Any:
        self.flush()
        return super()._apply(fn, exclude_state)


class AdditiveMetric(PlaceMetric):
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
            # torchmetrics keeps a single zero as the default, of which no device need know; see :meth:`reset`.
            self.add_state(name, torch.zeros((), dtype=dtype, device="cpu"), dist_reduce_fx="sum")
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
