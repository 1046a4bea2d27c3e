"""Weights, gradients and optimizer state sharded over the processes by torch's ``fully_shard``, a block at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ...models.birth import Sharder
from ...models.decoder import Decoder
from ..config import TrainerConfig
from ..processes.process_group import TIMEOUT
from .sharded_checkpoints import ShardedCheckpoints


def _mesh(device: torch.device, replicas: int) -> DeviceMesh:
    n = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (n,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replicas, n // replicas), mesh_dim_names=("replicate", "shard"))


def sharder(config: TrainerConfig, device: torch.device) -> Sharder:
    """A function that shards a model on the meta device over the processes of the run; every process must call it."""
    mesh = _mesh(device, config.replicas)
    # Weights alone are rounded: not the residual stream, and not the gradients that are reduced.
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if config.gather == "bf16"
        else MixedPrecisionPolicy()
    )

    def shard(model: Decoder) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # The rest: embeddings, last norm, head. They stay float32: the residual stream has the dtype of the embeddings.
        fully_shard(model, mesh=mesh)

    return shard


class FSDP2Strategy(ShardedCheckpoints, ModelParallelStrategy):
    """Lightning's strategy for a module whose model a :func:`sharder` has sharded, with this project's checkpoints."""

    def __init__(self) -> None:
        super().__init__(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, timeout=TIMEOUT)
