"""Checkpoints of one process: what is written, when it is there, and what is said of a folder that is not whole."""

import hashlib
import json
import math
import re
import shutil
import subprocess
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from birthmark.audit.checkpoint import _open_run_checkpoint
from birthmark.errors import RunError
from birthmark.models.decoder import Decoder
from birthmark.models.tensor_shards import TensorShard
from birthmark.trainer.checkpoints.folder_io import CheckpointWeights, FolderCheckpointIO, load_model
from birthmark.trainer.checkpoints.stored_tensors import CheckpointFolder, load_into

CHECKPOINT = {
    "global_step": 7,
    "state_dict": {"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.tensor(3, dtype=torch.int64)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(7.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.95)}]}],
    "loops": {"done": False, "ready": 14, "name": None, "text": "x", "tensor": {"dict": []}, "best": -math.inf},
    "half": torch.randn(4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "empty": torch.empty(0, 3),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def damage(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-00000007"
    FolderCheckpointIO().save_checkpoint(CHECKPOINT, path)
    return path


@pytest.fixture
def old(tmp_path):
    """A folder as format 1 had it, written by hand."""
    path = tmp_path / "step-00000003"
    path.mkdir()
    tensors = {"state_dict/model.a": torch.arange(6.0).view(2, 3), "optimizer_states/0/state/0/step": torch.tensor(3.0)}
    save_file(tensors, path / "tensors.safetensors")
    moments = {"dict": [[0, {"dict": [["step", {"tensor": "optimizer_states/0/state/0/step"}]]}]]}
    optimizer = {"dict": [["state", moments], ["betas", {"tuple": [0.9, 0.95]}]]}
    weights = {"dict": [["model.a", {"tensor": "state_dict/model.a"}]]}
    tree = [["global_step", 3], ["state_dict", weights], ["optimizer_states", {"list": [optimizer]}]]
    sha = hashlib.sha256((path / "tensors.safetensors").read_bytes()).hexdigest()
    state = {"format": 1, "step": 3, "sha256": sha, "state": {"dict": tree}}
    (path / "state.json").write_text(json.dumps(state))
    return path


def test_a_checkpoint_comes_back_as_it_was(folder):
    assert same(FolderCheckpointIO().load_checkpoint(folder), CHECKPOINT)


def test_only_json_and_safetensors_are_written_and_any_reader_finds_whole_tensors(folder):
    assert sorted(f.name for f in folder.iterdir()) == ["state.json", "tensors.safetensors"]
    assert json.loads((folder / "state.json").read_text())["step"] == 7
    tensors = load_file(folder / "tensors.safetensors")
    assert torch.equal(tensors["state_dict/model.a"], CHECKPOINT["state_dict"]["model.a"])
    assert torch.equal(tensors["transposed"], CHECKPOINT["transposed"])


def test_a_folder_of_format_1_still_loads(old):
    expected = {
        "global_step": 3,
        "state_dict": {"model.a": torch.arange(6.0).view(2, 3)},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.95)}],
    }
    assert same(FolderCheckpointIO().load_checkpoint(old), expected)
    assert torch.equal(CheckpointWeights(old)["a"], torch.arange(6.0).view(2, 3))
    CheckpointWeights(old).check(["a"])
    with pytest.raises(RunError, match=r"has no b; the run's config\.yaml is another model's"):
        CheckpointWeights(old).check(["a", "b"])
    damage(old / "tensors.safetensors", -1)
    for load in (FolderCheckpointIO().load_checkpoint, CheckpointWeights):
        with pytest.raises(RunError, match=r"tensors\.safetensors: damaged .* delete the folder to go on"):
            load(old)


@pytest.mark.parametrize("value", [object(), {1}, {(1, 2): 3}])
def test_what_cannot_be_written_plainly_is_refused_and_leaves_nothing(tmp_path, value):
    with pytest.raises(TypeError, match="callbacks/x"):
        FolderCheckpointIO().save_checkpoint({"global_step": 1, "callbacks": {"x": value}}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


# ── what is damaged ─────────────────────────────────────────────────────────────────────────────────────────────────


def cut(file, position):
    file.write_bytes(file.read_bytes()[:position])


@pytest.mark.parametrize(("harm", "position"), [(damage, 0), (damage, 100), (damage, -1), (cut, -8)])
def test_a_flipped_byte_and_a_cut_are_found_and_the_file_named(folder, harm, position):
    harm(folder / "tensors.safetensors", position)
    with pytest.raises(RunError, match=r"tensors\.safetensors: damaged"):
        FolderCheckpointIO().load_checkpoint(folder)


@pytest.mark.parametrize("text", ['"ready"', "14", '"n": 6', "0.95", '"format": 2'])
def test_a_flipped_byte_of_the_state_is_found(folder, text):
    file = folder / "state.json"
    damage(file, file.read_text().index(text) + len(text) - 2)
    with pytest.raises(RunError, match=r"state\.json: (damaged|format)"):
        FolderCheckpointIO().load_checkpoint(folder)


def test_a_file_that_is_longer_than_the_state_says_is_refused_before_it_is_read(folder):
    file = folder / "tensors.safetensors"
    tensors = load_file(file)
    # Its header says the same as its length.
    save_file(tensors | {next(iter(tensors)): torch.zeros(1 << 20)}, file)
    with pytest.raises(
        RunError, match=r"tensors\.safetensors: damaged \(it has [0-9,]+ bytes of tensors, not [0-9,]+\)"
    ):
        FolderCheckpointIO().load_checkpoint(folder)
    with file.open("r+b") as opened:
        opened.truncate(1 << 40)
    with pytest.raises(
        RunError, match=r"tensors\.safetensors: damaged \(it has 1,099,511,627,776 bytes, and its header"
    ):
        FolderCheckpointIO().load_checkpoint(folder)


def test_missing_and_broken_state_is_named(folder):
    state, tensors = folder / "state.json", folder / "tensors.safetensors"
    for harm, words in (
        (tensors.unlink, r"tensors\.safetensors: missing; delete the folder to go on"),
        (lambda: state.write_text("{"), r"state\.json: damaged"),
        (lambda: state.write_text('{"format": 99}'), "format 99"),
        (state.unlink, r"state\.json: missing; delete the folder to go on from the checkpoint before it$"),
        (lambda: [shutil.rmtree(folder), folder.mkdir()], r"state\.json: missing; delete the folder to go on"),
    ):
        harm()
        with pytest.raises(RunError, match=words):
            FolderCheckpointIO().load_checkpoint(folder)


def write_sealed(folder, content):
    content = {name: value for name, value in content.items() if name != "sha256"}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "state.json").write_text(json.dumps({"sha256": seal, **content}))


#: Change of a state, as someone makes it who seals it anew, and what is said of it.
CONTRADICTIONS = {
    "another step": (lambda c: c.update(step=8), r"step is 8, and the folder is of another"),
    "a file outside": (lambda c: c["files"].update({"../x": "0" * 64}), r"files has '\.\./x'"),
    "a file that is not listed": (
        lambda c: c["tensors"]["transposed"]["pieces"][0].update(file="x.safetensors"),
        r"'transposed' is in 'x\.safetensors', which is not among files",
    ),
    "runs of 0": (lambda c: c["tensors"]["transposed"]["pieces"][0].update(run=0), "6 elements in runs of 0"),
    "runs cut": (lambda c: c["tensors"]["transposed"]["pieces"][0].update(run=4, stride=4), "6 elements in runs of 4"),
    "runs over runs": (lambda c: c["tensors"]["transposed"]["pieces"][0].update(run=3, stride=2), "in runs of 3"),
    "too few": (lambda c: c["tensors"]["transposed"]["pieces"][0].update(n=5), r"do not make up \[3, 2\]"),
    "another place": (lambda c: c["tensors"]["transposed"]["pieces"][0].update(start=1), "transposed is not whole"),
    "a longer file": (
        lambda c: c["tensors"]["state_dict/model.b"].update(shape=[0], pieces=[]),
        "it has [0-9]+ bytes of tensors, not",
    ),
    "fewer elements than the file has": (
        lambda c: c["tensors"].update(
            {
                name: {
                    "shape": [n],
                    "dtype": "float32",
                    "pieces": [{"file": "tensors.safetensors", "start": 0, "n": n}],
                }
                for name, n in {"transposed": 5, "more": 1}.items()
            }
        ),
        r"transposed has 6 elements of float32, state\.json says 5",
    ),
    "no type": (lambda c: c["tensors"]["transposed"].update(dtype="nn"), "tensors.transposed.dtype is"),
    "another type": (
        lambda c: c["tensors"]["transposed"].update(dtype="int32"),
        r"transposed has 6 elements of float32, state\.json says 6 elements of int32",
    ),
    "a tensor of none": (
        lambda c: c["state"]["dict"].append(["more", {"tensor": "more"}]),
        "state has the tensor 'more', which is not among tensors",
    ),
    "no pair": (lambda c: c["state"]["dict"].append(["more", 1, 2]), "not a name and a value"),
    "no name": (lambda c: c["state"]["dict"].append([{}, 1]), "not a name and a value"),
    "no float": (lambda c: c["state"]["dict"].append(["more", {"float": "1"}]), "float in state"),
    "no list": (lambda c: c["state"]["dict"].append(["more", {"list": "ab"}]), "list in state"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_state_that_contradicts_itself_is_refused_though_its_seal_is_right(folder, case):
    change, said = CONTRADICTIONS[case]
    content = json.loads((folder / "state.json").read_text())
    change(content)
    write_sealed(folder, content)
    with pytest.raises(RunError, match=rf"damaged \(.*{said}"):
        FolderCheckpointIO().load_checkpoint(folder)


def test_a_folder_that_is_deleted_while_it_is_read_is_said_to_be_gone(folder):
    """As `trainer.keep_last` does; the advice was to delete it."""
    opened = CheckpointFolder(folder)
    shutil.rmtree(folder)
    stored = opened.tensors["state_dict/model.a"]
    for read in (lambda: CheckpointFolder(folder), opened.verify, stored.whole):
        with pytest.raises(RunError, match=f"^{re.escape(str(folder))}: no such checkpoint, at least no longer"):
            read()


# ── parts of tensors ────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 35), min_size=2, max_size=6).map(sorted), st.data())
def test_any_range_is_read_from_pieces_of_any_size(tmp_path_factory, cuts, data):
    """Files and state as several ranks would leave them, put together by hand."""
    folder = tmp_path_factory.mktemp("cut")
    whole = torch.arange(35, dtype=torch.float64).view(5, 7)
    bounds = [0, *cuts, 35]
    files, pieces = {}, []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            file = folder / f"tensors-{i:05d}.safetensors"
            save_file({"x": whole.flatten()[start:stop].clone()}, file)
            files[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            pieces.insert(0, {"file": file.name, "start": start, "n": stop - start})
    content = {
        "format": 2,
        "step": 1,
        "files": files,
        "tensors": {"x": {"shape": [5, 7], "dtype": "float64", "pieces": pieces}},
        "state": {"tensor": "x"},
    }
    write_sealed(folder, content)
    opened = CheckpointFolder(folder)
    opened.verify()
    stored = opened.tensors["x"]
    assert torch.equal(stored.whole(), whole)
    start = data.draw(st.integers(0, 35))
    stop = data.draw(st.integers(start, 35))
    assert torch.equal(stored.read(start, stop), whole.flatten()[start:stop])
    local = torch.zeros(stop - start)
    load_into(TensorShard(local, start, (5, 7)), stored)
    assert torch.equal(local, whole.flatten()[start:stop].float())


@pytest.mark.parametrize("starts", [(0, 0), (0, 2), (0, 9)])
def test_elements_that_no_piece_holds_are_not_what_the_memory_held(tmp_path, starts):
    """Pieces of as many elements as the tensor has, some of them twice."""
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    files = {}
    for i in range(2):
        file = folder / f"tensors-{i:05d}.safetensors"
        save_file({"state_dict/model.x": torch.ones(3)}, file)
        files[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    pieces = [{"file": file, "start": start, "n": 3} for file, start in zip(files, starts, strict=True)]
    tensors = {"state_dict/model.x": {"shape": [6], "dtype": "float32", "pieces": pieces}}
    write_sealed(folder, {"format": 2, "step": 1, "files": files, "tensors": tensors, "state": {"dict": []}})
    for read in (CheckpointWeights(folder).__getitem__, lambda name: _open_run_checkpoint(folder).read(name, 0, 6)):
        with pytest.raises(RunError, match=r"state\.json: damaged \(state_dict/model\.x is not whole\)"):
            read("x")


def test_another_shape_is_refused(folder):
    stored = CheckpointFolder(folder).tensors["state_dict/model.a"]
    with pytest.raises(RunError, match=r"model\.a: its shape is \[2, 3\], the model's \[3, 2\]"):
        load_into(torch.zeros(3, 2), stored)


def test_a_model_is_loaded_whole_and_what_it_lacks_is_named(tiny, tmp_path):
    config = tiny().model
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Decoder(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    FolderCheckpointIO().save_checkpoint({"global_step": 1, "state_dict": weights}, tmp_path / "c")
    loaded = load_model(config, tmp_path / "c").state_dict()
    assert all(torch.equal(loaded[name.removeprefix("model.")], tensor) for name, tensor in weights.items())
    rows = CheckpointWeights(tmp_path / "c").rows("embed.weight", 3, 7)
    assert torch.equal(rows, weights["model.embed.weight"][3:7])
    assert not load_model(config, tmp_path / "c").training
    lost, _ = weights.popitem()
    FolderCheckpointIO().save_checkpoint({"global_step": 1, "state_dict": weights}, tmp_path / "c")
    with pytest.raises(RunError, match=f"has no {lost.removeprefix('model.')}"):
        load_model(config, tmp_path / "c")


# ── in the background ───────────────────────────────────────────────────────────────────────────────────────────────


def state(value, n=4_000_000):
    return {"global_step": value, "w": torch.full((n,), float(value)), "part": torch.full((7, 3), float(value)).T}


def test_what_is_written_is_the_state_at_the_time_whatever_training_does_next(tmp_path):
    io = FolderCheckpointIO(asynchronous=True)
    now = state(1)
    for step in (1, 2, 3):
        io.save_checkpoint(now | {"global_step": step}, tmp_path / f"step-{step}")
        for tensor in (now["w"], now["part"]):
            tensor += 1
    io.finish()
    for step in (1, 2, 3):
        assert same(FolderCheckpointIO().load_checkpoint(tmp_path / f"step-{step}"), state(step))


def test_saving_returns_before_the_folder_is_there_and_says_when_it_is(tmp_path):
    io = FolderCheckpointIO(asynchronous=True)
    printed = []
    io.on_complete = lambda: printed.append(sorted(f.name for f in tmp_path.iterdir()))
    io.save_checkpoint(state(1, 30_000_000), tmp_path / "step-1")
    assert not (tmp_path / "step-1").exists()
    io.finish()
    assert printed == [["step-1"]]
    io.finish()  # of nothing is no mistake


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from birthmark.errors import RunError
from birthmark.trainer.checkpoints.writer import BackgroundWriter
folder, limit = Path(sys.argv[1]), resource.getrlimit(resource.RLIMIT_FSIZE)
io = BackgroundWriter(asynchronous=True)
complete = []
io.on_complete = lambda: complete.append(sorted(f.name for f in folder.iterdir()))
def save(step):
    io.save({"global_step": step, "w": torch.full((100_000,), float(step))}, folder / f"step-{step}", shared=False)
save(1)
io.finish()
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
save(2)
try:
    save(3)
except RunError as error:
    print(error)
print(sorted(f.name for f in folder.iterdir()))
save(4)
failure = ValueError("the run's own")
io.settle(failure)
print(failure, *failure.__notes__)
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
save(4)
io.teardown()
print(sorted(f.name for f in folder.iterdir()))
print(complete)
"""


def test_a_full_disk_is_told_at_the_next_call_and_leaves_the_checkpoint_before(tmp_path, python):
    """A limit on file sizes stands in for the disk's end."""
    command = [python, "-c", LIMITED, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "step-2: cannot be written" in printed[0]
    assert "the checkpoints before it are intact" in printed[0]
    assert printed[1] == "['step-1']"
    # After a failure of the run it is a note of that.
    assert printed[2].startswith("the run's own ")
    assert "step-4: cannot be written" in printed[2]
    assert printed[3] == "['step-1', 'step-4']"
    assert printed[4] == "[['step-1'], ['step-1', 'step-4']]"
    assert CheckpointFolder(tmp_path / "step-1").tensors["w"].whole().eq(1).all()


def test_a_failure_of_the_run_waits_for_what_is_being_written_and_an_interrupt_does_not(tmp_path):
    io = FolderCheckpointIO(asynchronous=True)
    io.save_checkpoint(state(1), tmp_path / "step-1")
    io.settle(ValueError())
    assert FolderCheckpointIO().load_checkpoint(tmp_path / "step-1")["global_step"] == 1
    io.save_checkpoint(state(2, 30_000_000), tmp_path / "step-2")
    io.settle(KeyboardInterrupt())
    assert not (tmp_path / "step-2").exists()
