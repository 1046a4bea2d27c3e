"""Whole runs, in process, against a training loop written out by hand."""

import io
import itertools
import json
import math
import os
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from quiet_runs import adamw, logged, run, same_weights, up_to, weights
from rich.console import Console

from birthmark.data.batch_sizes import BatchRamp
from birthmark.data.prepare import prepare
from birthmark.errors import UsageError
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir, Snapshot
from birthmark.metrics.quantities import LOGGED
from birthmark.models.birth import born, digest
from birthmark.trainer.config import RunConfig, TrainerConfig
from birthmark.trainer.config_file import read_config
from birthmark.trainer.processes.launched_process import LaunchedProcess
from birthmark.trainer.run import _device, pretrain
from birthmark.trainer.run_folder import RunStart
from birthmark.trainer.start_messages import _stream_lines, print_start


def test_a_run_is_the_plain_loop_that_one_would_write_by_hand(tiny, tmp_path):
    config = tiny()
    done = run(config, tmp_path / "run")

    model = born(config.model, config.init_seed)
    source = prepare(config.data, vocab_size=24, seq_len=12).train
    optimizer = adamw(model)
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
    assert same_weights(with_them, without, 6)
    assert not (without.path / "snapshots").exists()
    # The gradient is that of the text, where there is one.
    last = with_them.snapshots()[-1]
    assert "gradient_sink" in last.summary["bias_text"]
    assert "gradient_sink" not in last.bias
    assert last.arrays["text.gradient_value"].shape == (2, 2, 8)


def test_a_batch_that_grows_is_a_loop_over_slices_of_the_samples(tiny, tmp_path):
    """Steps of 2, 2, 2, 5, 8 and 8 sequences in micro-batches of at most 3, against whole batches by hand."""
    sizes = {"global_batch_size": 8, "micro_batch_size": 3, "batch_ramp": BatchRamp(2, 3, 11), "checkpoint_every": 1}
    rate = {"optim.schedule": "constant", "optim.warmup_steps": 0, "optim.warmup_tokens": 150}
    config = tiny({f"trainer.{name}": n for name, n in sizes.items()} | rate | {"snapshot.enabled": False})
    whole = run(config, tmp_path / "whole")
    source = prepare(config.data, vocab_size=config.model.vocab_size, seq_len=config.model.max_seq_len).train
    model, expected, tokens, first = born(config.model, 3), {}, {}, 0
    optimizer = adamw(model)
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
    # To the bit from a step in each of the three sizes on.
    for step in (2, 4, 5):
        parts = run(config, up_to(step, whole, tmp_path / f"parts-{step}").path, resume=True)
        for key in ("train/loss", "train/tokens", "train/lr"):
            assert logged(parts, key) == logged(whole, key)


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


def test_snapshots_come_at_further_steps_that_the_config_asks_for(tiny, tmp_path):
    done = run(tiny({"snapshot.steps": [5], "snapshot.factor": 3.0, "trainer.log_every": 6}), tmp_path / "run")
    # Every second step has a checkpoint; 1 and 3 are powers of 3.
    steps = [0, 1, 2, 3, 4, 5, 6]
    assert [s.step for s in done.snapshots()] == steps
    assert list(logged(done, "val/loss")) == steps
    assert list(logged(done, "train/snapshot_s")) == steps
    assert [c.name for c in done.checkpoints()] == ["step-00000002", "step-00000004", "step-00000006"]


@pytest.mark.parametrize("factor", [1.01, 1.3, 2.0, 10.0])
def test_a_factor_asks_for_its_rounded_powers(factor):
    config = SnapshotConfig(factor=factor)
    powers = {round(power) for power in itertools.takewhile(lambda p: p < 5000, (factor**k for k in itertools.count()))}
    assert {step for step in range(5000) if config.asks(step)} == powers


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


def test_a_run_without_a_position_of_a_group_goes_on(tiny, tmp_path):
    # After BOS and an ordinary token there is no input left that could be a trigger.
    short = {"snapshot.enabled": False, "model.max_seq_len": 2}
    done = run(tiny(short), tmp_path / "run")
    assert set(logged(done, "val/loss_trigger").values()) == {None}
    assert all(map(math.isfinite, logged(done, "val/loss").values()))


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


@pytest.fixture(scope="module")
def small_corpus(tiny, tmp_path_factory):
    """``small_corpus(overrides)``: a run that asks for more tokens than its text can give."""
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "notes.txt"
    text.write_text("".join(f"note {n}: the cat sat on mat {n % 7}, the hat sat on cat {n % 5}.\n" for n in range(200)))
    fields = {
        "data.path": str(text),
        "data.val_fraction": 0.2,
        "data.cache_dir": str(folder / "cache"),
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
    longer = replace(stored, trainer=small_corpus({"trainer.max_steps": 6}).trainer)
    run(longer, done.path, resume=True)
    assert list(logged(done, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert read_config(done.config).model.vocab_size == reached
    with pytest.raises(UsageError, match="a resumed run keeps its model"):
        run(small_corpus({"model.vocab_size": 5000}), done.path, resume=True)
    # As many as the corpus gives: the same birth, and nothing to say.
    same = run(small_corpus({"model.vocab_size": reached}), tmp_path / "same")
    assert same.read_birth()["digest"] == birth["digest"]
    assert "vocab_size_asked" not in same.read_birth()


@pytest.mark.parametrize(("n_more", "is_said"), [(0, False), (30, True)])
def test_rows_that_the_tokenizer_has_no_token_for_are_said_at_the_start(
    small_corpus, tmp_path, word_tokenizer, n_more, is_said
):
    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    fields = {"data.tokenizer": str(tmp_path / "tokenizer.json"), "model.vocab_size": 270 + n_more}
    console = Console(record=True, width=200, file=io.StringIO())
    done = pretrain(small_corpus(fields), RunDir(tmp_path / "run"), console=console).run
    line = "vocabulary: the tokenizer has 270 tokens, the model 300 rows (model.vocab_size): text has no others"
    assert (line in console.export_text()) == is_said
    # definitions §2: uniform over the whole vocabulary.
    assert read_config(done.config).model.vocab_size == 270 + n_more


def test_a_text_probe_that_the_corpus_cannot_give_is_refused_before_the_birth(small_corpus, tmp_path):
    short = {"trainer.max_steps": 1, "snapshot.probes": ["random", "text"]}
    with pytest.raises(
        UsageError, match=r"^snapshot\.n_sequences, text probe: 4096 .*raise data\.val_fraction, or ask for fewer"
    ):
        run(small_corpus(short | {"snapshot.n_sequences": 4096}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert run(small_corpus(short | {"snapshot.n_sequences": 2}), tmp_path / "run").checkpoint(1).is_dir()


def test_text_is_measured_by_default_where_a_run_reads_text(small_corpus, tiny, tmp_path):
    def lines(config, name):
        console = Console(file=io.StringIO(), width=300)
        pretrain(config, run_dir := RunDir(tmp_path / name), console=console)
        return run_dir.snapshots()[-1].summary, console.file.getvalue()

    one_step = {"trainer.max_steps": 1, "trainer.checkpoint_every": 1}
    summary, said = lines(small_corpus(one_step | {"snapshot.n_sequences": 4}), "few")
    assert summary["probe_text"] == {"kind": "text", "n_sequences": 4, "seq_len": summary["probe"]["seq_len"]}
    assert "sequences of text" not in said
    # 32 at most, and those that validation has: said in a line.
    summary, said = lines(small_corpus(one_step | {"snapshot.n_sequences": 64, "data.val_fraction": 0.05}), "many")
    there = summary["probe_text"]["n_sequences"]
    assert 2 <= there < 32
    assert f"snapshots measure {there} sequences of text, not 32" in said
    # The backcopy task is no text; what is named is measured, and nothing else.
    assert "bias_text" not in lines(tiny(one_step), "backcopy")[0]
    assert "bias_text" not in lines(small_corpus(one_step | {"snapshot.probes": ["random"]}), "named")[0]


def test_bf16_trains_near_fp32_with_float32_weights(tiny, tmp_path):
    fp32, bf16 = (run(tiny({"trainer.precision": p}), tmp_path / p) for p in ("fp32", "bf16"))
    a, b = logged(fp32, "train/loss"), logged(bf16, "train/loss")
    assert a != b
    assert list(a.values()) == pytest.approx(list(b.values()), rel=0.02)
    assert {v.dtype for v in weights(bf16, 6).values()} == {torch.float32}
    assert bf16.snapshots()[0].summary["probe"]["dtype"] == "float32"
    assert bf16.snapshots()[0].bias == fp32.snapshots()[0].bias


def test_a_compiled_run_trains_alike_and_snapshots_do_not_recompile_it(tiny, tmp_path):
    fields = {"model.n_layers": 1, "trainer.max_steps": 4, "snapshot.n_strangers": 0}
    eager = run(tiny(fields), tmp_path / "eager")
    torch._dynamo.utils.counters.clear()
    compiled = run(tiny(fields | {"trainer.compile": "step"}), tmp_path / "compiled")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 1
    assert logged(compiled, "train/loss") == pytest.approx(logged(eager, "train/loss"), rel=1e-4)
    assert logged(compiled, "bias/alignment")[0] == logged(eager, "bias/alignment")[0]


def test_a_run_on_a_terminal_says_how_to_watch_it(tiny, tmp_path):
    start = RunStart(None, 0, {"n_params": 7, "digest": "0" * 64})
    said = {}
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None)
        print_start(console, tiny(), tiny(), RunDir(tmp_path / "a run"), start, torch.device("cpu"), resumed=False)
        said[terminal] = console.file.getvalue()
    assert f"watch it: birthmark report '{tmp_path}/a run' --watch\n" in said[True]
    assert "--watch" not in said[False]


def test_a_start_counts_one_step_file_and_stream(tiny, tmp_path):
    start, console = RunStart(None, 0, {"n_params": 7, "digest": "0" * 64}), Console(file=io.StringIO(), width=200)
    one = tiny({"trainer.max_steps": 1})
    print_start(console, one, one, RunDir(tmp_path), start, torch.device("cpu"), resumed=False)
    assert "\n1 step of " in console.file.getvalue()
    settings, table = SimpleNamespace(n_streams=1, buffer=8), SimpleNamespace(n_files=1)
    (line,) = _stream_lines(SimpleNamespace(settings=settings, tables={"": table}))
    assert line.startswith("stream: 1 file in 1 stream, ")


def test_a_gpu_has_its_number_whoever_launched_the_run(monkeypatch):
    """A thread that makes it current needs one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for kind in ("cuda", "auto"):
        config = RunConfig(trainer=TrainerConfig(device=kind))
        assert _device(config, None) == torch.device("cuda", 3)
        assert _device(config, LaunchedProcess(1, 2, 1, 2)) == torch.device("cuda", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere segments do not grow")
@pytest.mark.parametrize("kind", ["cuda", "auto"])
def test_how_memory_is_allocated_is_said_before_cuda_is_initialised(tiny, tmp_path, monkeypatch, kind):
    """torch reads it once, then."""

    class InitialisedError(Exception):
        pass

    def initialise():
        raise InitialisedError(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))

    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # Set first, so that it is taken back after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialise)
    with pytest.raises(InitialisedError, match="expandable_segments:True"):
        pretrain(tiny({"trainer.device": kind}), RunDir(tmp_path / "run"), console=Console(quiet=True))
    # The caller's later programs do not inherit it.
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
