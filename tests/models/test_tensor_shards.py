"""Pieces of a tensor that torch cuts: placed where torch's own full tensor has them, drawn as the whole is drawn."""

import json

import pytest
import torch

from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.tensor_shards import piece_of, shape_of, whole

# Odd sizes: 7 rows over 2, 3 and 2 × 2 processes, so that some hold a shorter piece or none.
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

SCRIPT = """
import json, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.tensor_shards import piece_of, whole
from birthmark.trainer.processes import joined, place

with joined(place(), torch.device("cpu")):
    config = ModelConfig(**json.loads(sys.argv[2]))
    sizes = json.loads(sys.argv[1])
    mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=("replicate", "shard")[-len(sizes) :])

    def cut(model):
        fully_shard(model.blocks[0], mesh=mesh)
        fully_shard(model, mesh=mesh)

    model = born(config, 4, spread=cut)
    told = {}
    for name, parameter in model.named_parameters():
        piece, full = piece_of(parameter), parameter.full_tensor()
        assert torch.equal(piece.local, full.flatten()[piece.start : piece.stop]), name
        assert torch.equal(whole(parameter), full) and piece.shape == tuple(full.shape)
        # Every element is in the first replica of exactly one process.
        seen = torch.zeros(full.numel())
        seen[piece.start : piece.stop] = piece.replica == 0
        dist.all_reduce(seen)
        assert torch.equal(seen, torch.ones(full.numel())), name
        told[name] = full.tolist()
    if dist.get_rank() == 0:
        print(json.dumps([digest(model), told]))
    else:
        digest(model)
"""


@pytest.mark.parametrize("mesh", [[2], [3], [2, 2]])
def test_a_birth_that_is_cut_is_the_whole_one(mesh, launched_script):
    n = torch.tensor(mesh).prod().item()
    found, told = json.loads(launched_script(SCRIPT, json.dumps(mesh), json.dumps(CONFIG), n=n).splitlines()[-1])
    config = ModelConfig(
        d_model=10,
        n_layers=1,
        n_heads=2,
        vocab_size=7,
        max_seq_len=8,
        mlp="gelu",
        bias=True,
        positions="none",
        norm="layernorm",
    )
    model = born(config, 4)
    assert found == digest(model)
    assert told == {name: parameter.tolist() for name, parameter in model.named_parameters()}


def test_of_a_tensor_that_is_not_cut_one_process_holds_all():
    x = torch.arange(6.0).view(2, 3)
    piece = piece_of(x)
    assert (piece.start, piece.stop, piece.shape, piece.replica) == (0, 6, (2, 3), 0)
    piece.local[4] = -1.0
    assert x[1, 1] == -1.0  # a view, not a copy
    assert shape_of(x) == (2, 3)
    assert whole(x).data_ptr() == x.data_ptr()
