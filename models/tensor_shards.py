"""The shard of a tensor that a process holds: a range of its elements, flattened in C order.

FSDP2 shards a parameter along its first axis, DeepSpeed's ZeRO 3 its flattened elements: both are ranges. Only this
module deals with these layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard


@dataclass(frozen=True)
class TensorShard:
    """Elements ``start … start + local.numel()`` of a tensor."""

    local: Tensor
    """One-dimensional elements of the shard; a view of a parameter, so that writes reach the parameter."""
    start: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    replica: int = 0
    """Number, from 0, of this process among those that hold the same range."""

    @property
    def stop(self) -> int:
        """Index one past the last element."""
        return self.start + self.local.numel()

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor; a parameter that ZeRO 3 has sharded is itself an empty placeholder."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _of_dtensor(tensor: DTensor) -> TensorShard:
    local, mesh = tensor.to_local().detach(), tensor.device_mesh
    row, n_rows, first, replica = math.prod(tensor.shape[1:]), tensor.shape[0] if tensor.ndim else 1, 0, 0
    for axis, placement in enumerate(tensor.placements):
        n, mine = mesh.size(axis), mesh.get_local_rank(axis)
        if placement == Shard(0):
            # As torch.chunk does it: all parts but the last ones are equally long.
            length = -(-n_rows // n)
            first += min(mine * length, n_rows)
            n_rows = max(min(length, n_rows - mine * length), 0)
        elif placement == Replicate():
            replica = replica * n + mine
        else:
            raise NotImplementedError(f"with placement {placement} a rank holds no single range of elements")
    assert local.numel() == n_rows * row, (tuple(local.shape), n_rows)
    flat = local.view(-1) if local.numel() else local.reshape(-1)
    return TensorShard(flat, first * row, tuple(tensor.shape), replica)


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


def reshard(model: nn.Module) -> None:
    """Free gathered weights of a model that FSDP2 shards: after a pass without gradients, those of the head and of the
    outermost group stay gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
