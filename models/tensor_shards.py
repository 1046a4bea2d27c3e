"""The shard of a tensor that a process holds: evenly spaced runs of its elements, flattened in C order.

FSDP2 shards a parameter along its first axis, DeepSpeed's ZeRO 3 its flattened elements: both are ranges, one run each.
A matrix that is sharded along its columns has a run in every row. Only this module deals with these layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard


class Runs(NamedTuple):
    """Elements of a flattened tensor in runs of one length, the first elements of which are ``stride`` apart."""

    start: int
    n: int
    """Number of elements of all runs."""
    run: int
    stride: int

    @classmethod
    def of_range(cls, start: int, n: int) -> Runs:
        """Build one run."""
        return cls(start, n, max(n, 1), max(n, 1))

    @property
    def stop(self) -> int:
        """Index one past the last element."""
        return self.start + (self.n // self.run - 1) * self.stride + self.run if self.n else self.start

    @property
    def is_range(self) -> bool:
        """True if there is one run at most."""
        return self.n <= self.run

    def overlaps(self, start: int, stop: int) -> Iterator[Runs]:
        """Yield the parts that lie in a range: the runs that its ends may cut, and those between them."""
        n_runs = self.n // self.run
        first = min(max(0, (start - self.start) // self.stride), n_runs)
        last = max(min(n_runs, -((self.start - stop) // self.stride)), first)
        for a, b in ((first, min(first + 1, last)), (first + 1, last - 1), (max(first + 1, last - 1), last)):
            begin = self.start + a * self.stride
            if b - a > 1:
                yield Runs(begin, (b - a) * self.run, self.run, self.stride)
            elif b > a and max(start, begin) < min(stop, begin + self.run):
                yield Runs.of_range(max(start, begin), min(stop, begin + self.run) - max(start, begin))

    def index_of(self, element: int) -> int:
        """Return the place of an element among those of all runs."""
        number, within = divmod(element - self.start, self.stride)
        return number * self.run + within

    def within(self, flat: Tensor, first: int = 0) -> Tensor:
        """Return the view ``[runs, run]`` of these elements in a flattened tensor that begins with element
        ``first``.
        """
        offset = flat.storage_offset() + self.start - first
        return flat.as_strided((self.n // self.run, self.run), (self.stride, 1), offset)


#: Elements that are read at a time for a shard of several runs.
_READ = 1 << 24


@dataclass(frozen=True)
class TensorShard:
    """Some elements of a tensor: from ``start`` on, in one run unless ``runs`` says otherwise."""

    local: Tensor
    """One-dimensional elements of the shard; a view of a parameter, so that writes reach the parameter."""
    start: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    replica: int = 0
    """Number, from 0, of this process among those that hold the same elements."""
    spacing: tuple[int, int] | None = None
    """Length of a run, and distance between the beginnings of two; None: all elements are one run."""

    @property
    def runs(self) -> Runs:
        """Places of the elements in the flattened tensor."""
        n = self.local.numel()
        return Runs.of_range(self.start, n) if self.spacing is None else Runs(self.start, n, *self.spacing)

    @property
    def stop(self) -> int:
        """Index one past the last element."""
        return self.runs.stop

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @torch.no_grad()
    def fill(self, read: Callable[[int, int], Tensor], *, at_once: bool = False) -> None:
        """Overwrite the shard.

        Args:
            read: function from a range of the flattened tensor, first and one past the last, to its elements.
            at_once: call it once: every range costs as much as the whole. By default it reads a few million elements
                at a time, if the shard has several runs.
        """
        runs = self.runs
        if runs.is_range:
            if runs.n:
                self.local.copy_(read(runs.start, runs.stop))
            return
        size = runs.n if at_once else max(1, _READ // runs.stride)
        for i, rows in enumerate(self.local.view(-1, runs.run).split(size)):
            part = Runs(runs.start + i * size * runs.stride, rows.numel(), runs.run, runs.stride)
            rows.copy_(part.within(read(part.start, part.stop), part.start))


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor; a parameter that ZeRO 3 has sharded is itself an empty placeholder."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _of_dtensor(tensor: DTensor) -> TensorShard:
    local, mesh, shape = tensor.to_local().detach(), tensor.device_mesh, tuple(tensor.shape)
    first, sizes, replica = [0] * len(shape), [*shape], 0
    for axis, placement in enumerate(tensor.placements):
        n, mine = mesh.size(axis), mesh.get_local_rank(axis)
        if type(placement) is Shard:
            # As torch.chunk does it: all parts but the last ones are equally long.
            dim = placement.dim % len(shape)
            length = -(-sizes[dim] // n)
            first[dim] += min(mine * length, sizes[dim])
            sizes[dim] = max(min(length, sizes[dim] - mine * length), 0)
        elif placement == Replicate():
            replica = replica * n + mine
        else:
            raise NotImplementedError(f"placement {placement}: a rank holds no evenly spaced elements")
    assert tuple(local.shape) == tuple(sizes), (tuple(local.shape), sizes)
    flat = local.view(-1) if local.numel() else local.reshape(-1)
    cut = [dim for dim in range(len(shape)) if sizes[dim] != shape[dim]]
    if not cut or not local.numel():
        return TensorShard(flat, 0, shape, replica)
    # The last axis that is sharded decides the runs, which begin at evenly spaced rows of the axes before it.
    inner, last = math.prod(shape[cut[-1] + 1 :]), cut[-1]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = sum(at * stride for at, stride in zip(first, strides, strict=True))
    if math.prod(sizes[:last]) == 1:
        return TensorShard(flat, start, shape, replica)
    if len(cut) > 1 and math.prod(sizes[: cut[-2]]) != 1:
        raise NotImplementedError(f"placements {tensor.placements} of {list(shape)}: runs are not evenly spaced")
    return TensorShard(flat, start, shape, replica, (sizes[last] * inner, shape[last] * inner))


def _of_zero3(tensor: Any) -> TensorShard:
    length, rank = tensor.ds_tensor.ds_numel, dist.get_rank(tensor.ds_process_group)
    start = min(rank * length, tensor.ds_numel)
    # The last parts are padded.
    return TensorShard(tensor.ds_tensor.detach()[: min(length, tensor.ds_numel - start)], start, full_shape(tensor))


def shard_of(tensor: Tensor) -> TensorShard:
    """Return this process's shard; all of a tensor that is not sharded."""
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor)
    if hasattr(tensor, "ds_tensor"):
        return _of_zero3(tensor)
    replica = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return TensorShard(tensor.detach().view(-1), 0, tuple(tensor.shape), replica)


def _gathered_from_zero3(tensor: Any) -> Tensor:
    # An offloaded shard lies on the CPU, which the group may not send from.
    mine = tensor.ds_tensor.detach().to(tensor.device).contiguous()
    padded = mine.new_empty(dist.get_world_size(tensor.ds_process_group) * mine.numel())
    dist.all_gather_into_tensor(padded, mine, group=tensor.ds_process_group)
    return padded[: tensor.ds_numel].view(tensor.ds_shape)


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, in every process. Collective for sharded tensors: call on all ranks, in the same
    order.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return _gathered_from_zero3(tensor) if hasattr(tensor, "ds_tensor") else tensor.detach()


@contextmanager
def gathered_in_passes(model: nn.Module) -> Iterator[None]:
    """Gather each module's weights for its pass, within the context, in a model that ZeRO 3 shards and that has no
    engine yet.

    Collective: all ranks make the same passes, without gradients. Other models gather by themselves, or need not.
    """

    def gather(module: nn.Module, inputs: Any) -> None:
        external: Any = getattr(module, "ds_external_parameters", tuple)
        own = [*module.parameters(recurse=False), *(parameter for _, parameter in external())]
        held.append([parameter for parameter in own if hasattr(parameter, "ds_tensor") and not parameter.numel()])
        for parameter in held[-1]:
            parameter.data = _gathered_from_zero3(parameter)

    def free(module: nn.Module, inputs: Any, output: Any) -> None:
        for parameter in held.pop():
            parameter.data = parameter.new_empty(0)

    held: list[list[nn.Parameter]] = []
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(gather).remove)
            hooks.callback(module.register_forward_hook(free).remove)
        yield


def compute_dtype(model: nn.Module) -> torch.dtype:
    """Return the narrowest dtype in which a pass uses weights: that of a strategy's gathering, or their own."""
    gathered = {getattr(parameter, "comm_dtype", parameter.dtype) for parameter in model.parameters()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            gathered |= {module._get_fsdp_state()._mp_policy.param_dtype or torch.float32}
    return min(gathered, key=lambda dtype: dtype.itemsize)


@torch.no_grad()
def renew(model: nn.Module) -> None:
    """Drop, or gather again, the whole weights that a strategy keeps between passes, after a change of their shards.

    Collective: call on every rank.
    """
    reshard(model)
    for parameter in model.parameters():
        if hasattr(parameter, "ds_tensor") and parameter.numel():
            parameter.data.copy_(_gathered_from_zero3(parameter))


def reshard(model: nn.Module) -> None:
    """Free gathered weights of a model that FSDP2 shards: after a pass without gradients, those of the head and of the
    outermost group stay gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
