"""Which checkpoints a run keeps, and what a crash leaves of those that it does not."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from birthmark.callbacks.checkpoint import Checkpoint
from birthmark.errors import RunError
from birthmark.files import delete_folder
from birthmark.measure.records import RunDir
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO


class Line(L.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        self.line, self.fails_at = torch.nn.Linear(3, 1), fails_at

    def training_step(self, batch, index):
        if index == self.fails_at:
            raise RunError("no further")
        return self.line(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def train(run, module=None, max_steps=9, **keep):
    parts = {"callbacks": [Checkpoint(1, run, **keep)], "plugins": [FolderCheckpointIO(asynchronous=True)]}
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", max_steps=max_steps, max_epochs=-1, **parts, **silent)
    trainer.fit(module or Line(), DataLoader(torch.randn(20, 3), batch_size=1))


def names(run):
    return sorted(f.name for f in (run.path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ({"keep_last": 2}, [8, 9]),
        ({"keep_last": 2, "keep_every": 4}, [4, 8, 9]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6, 9]),
        ({"keep_last": 20}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_the_last_ones_and_every_nth_step_are_kept_and_all_are_whole(tmp_path, keep, expected):
    run = RunDir(tmp_path)
    train(run, **keep)
    assert names(run) == [f"step-{step:08d}" for step in expected]
    for step in expected:
        assert FolderCheckpointIO().load_checkpoint(run.checkpoint(step))["global_step"] == step


def test_a_run_goes_on_where_old_ones_cannot_be_deleted_and_copies_of_a_user_stay(tmp_path, monkeypatch):
    run, said = RunDir(tmp_path), []
    for copy in ("step-00000001.bak", "step-old"):
        (run.path / "checkpoints" / copy).mkdir(parents=True)

    def refuse(folder):
        if folder == run.checkpoint(2):
            raise PermissionError(13, "Permission denied", str(folder))
        delete_folder(folder)

    monkeypatch.setattr("birthmark.callbacks.checkpoint.delete_folder", refuse)
    train(run, max_steps=5, keep_last=2, say=said.append)
    kept = ["step-00000002", "step-00000004", "step-00000005"]
    assert names(run) == sorted([*kept, "step-00000001.bak", "step-old"])
    for name in kept:
        assert FolderCheckpointIO().load_checkpoint(run.path / "checkpoints" / name)["global_step"] == int(name[-1])
    assert said
    assert all(str(run.checkpoint(2)) in line and "Permission denied" in line for line in said)


def test_a_failure_right_after_a_checkpoint_leaves_it_whole(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(RunError, match="no further"):
        train(run, Line(fails_at=2))
    assert names(run) == ["step-00000001", "step-00000002"]
    assert FolderCheckpointIO().load_checkpoint(run.checkpoint(2))["global_step"] == 2


def test_what_is_half_deleted_does_not_look_whole(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.checkpoint(1).mkdir(parents=True)
    (run.checkpoint(1) / "tensors.safetensors").touch()

    def killed(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr("birthmark.files.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        delete_folder(run.checkpoint(1))
    assert run.checkpoints() == []
    (hidden,) = (run.path / "checkpoints").iterdir()
    assert any(hidden.rglob("*.safetensors"))
