"""Shards of a tensor that torch made: placed where torch's own full tensor has them, drawn as the whole is drawn."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birthmark.audit.checkpoint import _open_run_checkpoint
from birthmark.models import tensor_shards
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.tensor_shards import Runs, TensorShard, full_shape, full_tensor, shard_of
from birthmark.trainer.checkpoints.stored_tensors import CheckpointFolder

# Odd sizes: 7 rows over 2, 3 and 2 × 2 ranks, so that some hold a shorter shard or none.
CONFIG = {
    "d_model": 10, "n_layers": 1, "n_heads": 2, "vocab_size": 7, "max_seq_len": 8, "mlp": "gelu", "bias": True,
    "positions": "none", "norm": "layernorm",
}  # fmt: skip
MESHES = {"2": [2], "3": [3], "2x2": [2, 2]}
#: Placements of matrices by the axes of a mesh: along columns; along columns, then rows; replicas of columns.
COLUMNS = {"1": [[2], [1]], "1 of 3": [[3], [1]], "1, 0": [[2, 2], [1, 0]], "replicas, 1": [[2, 2], [None, 1]]}

SCRIPT = """
import json, sys, torch, torch.distributed as dist
from math import prod
from pathlib import Path
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.tensor_shards import full_tensor, shard_of
from birthmark.trainer.checkpoints.stored_tensors import load_into, open_checkpoint
from birthmark.trainer.checkpoints.writer import BackgroundWriter
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group

config, meshes, columns = ModelConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2]), json.loads(sys.argv[3])
folder, found = Path(sys.argv[4]), {}


def by_columns(mesh, axes):
    def shard(model):
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                # Vectors have one axis.
                placements = [Replicate() if a is None else Shard(min(a, parameter.ndim - 1)) for a in axes]
                local = distribute_tensor(parameter.data, mesh, placements)
                module.register_parameter(name, torch.nn.Parameter(local))
    return shard


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
    for name, (sizes, axes) in columns.items():
        ranks = torch.arange(prod(sizes)).view(sizes)
        mesh = DeviceMesh("cpu", ranks)
        if prod(sizes) == 2:
            # All ranks write checkpoints: of the mesh of two, there are two.
            mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
            axes = [None, *axes]
        if not mesh.get_coordinate():
            continue
        model = born(config, 4, shard=by_columns(mesh, axes))
        found[name] = [digest(model), {name: p.full_tensor().tolist() for name, p in model.named_parameters()}]
        if mesh.size() < 4:
            continue
        state = {"global_step": 1, "state_dict": {f"model.{n}": p for n, p in model.named_parameters()}}
        BackgroundWriter().save(state, folder / name, shared=True)
        # Shards of one kind are read from those of another.
        for before in [path for path in folder.iterdir() if not path.name.startswith(".")]:
            again = born(config, 5, shard=by_columns(mesh, axes))
            stored = open_checkpoint(before).tensors
            for name, p in again.named_parameters():
                load_into(p, stored[f"state_dict/model.{name}"])
            assert digest(again) == digest(model), before
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sharded_births(launched, tmp_path_factory):
    """By mesh: digest and weights of a birth that was sharded before it was drawn. One launch for all."""
    folder = tmp_path_factory.mktemp("births")
    (folder / "saved").mkdir()
    (folder / "script.py").write_text(SCRIPT)
    arguments = [*map(json.dumps, (CONFIG, MESHES, COLUMNS)), folder / "saved"]
    return json.loads(launched(folder / "script.py", *arguments, n=4).splitlines()[-1]), folder / "saved"


@pytest.mark.parametrize("mesh", [*MESHES, *COLUMNS])
def test_a_sharded_birth_is_the_unsharded_one(mesh, sharded_births):
    found, weights = sharded_births[0][mesh]
    model = born(ModelConfig(**CONFIG), 4)
    assert found == digest(model)
    assert weights == {name: parameter.tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("saved", [name for name, (sizes, _) in COLUMNS.items() if sizes != [3]])
def test_a_checkpoint_of_column_shards_is_read_whole_and_by_the_audit(saved, sharded_births):
    folder, model = sharded_births[1] / saved, born(ModelConfig(**CONFIG), 4)
    stored, files = CheckpointFolder(folder).tensors, _open_run_checkpoint(folder)
    for name, parameter in model.named_parameters():
        tensor, flat = stored[f"state_dict/model.{name}"], parameter.detach().flatten()
        assert torch.equal(tensor.whole(), parameter)
        for start, stop in ((0, len(flat)), (1, len(flat) - 1), (3, 4), (len(flat) // 3, len(flat) // 2)):
            assert torch.equal(tensor.read(start, stop), flat[start:stop])
            assert torch.equal(files.read(name, start, stop), flat[start:stop])


def test_a_process_holds_all_of_a_tensor_that_is_not_sharded():
    x = torch.arange(6.0).view(2, 3)
    shard = shard_of(x)
    assert (shard.start, shard.stop, shard.shape, shard.replica) == (0, 6, (2, 3), 0)
    shard.local[4] = -1.0
    assert x[1, 1] == -1.0  # a view, not a copy
    assert full_shape(x) == (2, 3)
    assert full_tensor(x).data_ptr() == x.data_ptr()


@given(*(st.integers(*ends) for ends in ((0, 9), (0, 6), (1, 4), (0, 3), (0, 40))), st.data())
def test_runs_are_the_elements_that_a_list_of_them_has(start, n_runs, run, gap, stop, data):
    runs = Runs(start, n_runs * run, run, run + gap)
    held = [start + i * (run + gap) + j for i in range(n_runs) for j in range(run)]
    assert runs.stop == (held[-1] + 1 if held else start)
    begin = data.draw(st.integers(0, stop))
    # Of memory that has other tensors before it and behind it, as a view of a mapped file has.
    memory = torch.arange(100)
    whole, parts = memory[7:80] - 7, [*runs.overlaps(begin, stop)]
    found = [part.within(memory[7:80][begin:], begin).flatten() - 7 for part in parts]
    assert [x for one in found for x in one.tolist()] == [x for x in held if begin <= x < stop]
    assert all(part.n == len(one) for part, one in zip(parts, found, strict=True))
    assert [runs.index_of(x) for x in held] == [*range(len(held))]
    # A shard is read some runs at a time.
    for at_once in (False, True):
        local = torch.zeros(len(held), dtype=torch.long)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_shards, "_READ", 2 * runs.stride)
            shard = TensorShard(local, start, (80,), 0, (run, run + gap))
            shard.fill(lambda first, last: whole[first:last], at_once=at_once)
        assert local.tolist() == held
