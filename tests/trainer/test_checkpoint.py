import json

import pytest
import torch

from birthmark.errors import RunError
from birthmark.trainer.checkpoint import FolderCheckpointIO

CHECKPOINT = {
    "global_step": 7,
    "state_dict": {"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.tensor(3, dtype=torch.int64)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(7.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.95)}]}],
    "loops": {"done": False, "ready": 14, "name": None, "text": "x", "tensor": {"dict": []}},
    "half": torch.randn(4, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "transposed": torch.arange(6.0).view(2, 3).T,
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-00000007"
    FolderCheckpointIO().save_checkpoint(CHECKPOINT, path)
    return path


def test_a_checkpoint_comes_back_as_it_was(folder):
    assert same(FolderCheckpointIO().load_checkpoint(folder), CHECKPOINT)


def test_only_json_and_safetensors_are_written(folder):
    assert sorted(f.name for f in folder.iterdir()) == ["state.json", "tensors.safetensors"]
    assert json.loads((folder / "state.json").read_text())["step"] == 7


def test_what_cannot_be_written_plainly_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="callbacks/x"):
        FolderCheckpointIO().save_checkpoint({"global_step": 1, "callbacks": {"x": object()}}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_writing_leaves_the_checkpoint_before(folder, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("birthmark.trainer.checkpoint.write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        FolderCheckpointIO().save_checkpoint({**CHECKPOINT, "global_step": 8}, folder)
    assert FolderCheckpointIO().load_checkpoint(folder)["global_step"] == 7
    assert [f.name for f in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_flipped_byte_is_found_and_the_file_named(folder, position):
    file = folder / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"tensors\.safetensors: damaged"):
        FolderCheckpointIO().load_checkpoint(folder)


def test_a_cut_file_is_found(folder):
    file = folder / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(RunError, match=r"tensors\.safetensors: damaged"):
        FolderCheckpointIO().load_checkpoint(folder)


def test_missing_and_broken_state_is_named(folder):
    (folder / "tensors.safetensors").unlink()
    with pytest.raises(RunError, match=r"tensors\.safetensors: missing"):
        FolderCheckpointIO().load_checkpoint(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(RunError, match=r"state\.json: damaged"):
        FolderCheckpointIO().load_checkpoint(folder)
    (folder / "state.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="format 99"):
        FolderCheckpointIO().load_checkpoint(folder)
