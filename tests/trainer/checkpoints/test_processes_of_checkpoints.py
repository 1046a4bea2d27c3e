"""Checkpoints of models that are sharded over processes: what some of them save any other number loads, bit for bit.

The oracles: torch's own gathering of shards, and the model that one process trains.
"""

import json
import shutil
import socket

import pytest
import torch
from quiet_runs import leaves

from birthmark.errors import RunError
from birthmark.trainer.checkpoints.folder_io import CheckpointWeights, FolderCheckpointIO
from birthmark.trainer.checkpoints.stored_tensors import CheckpointFolder

# Rows that neither 2 nor 4 divide, fewer rows than processes, a buffer that is not sharded.
MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding, self.line, self.one = nn.Embedding(7, 4), nn.Linear(4, 5), nn.Linear(5, 1)
        self.register_buffer("moments", torch.arange(3.0))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x):
        return self.one(self.line(self.embedding(x)).sigmoid())

def made(shard=lambda model: None):
    model = Small()
    shard(model)
    groups = [{"params": [p for p in model.parameters() if p.ndim == n]} for n in (2, 1)]
    return model, torch.optim.AdamW(groups, lr=0.1, fused=True)

def train(model, optimizer, *steps):
    for step in steps:
        batch = torch.arange(12).view(4, 3).roll(step) % 7
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        model.moments += 1

def state(model, optimizer):
    return {
        "global_step": 3,
        "state_dict": {f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        "optimizer_states": [optimizer.state_dict()],
    }
"""

COMMON = (
    MODEL
    + """
import json, os, resource, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from birthmark.errors import RunError
from birthmark.measure.records import RunDir
from birthmark.models.tensor_shards import TensorShard
from birthmark.trainer.run_folder import check_all_see
from birthmark.trainer.checkpoints.stored_tensors import CheckpointFolder, StoredTensor, load_into, open_checkpoint
from birthmark.trainer.checkpoints.writer import BackgroundWriter

rank, folder, n = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
dist.init_process_group(
    "gloo", store=dist.FileStore(f"{folder}/store-{n}", n), rank=rank, world_size=n, timeout=timedelta(seconds=90)
)

def said(act, *arguments):
    try:
        act(*arguments)
    except (RunError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"

def listed():
    dist.barrier()
    return sorted(file.name for file in folder.glob("*step*"))
"""
)

SHARDED = """
def sharder(*sizes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes):])
    def shard(model):
        fully_shard(model.line, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return shard

def whole(value):
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, list):
        return [whole(v) for v in value]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.clone() if isinstance(value, torch.Tensor) else value

def filled(target, source):
    if isinstance(target, dict):
        for key in target:
            filled(target[key], source[key])
    elif isinstance(target, list):
        for ours, theirs in zip(target, source, strict=True):
            filled(ours, theirs)
    elif isinstance(source, StoredTensor):
        load_into(target, source)

io = BackgroundWriter(asynchronous=True)
for kind, sizes in {"shard": (n,), "replicas": (2, n // 2)}.items():
    model, optimizer = made(sharder(*sizes))
    train(model, optimizer, 0, 1, 2)
    results = {"saved": whole(state(model, optimizer))}
    io.save(state(model, optimizer), folder / f"{kind}-{n}", shared=True)
    train(model, optimizer, 3, 4)
    io.finish()
    assert (folder / f"{kind}-{n}").is_dir()
    results["later"] = whole(state(model, optimizer))
    for source in ("shard-1", "shard-2", "replicas-2"):
        if (folder / source).is_dir():
            model, optimizer = made(sharder(*sizes))
            train(model, optimizer, 5)  # so that there is something to load_into, of other values
            filled(state(model, optimizer), open_checkpoint(folder / source).tree(lambda stored: stored))
            results[source] = whole(state(model, optimizer))
    if rank == 0:
        torch.save(results, folder / f"{kind}-{n}.pt")
"""

FAILURES = """
results = {}
if n == 2:
    io = BackgroundWriter()
    content = {"global_step": 1, "x": TensorShard(torch.arange(5000.0) + 5000 * rank, 5000 * rank, (10000,))}
    io.save(content, folder / "step-1", shared=True)

    if rank == 1:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    results["full"] = said(lambda: io.save(content, folder / "step-2", shared=True))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    results["after full"] = listed()

    twice = {"global_step": 1, "x": TensorShard(torch.zeros(6), 4 * rank, (10,))}
    results["twice"] = said(lambda: io.save(twice, folder / "step-2", shared=True))
    gap = {"global_step": 1, "x": TensorShard(torch.zeros(4), 5 * rank, (10,))}
    results["gap"] = said(lambda: io.save(gap, folder / "step-2", shared=True))
    io.save(content, folder / "step-3", shared=True)
    results["after all"] = listed()

    for file in ("tensors-00000.safetensors", "tensors-00001.safetensors", "state.json"):
        path = folder / "step-3" / file
        good = path.read_bytes()
        dist.barrier()
        if rank == 0:
            path.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        dist.barrier()
        results[f"damaged {file}"] = said(open_checkpoint, folder / "step-3")
        if rank == 0:
            path.unlink()
        dist.barrier()
        results[f"missing {file}"] = said(open_checkpoint, folder / "step-3")
        if rank == 0:
            path.write_bytes(good)
        dist.barrier()
    results["mended"] = said(open_checkpoint, folder / "step-3")

    # As nodes that share no file system.
    io.timeout = timedelta(seconds=2)
    (folder / f"node-{rank}").mkdir()
    os.chdir(folder / f"node-{rank}")
    results["apart"] = said(lambda: io.save(content, Path("step-4"), shared=True))
    results["after apart"] = [file.name for file in Path().glob("*step*")]
    Path("run").mkdir()
    see = lambda run, checkpoint, shared: said(lambda: check_all_see(run, checkpoint, shared=shared, patience_s=1))
    results["run apart"] = see(RunDir(Path("run")), None, True)
    results["run"] = see(RunDir(folder), None, True)
    # Where rank 0 writes alone, a copy of the checkpoint can be read.
    results["apart at birth"] = see(RunDir(Path("run")), None, False)
    results["copied"] = see(RunDir(Path("run")), Path("run"), False)
    Path("run", f"of-{rank}").mkdir()
    results["not copied"] = see(RunDir(Path("run")), Path("run/of-0"), False)
    Path("run", f"of-{rank}").rmdir()
    dist.barrier()
    results["after run"] = [*map(str, Path("run").iterdir()), *map(str, folder.glob(".seen*"))]
print(json.dumps(results))
"""

KILLED = """
io = BackgroundWriter(asynchronous=True, timeout=timedelta(seconds=2))
half = 15_000_000
content = {"global_step": 1, "x": TensorShard(torch.ones(half), half * rank, (2 * half,))}
io.save(content, folder / "step-1", shared=True)
io.finish()
io.save(content | {"global_step": 2}, folder / "step-2", shared=True)
if rank == 1:
    while not any(file.stat().st_size for file in folder.glob(".step-2.*/.tensors-00001*/new")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
failure = ValueError("gone")
io.settle(failure)
print(json.dumps([failure.__notes__, sorted(file.name for file in folder.glob("*step*"))]), flush=True)
os._exit(0)
"""


def assert_same(found, expected):
    found, expected = leaves(found), leaves(expected)
    assert list(found) == list(expected)
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[path].dtype == value.dtype, path
            assert torch.equal(found[path], value), path
        else:
            assert found[path] == value, path


@pytest.fixture(scope="module")
def single():
    """The functions of MODEL."""
    names = {}
    exec(MODEL, names)
    return names


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def by_one(single, folder):
    """The state that a single process saves, as ``shard-1``."""
    model, optimizer = single["made"]()
    single["train"](model, optimizer, 0, 1, 2)
    FolderCheckpointIO().save_checkpoint(single["state"](model, optimizer), folder / "shard-1")
    return single["state"](model, optimizer)


@pytest.fixture(scope="module")
def by_two(by_one, folder, as_ranks):
    results, status = as_ranks(COMMON + SHARDED + FAILURES, folder, 2)
    assert status == [0, 0]
    return [json.loads(text) for text in results]


@pytest.fixture(scope="module")
def by_four(by_two, folder, as_ranks):
    _, status = as_ranks(COMMON + SHARDED + FAILURES, folder, 4, n=4)
    assert status == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["shard-2", "replicas-2", "shard-4", "replicas-4"])
def test_what_many_save_one_loads_bit_for_bit_and_goes_on_with(single, by_four, folder, name):
    truth = torch.load(folder / f"{name}.pt")
    loaded = FolderCheckpointIO().load_checkpoint(folder / name)
    assert_same(loaded, truth["saved"])
    weights = CheckpointWeights(folder / name)
    assert_same({f"model.{k}": v for k, v in weights.items()}, truth["saved"]["state_dict"])
    model, optimizer = single["made"]()
    model.load_state_dict({k.removeprefix("model."): v for k, v in loaded["state_dict"].items()})
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    single["train"](model, optimizer, 3, 4)
    for path, value in leaves(single["state"](model, optimizer)).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, leaves(truth["later"])[path], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["shard-2", "replicas-2", "shard-4", "replicas-4"])
def test_what_one_or_two_save_many_load_bit_for_bit(by_one, by_four, folder, name):
    truth = torch.load(folder / f"{name}.pt")
    assert_same(truth["shard-1"], by_one)
    if name.endswith("4"):
        for source in ("shard-2", "replicas-2"):
            assert_same(truth[source], torch.load(folder / f"{source}.pt")["saved"])


def test_every_rank_writes_its_own_part_and_replicas_write_one(by_four, folder):
    files = {name: sorted(f.name for f in (folder / name).iterdir()) for name in ("shard-4", "replicas-4")}
    parts = [f"tensors-{rank:05d}.safetensors" for rank in range(4)]
    assert files == {"shard-4": ["state.json", *parts], "replicas-4": ["state.json", *parts[:2]]}
    ranges = CheckpointFolder(folder / "shard-4").tensors["state_dict/model.line.weight"].pieces
    # 5 rows of 4 over 4 processes, as torch.chunk splits them: 2, 2, 1 and none.
    assert [(file, runs.start, runs.n) for file, runs in ranges] == [
        (parts[0], 0, 8),
        (parts[1], 8, 8),
        (parts[2], 16, 4),
    ]
    assert all(runs.is_range for _, runs in ranges)


@pytest.mark.parametrize("name", ["shard-4", "replicas-4"])
def test_a_byte_in_any_file_and_any_file_that_is_gone_are_named(by_four, folder, tmp_path, name):
    for file in sorted((folder / name).iterdir()):
        copy = shutil.copytree(folder / name, tmp_path / file.name)
        content = bytearray((copy / file.name).read_bytes())
        content[-9] ^= 1
        (copy / file.name).write_bytes(content)
        for load in (FolderCheckpointIO().load_checkpoint, CheckpointWeights):
            with pytest.raises(RunError, match=rf"/{file.name}: damaged.*delete the folder to go on"):
                load(copy)
        (copy / file.name).unlink()
        with pytest.raises(RunError, match=rf"/{file.name}: missing"):
            FolderCheckpointIO().load_checkpoint(copy)


def test_what_one_rank_finds_all_refuse_by_the_same_name(by_two):
    for results in by_two:
        for file in ("tensors-00000.safetensors", "tensors-00001.safetensors", "state.json"):
            assert f"step-3/{file}: damaged" in results[f"damaged {file}"]
            assert f"step-3/{file}: missing" in results[f"missing {file}"]
        assert results["mended"] is None


def test_one_rank_that_cannot_write_fails_all_and_the_checkpoint_before_stays(by_two):
    for results in by_two:
        assert "RunError: " in results["full"]
        assert "step-2: cannot be written" in results["full"]
        assert results["after full"] == ["step-1"]


def test_a_rank_that_does_not_see_the_folder_is_named_at_once(by_two):
    """It wrote into a folder of its own, and the run ended half an hour later, in a hang of rank 0."""
    for results in by_two:
        unseen = f"rank 1 on host {socket.gethostname()} does not see the folder"
        assert f"step-4: {unseen}" in results["apart"]
        # A start asks before it trains.
        assert f"--run_dir run: {unseen}" in results["run apart"]
        assert results["run"] is results["apart at birth"] is results["copied"] is None
        assert f"run/of-0: {unseen}" in results["not copied"]
        assert results["after apart"] == results["after run"] == []


def test_what_is_not_written_once_and_whole_is_no_checkpoint(by_two):
    for results in by_two:
        for case in ("twice", "gap"):
            assert "checkpoint entry 'x': its pieces do not make up [10]" in results[case]
        assert results["after all"] == ["step-1", "step-3"]


def test_a_rank_that_is_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path, as_ranks):
    results, status = as_ranks(COMMON + KILLED, tmp_path, 2)
    assert status == [0, -9]
    notes, left = json.loads(results[0])
    assert "rank 1 of 2 has not written its part" in notes[0]
    assert left == ["step-1"]
    assert FolderCheckpointIO().load_checkpoint(tmp_path / "step-1")["x"].eq(1).all()
