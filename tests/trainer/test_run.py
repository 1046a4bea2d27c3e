"""Whole runs, in process, against a training loop written out by hand."""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock
from rich.console import Console

from birthmark.callbacks.stop import StopOnSignal
from birthmark.data.batch_ramp import BatchRamp
from birthmark.data.config import DataConfig, SourceConfig
from birthmark.data.mixing.config import WeightChange
from birthmark.data.prepare import prepare
from birthmark.errors import RunError, UsageError
from birthmark.files import write_sealed_json
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.measure.records import RunDir, Snapshot, read_metrics
from birthmark.metrics.quantities import LOGGED
from birthmark.models.birth import born, digest
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.config import RunConfig, TrainerConfig
from birthmark.trainer.config_file import read_config
from birthmark.trainer.loop.step_guard import StepGuard
from birthmark.trainer.lr_schedule import LearningRate
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.optimizers.table import OPTIMIZERS
from birthmark.trainer.processes.launched_process import LaunchedProcess
from birthmark.trainer.run import _device, _print_start, pretrain
from birthmark.trainer.run_folder import RunStart


def run(config, path, **more):
    return pretrain(config, RunDir(path), console=Console(quiet=True), **more).run


def logged(run, key):
    return {r["step"]: r[key] for r in read_metrics(run.metrics) if key in r}


def weights(run, step):
    return FolderCheckpointIO().load_checkpoint(run.checkpoint(step))["state_dict"]


def test_a_run_is_the_plain_loop_that_one_would_write_by_hand(tiny, tmp_path):
    config = tiny()
    done = run(config, tmp_path / "run")

    model = born(config.model, config.init_seed)
    source = prepare(config.data, vocab_size=24, seq_len=12).train
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    losses, norms = {}, {}
    for step in range(6):
        progress = (step - 2) / 3
        share = (step + 1) / 2 if step < 2 else 0.1 + 0.45 * (1 + np.cos(np.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * share
        optimizer.zero_grad()
        total = 0.0
        for micro in range(2):
            batch = torch.from_numpy(source.batch(step * 4 + micro * 2, 2))
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.item()
        norms[step + 1] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        optimizer.step()
        losses[step + 1] = total

    assert logged(done, "train/loss") == pytest.approx(losses, rel=1e-6)
    assert logged(done, "train/grad_norm") == pytest.approx(norms, rel=1e-5)
    after = weights(done, 6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(after[f"model.{name}"], parameter.data, atol=1e-6, rtol=1e-5)


def test_a_z_loss_is_trained_on_and_has_a_curve_of_its_own(tiny, tmp_path):
    fields = {"trainer.max_steps": 1, "snapshot.enabled": False, "trainer.micro_batch_size": 2}
    plain = run(tiny(fields), tmp_path / "plain")
    with_it = run(tiny(fields | {"optim.z_loss": 0.5}), tmp_path / "with")
    assert logged(plain, "train/z_loss") == {}
    (z_loss,) = logged(with_it, "train/z_loss").values()
    # Of a newborn model logits are small beside log V, of which the log-sum-exp then is little more.
    vocab_size = tiny().model.vocab_size
    assert 0.5 * math.log(vocab_size) ** 2 < z_loss < 0.5 * (math.log(vocab_size) + 1) ** 2
    assert logged(with_it, "train/loss") == pytest.approx(logged(plain, "train/loss"), rel=1e-6)
    assert logged(with_it, "train/grad_norm") != pytest.approx(logged(plain, "train/grad_norm"), rel=1e-2)


def test_snapshots_leave_training_bit_for_bit_alone(tiny, tmp_path):
    torch.manual_seed(0)
    with_them = run(tiny({"snapshot.gradients": True, "snapshot.probes": ["random", "text"]}), tmp_path / "with")
    state_with = torch.get_rng_state()
    torch.manual_seed(0)
    without = run(tiny({"snapshot.enabled": False}), tmp_path / "without")
    assert torch.equal(state_with, torch.get_rng_state())
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        assert logged(with_them, key) == logged(without, key)
    a, b = (FolderCheckpointIO().load_checkpoint(r.checkpoint(6)) for r in (with_them, without))
    assert all(torch.equal(a["state_dict"][k], b["state_dict"][k]) for k in a["state_dict"])
    assert not (without.path / "snapshots").exists()
    # The gradient is that of the text, where there is one.
    last = with_them.snapshots()[-1]
    assert "gradient_sink" in last.summary["bias_text"]
    assert "gradient_sink" not in last.bias
    assert last.arrays["text.gradient_value"].shape == (2, 2, 8)


@pytest.mark.parametrize("stop_at", [2, 4])
def test_k_steps_and_the_rest_are_all_steps_bit_for_bit(tiny, tmp_path, stop_at):
    whole = run(tiny(), tmp_path / "whole")
    for step in (2, 4, 6):
        folder = tmp_path / "parts" / "checkpoints" / f"step-{step:08d}"
        if step <= stop_at:
            folder.mkdir(parents=True)
            for file in whole.checkpoint(step).iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
    parts = RunDir(tmp_path / "parts")
    for file in (whole.config, whole.birth, whole.metrics):
        (parts.path / file.name).write_bytes(file.read_bytes())
    run(tiny(), parts.path, resume=True)
    a, b = (FolderCheckpointIO().load_checkpoint(r.checkpoint(6)) for r in (whole, parts))
    assert all(torch.equal(a["state_dict"][k], b["state_dict"][k]) for k in a["state_dict"])
    moments = [c["optimizer_states"][0]["state"] for c in (a, b)]
    assert all(torch.equal(moments[0][i][k], moments[1][i][k]) for i in moments[0] for k in moments[0][i])
    for key in ("train/loss", "train/lr", "val/loss", "bias/alignment", "bias/rank_persistence"):
        assert logged(parts, key) == logged(whole, key)
    assert [r["step"] for r in read_metrics(parts.metrics)] == sorted(r["step"] for r in read_metrics(parts.metrics))


def tensors(tree):
    """Tensors of a tree of dictionaries and lists, in its order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors(child)]


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_goes_on_bit_for_bit(name, tiny, tmp_path):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    fields = {"optim.name": name, "trainer.max_steps": 4, "trainer.checkpoint_every": 2, "snapshot.enabled": False}
    whole = run(tiny(fields), tmp_path / "whole")
    parts = RunDir(tmp_path / "parts")
    shutil.copytree(whole.path, parts.path)
    shutil.rmtree(parts.checkpoint(4))
    run(tiny(fields), parts.path, resume=True)
    a, b = (FolderCheckpointIO().load_checkpoint(r.checkpoint(4)) for r in (whole, parts))
    for part in ("state_dict", "optimizer_states"):
        pairs = list(zip(tensors(a[part]), tensors(b[part]), strict=True))
        assert pairs
        assert all(torch.equal(x, y) for x, y in pairs)
    assert logged(parts, "train/loss") == logged(whole, "train/loss")


RAMP = {
    "trainer.global_batch_size": 8,
    "trainer.micro_batch_size": 3,
    "trainer.batch_ramp": BatchRamp(start=2, increment=3, sequences=11),
    "trainer.checkpoint_every": 1,
    "trainer.log_every": 1,
    "snapshot.enabled": False,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
    "optim.warmup_tokens": 150,
}


def test_a_batch_that_grows_is_a_loop_over_slices_of_the_samples(tiny, tmp_path):
    """Steps of 2, 2, 2, 5, 8 and 8 sequences in micro-batches of at most 3, against whole batches by hand."""
    config = tiny(RAMP)
    whole = run(config, tmp_path / "whole")
    source = prepare(config.data, vocab_size=config.model.vocab_size, seq_len=config.model.max_seq_len).train
    model, expected, tokens, first = born(config.model, 3), {}, {}, 0
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.optim.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(config.optim.beta1, config.optim.beta2),
    )
    for step, size in enumerate((2, 2, 2, 5, 8, 8), 1):
        batch, first = torch.from_numpy(source.batch(first, size)), first + size
        tokens[step] = first * config.model.max_seq_len
        for group in optimizer.param_groups:
            group["lr"] = config.optim.lr * min(1.0, tokens[step] / 150)
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        expected[step] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        optimizer.step()
    assert logged(whole, "train/loss") == pytest.approx(expected, rel=1e-6)
    assert logged(whole, "train/tokens") == tokens
    # From any step on, to the bit.
    parts = RunDir(tmp_path / "parts")
    shutil.copytree(whole.path, parts.path)
    for step in range(5, 1, -1):
        shutil.rmtree(parts.checkpoint(step + 1))
        run(config, parts.path, resume=True)
        for key in ("train/loss", "train/tokens", "train/lr"):
            assert logged(parts, key) == logged(whole, key)
        for later in range(step + 1, 6):
            shutil.rmtree(parts.checkpoint(later + 1))


def test_a_run_leaves_its_records(tiny, tmp_path):
    config = tiny({"snapshot.probes": ["random", "text"]})
    done = run(config, tmp_path / "run")
    assert yaml.safe_load(done.config.read_text()) == asdict(config)
    birth = json.loads(done.birth.read_text())
    assert birth["digest"] == digest(born(config.model, 3))
    assert (birth["init_seed"], birth["data_seed"], birth["probe_seed"]) == (3, 5, 0)
    assert birth["data"]["path"] == "backcopy"
    assert [s.step for s in done.snapshots()] == [0, 2, 4, 6]
    assert [c.name for c in done.checkpoints()] == ["step-00000002", "step-00000004", "step-00000006"]
    keys = set().union(*map(set, read_metrics(done.metrics)))
    assert keys >= {
        *("train/loss", "train/lr", "train/grad_norm", "train/tokens", "train/tokens_per_s", "train/flops_per_s"),
        *("val/loss", "val/loss_trigger", "bias/alignment", "bias/preference_ratio", "bias/rank_persistence"),
        *("train/step_p50_s", "train/step_p99_s", "train/data_wait", "train/peak_memory", "train/validation_s"),
        *("train/snapshot_s", "train/checkpoint_s"),
        *("bias/sink_mass", "bias/alignment_stranger", "bias/rank_persistence_stranger", "bias_text/sink_mass"),
    }
    assert logged(done, "train/tokens") == {step: step * 4 * 12 for step in range(1, 7)}
    assert list(logged(done, "train/snapshot_s")) == [0, 2, 4, 6]
    assert list(logged(done, "train/checkpoint_s")) == [2, 4, 6]
    assert not logged(done, "train/slowest_rank")
    assert all(0 <= share < 1 for share in logged(done, "train/data_wait").values())
    assert keys <= {*LOGGED, "step"} | {key for key in keys if key.startswith("bias")}


def test_validation_is_the_mean_over_the_first_windows(tiny, tmp_path):
    config = tiny()
    done = run(config, tmp_path / "run")
    data = prepare(config.data, vocab_size=24, seq_len=12)
    batch = torch.from_numpy(data.val.batch(0, 6))
    log_p = born(config.model, 3)(batch[:, :-1]).double().log_softmax(-1)
    losses = -log_p.gather(-1, batch[:, 1:, None])[..., 0]
    assert logged(done, "val/loss")[0] == pytest.approx(losses.mean().item(), rel=1e-6)
    triggers = (batch[:, :-1] >= 1) & (batch[:, :-1] <= 3)
    assert logged(done, "val/loss_trigger")[0] == pytest.approx(losses[triggers].mean().item(), rel=1e-6)


def test_nothing_is_saved_of_weights_whose_validation_loss_is_not_finite(tiny, tmp_path, monkeypatch):
    passes = iter(range(10**6))
    # Three passes over six sequences a validation: that of step 4 is the third, after birth and step 2.
    monkeypatch.setattr(
        "birthmark.trainer.run_callbacks.next_token_losses",
        lambda model, batch_BT, borders: batch_BT[:, 1:] * (math.inf if next(passes) >= 6 else 1.0),
    )
    with pytest.raises(RunError, match=r"val/loss is inf after step 4, though all weights are finite"):
        run(tiny({"snapshot.enabled": False}), tmp_path / "run")
    assert [folder.name for folder in RunDir(tmp_path / "run").checkpoints()] == ["step-00000002"]


def test_a_run_without_a_position_of_a_group_goes_on(tiny, tmp_path):
    # After BOS and an ordinary token there is no input left that could be a trigger.
    short = {"snapshot.enabled": False, "model.max_seq_len": 2}
    done = run(tiny(short), tmp_path / "run")
    assert set(logged(done, "val/loss_trigger").values()) == {None}
    assert all(map(math.isfinite, logged(done, "val/loss").values()))


@pytest.fixture
def mixed(tiny, tmp_path):
    """A run on two sources, of which the second has a third of the weight of the first."""
    for name, text in (("prose", "the seed decides "), ("code", "def f ( x ) : ")):
        (tmp_path / name).mkdir()
        for i in range(6):
            (tmp_path / name / f"{i}.txt").write_text(text * 30)
    sources = [SourceConfig(str(tmp_path / name), weight) for name, weight in (("prose", 3.0), ("code", 1.0))]
    data = DataConfig(sources=sources, val_fraction=0.3, cache_dir=str(tmp_path / "cache"))
    return replace(tiny({"model.vocab_size": 280, "snapshot.enabled": False}), data=data)


def test_every_source_has_its_share_and_its_own_validation_loss(mixed, tmp_path):
    said = io.StringIO()
    done = pretrain(mixed, RunDir(tmp_path / "run"), console=Console(file=said, width=200)).run
    assert "sources: prose 75.0% (" in said.getvalue()
    assert "weights add up to 4, and each is taken relative to that" in said.getvalue()
    whole, prose, code = (logged(done, f"val/loss{name}") for name in ("", "/prose", "/code"))
    assert whole[6] == pytest.approx(0.75 * prose[6] + 0.25 * code[6])
    data = prepare(mixed.data, vocab_size=280, seq_len=12)
    batch = torch.from_numpy(data.val.batch(0, 6)[1::2])
    log_p = born(read_config(done.config).model, 3)(batch[:, :-1]).double().log_softmax(-1)
    assert code[0] == pytest.approx(-log_p.gather(-1, batch[:, 1:, None]).mean().item(), rel=1e-6)
    tokens = [logged(done, f"train/tokens{name}")[6] for name in ("", "/prose", "/code")]
    assert tokens == [6 * 4 * 12, 0.75 * 6 * 4 * 12, 0.25 * 6 * 4 * 12]


def test_shares_change_at_their_step(mixed, tmp_path):
    schedule = [WeightChange(3, {"code": 1.0})]
    changed = replace(mixed, data=replace(mixed.data, schedule=schedule), trainer=replace(mixed.trainer, log_every=3))
    said = io.StringIO()
    done = pretrain(changed, RunDir(tmp_path / "run"), console=Console(file=said, width=200)).run
    assert "; from step 3 on code 100.0%" in said.getvalue()
    assert read_config(done.config).data == changed.data
    # Twelve samples of twelve tokens in three steps.
    assert logged(done, "train/tokens/prose") == {3: 9 * 12, 6: 9 * 12}
    assert logged(done, "train/tokens/code") == {3: 3 * 12, 6: 15 * 12}
    with pytest.raises(UsageError, match=r"^data\.schedule\[0\]\.step is 3, where the run is over"):
        replace(changed, trainer=replace(changed.trainer, max_steps=3))


def test_a_run_that_would_read_a_source_too_often_does_not_start(mixed, tmp_path):
    often = replace(mixed, data=replace(mixed.data, epochs=0.01))
    with pytest.raises(UsageError, match=r"data\.epochs is 0\.01, but the run would read prose"):
        run(often, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match=r"trainer\.val_sequences is 1, fewer than the 2 of data\.sources"):
        replace(mixed, trainer=replace(mixed.trainer, val_sequences=1))


def test_birth_is_the_measure_and_strangers_are_the_control(tiny, tmp_path):
    done = run(tiny(), tmp_path / "run")
    birth = Snapshot.read(done.snapshot(0))
    assert birth.bias["drift"] == pytest.approx(1)
    assert birth.bias["rank_persistence"] == pytest.approx(1)
    assert abs(birth.bias["rank_persistence_stranger"]) < 0.9
    assert birth.arrays["stranger_mean_prob"].shape == (2, 24)
    # The strangers are births of their own seeds.
    other = run(tiny({"init_seed": 4, "snapshot.n_strangers": 0}), tmp_path / "other")
    strange = Snapshot.read(other.snapshot(0))
    np.testing.assert_allclose(birth.arrays["stranger_mean_prob"][0], strange.arrays["mean_prob"], rtol=1e-12)
    np.testing.assert_allclose(birth.arrays["stranger_direction"][0], strange.arrays["mean_direction"], rtol=1e-9)
    assert "alignment_stranger" not in strange.bias
    again = run(tiny({"data.data_seed": 99}), tmp_path / "again")
    favourites = [t["id"] for t in birth.summary["top_tokens"]]
    assert [t["id"] for t in Snapshot.read(again.snapshot(0)).summary["top_tokens"]] == favourites
    assert [t["id"] for t in strange.summary["top_tokens"]] != favourites


def test_resuming_without_a_birth_snapshot_measures_birth_again(tiny, tmp_path):
    whole = run(tiny(), tmp_path / "whole")
    for folder in (whole.snapshot(0), whole.snapshot(6), whole.checkpoint(6)):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    before = logged(whole, "bias/alignment")[6]
    run(tiny(), whole.path, resume=True)
    assert logged(whole, "bias/alignment")[6] == pytest.approx(before, rel=1e-12)


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
        (done.path / kind / ".step-00000002.abcd").mkdir(parents=True)
    run(tiny(), done.path, resume=True)
    assert logged(done, "train/loss") == losses
    assert not list(done.path.rglob(".step-*"))
    assert [r["step"] for r in read_metrics(done.metrics) if "val/loss" in r] == [0, 2, 4, 6]


@pytest.fixture
def small_corpus(tiny, tmp_path):
    """``small_corpus(overrides)``: a run that asks for more tokens than its text can give."""
    text = tmp_path / "notes.txt"
    text.write_text("".join(f"note {n}: the cat sat on mat {n % 7}, the hat sat on cat {n % 5}.\n" for n in range(200)))
    fields = {
        "data.path": str(text),
        "data.val_fraction": 0.2,
        "data.cache_dir": str(tmp_path / "cache"),
        "model.vocab_size": 4096,
        "trainer.max_steps": 2,
    }
    return lambda more: tiny(fields | more)


def test_a_small_corpus_shrinks_the_vocabulary_and_the_run_records_it(small_corpus, tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    done = pretrain(small_corpus({}), RunDir(tmp_path / "run"), console=console).run
    birth, stored = done.read_birth(), read_config(done.config)
    reached = stored.model.vocab_size
    assert 257 < reached < 1000
    assert birth["vocab_size_asked"] == 4096
    assert birth["model"]["vocab_size"] == birth["data"]["vocab_size"] == reached
    assert f"gives {reached} BPE tokens, not model.vocab_size 4,096" in console.export_text()
    # The command that began it goes on with it, and so does its own config.
    run(small_corpus({"trainer.max_steps": 4}), done.path, resume=True)
    run(
        replace(read_config(done.config), trainer=small_corpus({"trainer.max_steps": 6}).trainer),
        done.path,
        resume=True,
    )
    assert list(logged(done, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert read_config(done.config).model.vocab_size == reached
    with pytest.raises(UsageError, match="a resumed run keeps its model"):
        run(small_corpus({"model.vocab_size": 5000}), done.path, resume=True)
    # As many as the corpus gives: the same birth, and nothing to say.
    same = run(small_corpus({"model.vocab_size": reached}), tmp_path / "same")
    assert same.read_birth()["digest"] == birth["digest"]
    assert "vocab_size_asked" not in same.read_birth()


def test_a_certificate_that_does_not_match_is_refused(tiny, tmp_path):
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    record = done.read_birth()
    write_sealed_json(done.birth, {**record, "digest": "0" * 64})
    with pytest.raises(RunError, match=r"birth\.json: init_seed 3 now gives"):
        run(tiny({"trainer.max_steps": 4}), done.path, resume=True)


def test_a_damaged_checkpoint_is_named_and_kept(tiny, tmp_path):
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    file = done.checkpoint(2) / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"step-00000002/tensors\.safetensors: damaged"):
        run(tiny({"trainer.max_steps": 4}), done.path, resume=True)
    assert file.exists()


@pytest.mark.parametrize("most", [0, 10])
def test_a_loss_that_is_not_a_number_ends_the_run_and_spares_the_checkpoints(tiny, tmp_path, most):
    fields = {"optim.lr": 1e30, "optim.grad_clip": 0.0, "trainer.max_steps": 40, "trainer.max_skipped": most}
    with pytest.raises(RunError, match=r"((loss|gradient norm) is (nan|inf) at step \d|whose square).*optim\.lr"):
        run(tiny(fields), tmp_path / "run")
    done = RunDir(tmp_path / "run")
    for folder in done.checkpoints():
        state = FolderCheckpointIO().load_checkpoint(folder)["state_dict"]
        assert all(value.isfinite().all() for value in state.values()), folder
    assert all(np.isfinite(s.arrays["mean_prob"]).all() for s in done.snapshots())


def asynchronously(monkeypatch):
    """As on a device that nobody waits for at every step."""
    see, hold = PretrainModule.see_gradient_norm, StepGuard.hold

    def see_in_time(self, norm):
        with monkeypatch.context() as patch:
            patch.setattr(PretrainModule, "device", SimpleNamespace(type="accelerator"))
            see(self, norm)

    monkeypatch.setattr(PretrainModule, "see_gradient_norm", see_in_time)
    monkeypatch.setattr(StepGuard, "hold", lambda *args, wait: hold(*args, wait=False))


def poison_losses(monkeypatch, *steps):
    """The loss of these steps' second micro-batch is NaN, but for the buffers that its pass moves."""
    training_step = PretrainModule.training_step

    def poisoned(self, batch, index):
        step, loss = self.global_step + 1, self._loss
        if step in steps and index % 2:
            self._loss = lambda *inputs: spoilt(loss(*inputs))
        try:
            return training_step(self, batch, index)
        finally:
            self._loss = loss

    def spoilt(losses):
        return losses._replace(objective=losses.objective * math.nan)

    monkeypatch.setattr(PretrainModule, "training_step", poisoned)


def poisoned_loss(monkeypatch):
    """The loss of step 5 is NaN, on a device that nobody waits for at every step."""
    asynchronously(monkeypatch)
    poison_losses(monkeypatch, 5)
    return r"loss is nan at step 5 \(.*optim\.lr"


def poisoned_weight(monkeypatch):
    """A weight is infinite after the update of step 6, of which no loss tells before step 7."""
    step, taken = torch.optim.AdamW.step, []

    def spoil_at_6(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        taken.append(None)
        if len(taken) == 6:
            self.param_groups[0]["params"][0].data[0, 0] = math.inf
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil_at_6)
    return r"embed\.weight is not finite after step 6"


@pytest.mark.parametrize("poison", [poisoned_loss, poisoned_weight])
def test_what_is_not_finite_between_two_lines_of_the_log_is_never_saved(tiny, tmp_path, monkeypatch, poison):
    message = poison(monkeypatch)
    fields = {
        **{"trainer.log_every": 100, "trainer.checkpoint_every": 3, "trainer.keep_last": 1, "trainer.max_steps": 20},
        "trainer.max_skipped": 0,
    }
    with pytest.raises(RunError, match=message):
        run(tiny({**fields, "snapshot.enabled": False}), tmp_path / "run")
    (kept,) = RunDir(tmp_path / "run").checkpoints()
    assert kept.name == "step-00000003"
    state = FolderCheckpointIO().load_checkpoint(kept)["state_dict"]
    assert all(value.isfinite().all() for value in state.values())


ESTIMATED = {
    "model.attention.aggregation": "calibrated",
    "model.attention.calibration.correlation": "estimated",
}


@pytest.mark.parametrize(("optimizer", "way"), [("adamw", "waits"), *((name, "asynchronous") for name in OPTIMIZERS)])
def test_a_skipped_step_moves_nothing_but_the_data_and_the_schedule(tiny, tmp_path, monkeypatch, optimizer, way):
    """Against checkpoints around it; and a run that goes on from before or after it is the one that had no pause."""
    fields = {"optim.name": optimizer, "trainer.checkpoint_every": 1, "snapshot.enabled": False, **ESTIMATED}
    if optimizer == "soap":
        pytest.importorskip("pytorch_optimizer")
    if way == "asynchronous":
        asynchronously(monkeypatch)
    poison_losses(monkeypatch, 1, 4)
    done = run(tiny(fields), tmp_path / "run")
    states = {step: FolderCheckpointIO().load_checkpoint(done.checkpoint(step)) for step in range(1, 7)}

    def moved(a, b):
        ours, theirs = (s["state_dict"] | flat(s["optimizer_states"][0]["state"]) for s in (states[a], states[b]))
        assert ours.keys() == theirs.keys()
        return {name for name in ours if not torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(theirs[name]))}

    def flat(tree, path=()):
        if not isinstance(tree, (dict, list)):
            return {path: tree}
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, value in pairs for name, leaf in flat(value, (*path, key)).items()}

    assert any("n_batches" in name for name in states[3]["state_dict"])
    assert not states[1]["optimizer_states"][0]["state"]
    assert not moved(3, 4)
    groups = [[{**g, "lr": 0} for g in states[step]["optimizer_states"][0]["param_groups"]] for step in (3, 4)]
    assert groups[0] == groups[1]
    assert len(moved(4, 5)) >= len(states[4]["state_dict"])
    assert logged(done, "train/skipped_steps") == {1: 1, 2: 1, 3: 1, 4: 2, 5: 2, 6: 2}
    assert [step for step, loss in logged(done, "train/loss").items() if loss is None or math.isnan(loss)] == [1, 4]
    config = tiny(fields).optim
    assert logged(done, "train/lr") == {
        step: config.lr * LearningRate(config, 6, lambda step: step).share(step - 1) for step in range(1, 7)
    }
    for step in (4, 5, 6):
        shutil.rmtree(done.checkpoint(step))
    run(tiny(fields), done.path, resume=True)
    again = FolderCheckpointIO().load_checkpoint(done.checkpoint(6))
    assert all(torch.equal(again["state_dict"][k], v) for k, v in states[6]["state_dict"].items())
    assert logged(done, "train/skipped_steps")[6] == 2


def test_more_skipped_steps_than_allowed_end_the_run_with_one_line(tiny, tmp_path, monkeypatch):
    poison_losses(monkeypatch, 2, 3, 5)
    with pytest.raises(
        RunError, match=r"^3 steps were skipped, and trainer\.max_skipped is 2; the first: loss is nan at"
    ):
        run(tiny({"trainer.max_skipped": 2, "snapshot.enabled": False}), tmp_path / "run")
    assert [c.name for c in RunDir(tmp_path / "run").checkpoints()] == ["step-00000002", "step-00000004"]


def test_the_rate_counts_what_an_asynchronous_device_still_has_to_compute(tiny, tmp_path, monkeypatch):
    """A stand-in that takes 100 ms for each micro-batch, and returns from the call at once."""
    train, seconds, waits = PretrainModule.training_step, 0.1, []
    with ThreadPoolExecutor(1) as device:

        def queue(self, batch, index):
            device.submit(time.sleep, seconds)
            return train(self, batch, index)

        def wait(_):
            waits.append(device.submit(int).result())

        monkeypatch.setattr(PretrainModule, "training_step", queue)
        monkeypatch.setattr("birthmark.trainer.run_callbacks.synchronize", wait)
        fields = {"trainer.log_every": 2, "trainer.checkpoint_every": 3, "trainer.max_steps": 6}
        done = run(tiny({**fields, "snapshot.enabled": False}), tmp_path / "run")
    rates = logged(done, "train/tokens_per_s")
    assert list(rates) == [2, 4, 6]
    assert all(rate <= 4 * 12 / (2 * seconds) for rate in rates.values())
    # Only at the end of every second step is it known how long the device takes.
    for step in rates:
        both = 2 * logged(done, "train/step_p50_s")[step]
        assert both == pytest.approx(2 * 4 * 12 / rates[step], rel=0.2)
    assert len(waits) == 4  # steps 2, 3, 4 and 6: no other step waits


def test_two_processes_cannot_write_one_run(tiny, tmp_path, python):
    done = run(tiny({"trainer.max_steps": 2}), tmp_path / "run")
    command = [python, "-m", "birthmark.launch.cli", "pretrain", f"--resume={done.path}"]
    with FileLock(done.path / ".lock"):
        second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert second.returncode == 2
    assert "another process is writing this run" in second.stderr


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_end_with_a_checkpoint_and_the_run_goes_on_as_if_nothing_had_been(tiny, tmp_path, first, python):
    long = {"trainer.max_steps": 100000, "trainer.checkpoint_every": 100000, "optim.schedule": "constant"}
    config = tiny(long)
    file = tmp_path / "config.yaml"
    stored = {k: v for k, v in asdict(config).items() if k not in ("name", "run_dir")}
    file.write_text(yaml.safe_dump(stored))
    parts = RunDir(tmp_path / "parts")
    command = [python, "-m", "birthmark.launch.cli", "pretrain"]
    process = subprocess.Popen(
        [*command, "--config", str(file), "--run_dir", str(parts.path)], stdout=subprocess.PIPE, text=True
    )
    while process.poll() is None and len(read_metrics(parts.metrics)) < 20:
        time.sleep(0.02)
    # Launchers send SIGTERM after their own signal: DeepSpeed's a moment after a Ctrl-C, torchrun after SLURM's.
    process.send_signal(first)
    for _ in range(3):
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert f"stopped by {first.name}" in printed
    assert "--resume" in printed
    (stopped,) = parts.checkpoints()
    step = int(stopped.name[5:])
    assert 0 < step < 100000
    assert parts.report.is_file()
    assert parts.snapshot(step).is_dir()
    end = step + 15
    config = tiny({**long, "trainer.max_steps": end})
    run(config, parts.path, resume=True)
    whole = run(config, tmp_path / "whole")
    assert logged(parts, "train/loss") == logged(whole, "train/loss")
    assert len(logged(whole, "train/loss")) == end
    a, b = weights(parts, end), weights(whole, end)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_stop_saves_before_it_measures(tiny, tmp_path, monkeypatch):
    whole, parts = RunDir(tmp_path / "whole"), RunDir(tmp_path / "parts")
    step, take, there = PretrainModule.training_step, SnapshotRecorder.take, {}

    def signalled(self, batch, index):
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, batch, index)

    def seen(self, model, step):
        there[step] = RunDir(self.run.path).checkpoint(step).is_dir()
        return take(self, model, step)

    monkeypatch.setattr(SnapshotRecorder, "take", seen)
    run(tiny(), whole.path)
    assert there == {0: False, 2: False, 4: False, 6: False}
    monkeypatch.setattr(PretrainModule, "training_step", signalled)
    before = signal.getsignal(signal.SIGUSR1)
    outcome = pretrain(tiny(), parts, console=Console(quiet=True))
    assert (outcome.stopped_by, outcome.step) == ("SIGUSR1", 3)
    assert there[3]
    assert [snapshot.step for snapshot in parts.snapshots()] == [0, 2, 3]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.heavy
def test_only_a_second_ctrl_c_after_a_pause_means_at_once():
    stop, before = StopOnSignal(), signal.getsignal(signal.SIGINT)
    with stop.listen():
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(2.1)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_bf16_trains_near_fp32_with_float32_weights(tiny, tmp_path):
    fp32, bf16 = (run(tiny({"trainer.precision": p}), tmp_path / p) for p in ("fp32", "bf16"))
    a, b = logged(fp32, "train/loss"), logged(bf16, "train/loss")
    assert a != b
    assert list(a.values()) == pytest.approx(list(b.values()), rel=0.02)
    assert {v.dtype for v in weights(bf16, 6).values()} == {torch.float32}
    assert bf16.snapshots()[0].summary["probe"]["dtype"] == "float32"
    assert bf16.snapshots()[0].bias == fp32.snapshots()[0].bias


def test_a_compiled_run_trains_alike_and_snapshots_do_not_recompile_it(tiny, tmp_path):
    eager = run(tiny(), tmp_path / "eager")
    torch._dynamo.utils.counters.clear()
    compiled = run(tiny({"trainer.compile": "step"}), tmp_path / "compiled")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1
    assert logged(compiled, "train/loss") == pytest.approx(logged(eager, "train/loss"), rel=1e-4)
    assert logged(compiled, "bias/alignment")[0] == logged(eager, "bias/alignment")[0]


def test_a_run_on_a_terminal_says_how_to_watch_it(tiny, tmp_path):
    start = RunStart(None, 0, {"n_params": 7, "digest": "0" * 64})
    said = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None)
        _print_start(console, tiny(), tiny(), RunDir(tmp_path / "a run"), start, torch.device("cpu"), resumed=False)
        said[terminal] = console.file.getvalue()
    assert f"watch it: birthmark report '{tmp_path}/a run' --watch\n" in said[True]
    assert "--watch" not in said[False]


def test_a_gpu_has_its_number_whoever_launched_the_run(monkeypatch):
    """A thread that makes it current needs one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for kind in ("cuda", "auto"):
        config = RunConfig(trainer=TrainerConfig(device=kind))
        assert _device(config, None) == torch.device("cuda", 3)
        assert _device(config, LaunchedProcess(1, 2, 1, 2)) == torch.device("cuda", 1)
