"""Runs that stop and go on: to the bit, from what they find, or with the reason why not."""

import csv
import os
import shutil
import sys

import pytest
import torch
import yaml
from quiet_runs import logged, run, up_to, weights
from rich.console import Console

from birthmark.errors import RunError, UsageError
from birthmark.files import write_sealed_json
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.trainer.optimizers.table import OPTIMIZERS
from birthmark.trainer.run import pretrain


@pytest.mark.parametrize("name", [*(name for name in OPTIMIZERS if name != "adamw"), "adamw in bf16"])
def test_every_optimizer_goes_on_bit_for_bit(name, tiny, tmp_path):
    """AdamW does so in tests/trainer/test_arms.py."""
    if name == "soap":
        pytest.importorskip("pytorch_optimizer", reason="soap is optional: pip install pytorch-optimizer")
    of_name = {"optim.state_dtype": "bf16", "optim.clip_in_step": True} if " " in name else {"optim.name": name}
    fields = {**of_name, "trainer.max_steps": 4, "trainer.checkpoint_every": 2, "snapshot.enabled": False}
    whole = run(tiny(fields), tmp_path / "whole")
    parts = run(tiny(fields), up_to(2, whole, tmp_path / "parts").path, resume=True)
    # Weights and the optimizer's state.
    a, b = ((done.checkpoint(4) / "tensors.safetensors").read_bytes() for done in (whole, parts))
    assert a == b
    assert logged(parts, "train/loss") == logged(whole, "train/loss")


def test_resuming_without_a_birth_snapshot_measures_birth_again(tiny, tmp_path):
    whole = run(tiny(), tmp_path / "whole")
    parts = up_to(4, whole, tmp_path / "parts")
    shutil.rmtree(parts.snapshot(0))
    run(tiny(), parts.path, resume=True)
    for key in ("bias/alignment", "bias/rank_persistence"):
        assert logged(parts, key) == pytest.approx(logged(whole, key), rel=1e-12)
    steps = [record["step"] for record in read_metrics(parts.metrics)]
    assert steps == sorted(steps)


def test_an_end_before_the_last_checkpoint_is_refused_and_the_config_stays(tiny, tmp_path):
    fields = {"trainer.checkpoint_every": 1, "snapshot.enabled": False}
    done = run(tiny(fields | {"trainer.max_steps": 2}), tmp_path / "run")
    before = done.config.read_bytes()
    with pytest.raises(UsageError, match=r"trainer\.max_steps is 1: .*run has been trained to step 2; give 2 or more$"):
        run(tiny(fields | {"trainer.max_steps": 1}), done.path, resume=True)
    assert done.config.read_bytes() == before
    run(tiny(fields | {"trainer.max_steps": 2}), done.path, resume=True)
    shutil.rmtree(done.checkpoint(2))
    run(tiny(fields | {"trainer.max_steps": 1}), done.path, resume=True)


def test_a_damaged_checkpoint_is_refused_and_the_config_stays(tiny, tmp_path):
    done = run(tiny({"trainer.max_steps": 2, "snapshot.enabled": False}), tmp_path / "run")
    changed = tiny({"trainer.max_steps": 4, "snapshot.enabled": False, "optim.lr": 0.5})
    file, before = done.checkpoint(2) / "tensors.safetensors", done.config.read_bytes()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    # The second is at its end, and takes no step.
    for config in (changed, tiny({"trainer.max_steps": 2, "snapshot.enabled": False, "optim.lr": 0.5})):
        with pytest.raises(RunError, match=r"tensors\.safetensors: damaged"):
            run(config, done.path, resume=True)
    assert done.config.read_bytes() == before
    file.write_bytes(whole)
    run(changed, done.path, resume=True)
    assert yaml.safe_load(done.config.read_text())["optim"]["lr"] == 0.5


def test_a_used_directory_is_refused_and_nothing_in_it_changes(tiny, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="already in use"):
        run(tiny(), tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["notes.txt"]


def test_a_start_that_died_before_the_birth_was_written_is_no_run(tiny, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as at_birth:
        at_birth.setattr("birthmark.trainer.run_folder.write_sealed_json", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(), tmp_path / "run")
    config = RunDir(tmp_path / "run").config
    assert config.is_file()
    sealed = config.read_text()
    config.write_text(sealed.replace("init_seed", "init_seeds"))
    with pytest.raises(UsageError, match="already in use"):  # a person's
        run(tiny(), tmp_path / "run")
    config.write_text(sealed)
    assert run(tiny({"trainer.max_steps": 1}), tmp_path / "run").birth.is_file()


def test_a_resumed_run_keeps_what_makes_it_itself(tiny, tmp_path):
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    for change in (
        {"init_seed": 4},
        {"model.n_layers": 3},
        {"data.data_seed": 6},
        {"snapshot.probe_seed": 1},
        {"trainer.global_batch_size": 8},
    ):
        with pytest.raises(UsageError, match=next(iter(change)).partition(".")[0]):
            run(tiny(change), done.path, resume=True)
    run(tiny({"trainer.max_steps": 4}), done.path, resume=True)
    assert max(logged(done, "train/loss")) == 4


def test_a_resumed_run_says_which_lines_its_log_has_lost(tiny, tmp_path):
    done, out = run(tiny({"trainer.max_steps": 4}), tmp_path / "run"), Console(record=True, width=300)
    for lines, word in ((done.metrics.read_text(), None), ("", "between step 0 and 4")):
        done.metrics.write_text(lines)
        pretrain(tiny({"trainer.max_steps": 4}), done, resume=True, console=out)
        said = out.export_text()
        assert ("lines were lost" in said) == (word is not None)
        assert word is None or word in said


@pytest.mark.parametrize("content", ["null", "[]", "{}"])
def test_a_resumed_run_refuses_a_tokenizer_that_was_replaced(tiny, tmp_path, write_documents, content):
    fields = {"data.path": str(write_documents(tmp_path / "text")), "data.cache_dir": str(tmp_path / "cache")}
    fields |= {"model.vocab_size": 280, "trainer.max_steps": 2, "data.val_fraction": 0.2}
    done = run(tiny(fields), tmp_path / "run")
    done.tokenizer.write_text(content)
    with pytest.raises(RunError, match="not the tokenizer that this run reads data with"):
        run(tiny(fields | {"trainer.max_steps": 4}), done.path, resume=True)
    done.tokenizer.unlink()
    os.mkfifo(done.tokenizer)
    with pytest.raises(RunError, match="is a pipe, not a file"):
        run(tiny(fields | {"trainer.max_steps": 4}), done.path, resume=True)


def test_a_resumed_run_takes_its_optimizer_settings_from_the_config(tiny, tmp_path):
    """At learning rate 0 nothing moves, whatever the checkpoint's optimizer says."""
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    run(tiny({"trainer.max_steps": 4, "optim.lr": 0.0}), done.path, resume=True)
    before, after = weights(done, 2), weights(done, 4)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert logged(done, "train/lr")[3] == 0


def test_a_run_that_died_before_its_first_checkpoint_starts_again_from_birth(tiny, tmp_path):
    done = run(tiny(), tmp_path / "run")
    losses = logged(done, "train/loss")
    for kind in ("checkpoints", "snapshots"):
        shutil.rmtree(done.path / kind)
        for left in (".step-00000002.abcd", ".step-00000002.abcd.part", ".step-00000001.abcd.deleted"):
            (done.path / kind / left).mkdir(parents=True)
            (done.path / kind / left / "tensors.safetensors").write_text("half")
    assert done.checkpoints() == []
    run(tiny(), done.path, resume=True)
    assert logged(done, "train/loss") == losses
    assert not list(done.path.rglob(".step-*"))
    assert [r["step"] for r in read_metrics(done.metrics) if "val/loss" in r] == [0, 2, 4, 6]


def test_going_on_from_an_earlier_checkpoint_leaves_nothing_of_the_steps_after_it(tiny, tmp_path, monkeypatch):
    done = run(tiny({"trainer.max_steps": 4}), tmp_path / "run")
    # A copy under another name is no checkpoint of the run: it neither counts nor goes.
    kept = done.checkpoint(4).rename(done.path / "checkpoints" / "step-00000004.bak")
    # So that the table is as the start leaves it.
    monkeypatch.setattr("birthmark.trainer.run.write_metrics_csv", lambda _: None)
    run(tiny({"trainer.max_steps": 3, "optim.lr": 0.002}), done.path, resume=True)
    assert sorted(folder.name for folder in (done.path / "snapshots").iterdir()) == [
        "step-00000000", "step-00000002", "step-00000003",
    ]  # fmt: skip
    assert list(logged(done, "bias/alignment")) == [snapshot.step for snapshot in done.snapshots()] == [0, 2, 3]
    with done.metrics_csv.open(newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [0, 1, 2]
    assert kept.is_dir()
    assert list(done.checkpoints_by_step()) == [2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"snapshot.metrics": ["nowhere_at_all:Metric"]}, "nowhere_at_all"),
        ({"optim.name": "soap"}, "needs pytorch-optimizer"),
    ],
)
def test_what_is_refused_is_refused_before_the_birth(wrong, message, tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer.optimizer.soap", None)
    short = {"trainer.max_steps": 1, "snapshot.n_sequences": 2}
    with pytest.raises(UsageError, match=message):
        run(tiny(short | wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(tiny(short), tmp_path / "run").checkpoint(1).is_dir()


def test_a_certificate_that_does_not_match_is_refused(tiny, tmp_path):
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    record = done.read_birth()
    write_sealed_json(done.birth, {**record, "digest": "0" * 64})
    with pytest.raises(RunError, match=r"birth\.json: init_seed 3 now gives"):
        run(tiny({"trainer.max_steps": 4}), done.path, resume=True)
