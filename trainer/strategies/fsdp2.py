"""Weights, gradients and optimizer state sharded over the processes by torch's ``fully_shard``, a group at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ...models.birth import Sharder
from ...models.decoder import Decoder
from ..config import TrainerConfig
from ..processes.process_group import TIMEOUT
from .sharded_checkpoints import ShardedCheckpoints

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _mesh(device: torch.device, replicas: int) -> DeviceMesh:
    n = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (n,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, n // replicas), mesh_dim_names=("replicate", "shard"))


def _policy(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> MixedPrecisionPolicy:
    # Weights alone are rounded: not the residual stream. Where both are float32 no policy is needed.
    return MixedPrecisionPolicy(
        None if param_dtype == torch.float32 else param_dtype,
        None if reduce_dtype == param_dtype == torch.float32 else reduce_dtype,
        cast_forward_inputs=False,
    )


def sharder(config: TrainerConfig, device: torch.device) -> Sharder:
    """Return a function that shards a model on the meta device over the processes of the run. Collective: call it on
    every rank.

    Weights are gathered by groups: the embedding, a block, or the last norm with the head. While one computes the next
    is gathered, so that a process holds two of them at most. A parameter lies in one group: a table that is head too
    stays with the last norm in the outermost group, which is gathered once for the whole pass, and so do learned
    positions, which no module's own pass reads.
    """
    mesh = _mesh(device, config.replicas)
    gather, reduce = _DTYPES[config.gathers_in], _DTYPES[config.reduce]
    policy = _policy(gather, reduce)
    # Tables stay float32: the residual stream has the dtype of the embeddings.
    of_tables = _policy(torch.float32, reduce)

    def shard(model: Decoder) -> None:
        in_order: list[nn.Module] = [*model.blocks]
        if model.head is not None:
            fully_shard(model.embed, mesh=mesh, mp_policy=of_tables)
            # The gradient of a table needs its indices alone.
            cast(FSDPModule, model.embed).set_unshard_in_backward(False)
            in_order = [model.embed, *in_order, model.norm]
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        if model.head is not None:
            # The backward pass begins with it: freed in between, it would be gathered twice in a row.
            fully_shard([model.norm, model.head], mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=of_tables)
        groups = [cast(FSDPModule, module) for module in in_order]
        for group, following in pairwise(groups):
            group.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([group])

    return shard


def reduce_gradients(module: nn.Module, wanted: bool) -> None:
    """Set if the coming backward passes reduce gradients, or each process sums its own, unsharded."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(wanted, recurse=False)


def unsharded_gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients that this process has summed and that are not reduced yet."""
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            group = part._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                # The second where no dtype is rounded to, once it has been gathered for the first time.
                used = getattr(parameter, "_unsharded_param", None)
                kept = parameter.unsharded_accumulated_grad, None if used is None else used.grad
                found += [gradient for gradient in kept if gradient is not None]
    return found


class FSDP2Strategy(ShardedCheckpoints, ModelParallelStrategy):
    """Lightning's strategy for a module whose model a :func:`sharder` has sharded, with this project's checkpoints.

    Args:
        config: settings of the trainer, read for ``accumulate``.
    """

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, timeout=TIMEOUT)
        self._reduces_each = config.accumulate == "sharded"

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients for a micro-batch that is not the last of its step. Lightning's version
        supports only DDP.
        """
        assert self.lightning_module is not None
        reduce_gradients(self.lightning_module, self._reduces_each)
        try:
            yield
        finally:
            reduce_gradients(self.lightning_module, True)
