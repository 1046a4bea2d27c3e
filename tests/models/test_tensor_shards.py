"""Shards of a tensor that torch made: placed where torch's own full tensor has them, drawn as the whole is drawn."""

import json

import pytest
import torch

from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.tensor_shards import full_shape, full_tensor, shard_of

# Odd sizes: 7 rows over 2, 3 and 2 × 2 ranks, so that some hold a shorter shard or none.
CONFIG = {
    "d_model": 10,
    "n_layers": 1,
    "n_heads": 2,
    "vocab_size": 7,
    "max_seq_len": 8,
    "mlp": "gelu",
    "bias": True,
    "positions": "none",
    "norm": "layernorm",
}
MESHES = {"2": [2], "3": [3], "2x2": [2, 2]}

SCRIPT = """
import json, sys, torch, torch.distributed as dist
from math import prod
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.tensor_shards import full_tensor, shard_of
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group

config, meshes = ModelConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
found = {}
with join_process_group(launched_process(), torch.device("cpu")):
    for mesh_name, sizes in meshes.items():
        # All ranks make the mesh; those outside it have nothing to do with it.
        ranks = torch.arange(prod(sizes)).view(sizes)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        group = dist.new_group(ranks.flatten().tolist())
        if dist.get_rank() >= ranks.numel():
            continue

        def shard(model):
            fully_shard(model.blocks[0], mesh=mesh)
            fully_shard(model, mesh=mesh)

        model = born(config, 4, shard=shard)
        weights = {}
        for name, parameter in model.named_parameters():
            part, full = shard_of(parameter), parameter.full_tensor()
            assert torch.equal(part.local, full.flatten()[part.start : part.stop]), name
            assert torch.equal(full_tensor(parameter), full) and part.shape == tuple(full.shape)
            # Every element is in the first replica of exactly one rank.
            seen = torch.zeros(full.numel())
            seen[part.start : part.stop] = part.replica == 0
            dist.all_reduce(seen, group=group)
            assert torch.equal(seen, torch.ones(full.numel())), name
            weights[name] = full.tolist()
        found[mesh_name] = [digest(model), weights]
    if dist.get_rank() == 0:
        print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sharded_births(launched, tmp_path_factory):
    """By mesh: digest and weights of a birth that was sharded before it was drawn. One launch for all."""
    script = tmp_path_factory.mktemp("births") / "script.py"
    script.write_text(SCRIPT)
    return json.loads(launched(script, json.dumps(CONFIG), json.dumps(MESHES), n=4).splitlines()[-1])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_sharded_birth_is_the_unsharded_one(mesh, sharded_births):
    found, weights = sharded_births[mesh]
    model = born(ModelConfig(**CONFIG), 4)
    assert found == digest(model)
    assert weights == {name: parameter.tolist() for name, parameter in model.named_parameters()}


def test_a_process_holds_all_of_a_tensor_that_is_not_sharded():
    x = torch.arange(6.0).view(2, 3)
    shard = shard_of(x)
    assert (shard.start, shard.stop, shard.shape, shard.replica) == (0, 6, (2, 3), 0)
    shard.local[4] = -1.0
    assert x[1, 1] == -1.0  # a view, not a copy
    assert full_shape(x) == (2, 3)
    assert full_tensor(x).data_ptr() == x.data_ptr()
