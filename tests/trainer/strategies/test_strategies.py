"""Every strategy in several processes, gloo and DeepSpeed's engine included: the birth, losses, snapshots and averages
of the single process. Runs that go on under another strategy: test_optimizers_of_strategies.py."""

import importlib.util
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from oracles import Operators
from quiet_runs import averages, config_file, logged, run

from birthmark.errors import UsageError
from birthmark.measure.records import RunDir, Snapshot
from birthmark.models.birth import born, digest
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.trainer.config import RunConfig, TrainerConfig
from birthmark.trainer.config_file import read_config
from birthmark.trainer.processes.launched_process import LaunchedProcess
from birthmark.trainer.strategies.lightning_setup import check_launch
from birthmark.trainer.strategies.zero import ZeroStrategy

# What a run does before it trains, once for each strategy; and a whole run, in two replicas.
FOUR = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from birthmark.trainer.config_file import read_config
from birthmark.measure.records import RunDir
from birthmark.models.birth import digest
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.initial_model import initialize_model
from birthmark.trainer.run import pretrain
from birthmark.trainer.strategies.lightning_setup import set_up_strategy

file, out, *names = sys.argv[1:]
config, where, device = read_config(file), launched_process(), torch.device("cpu")
with join_process_group(where, device):
    for name in names:
        settings = replace(config.trainer, strategy=name, replicas=2 if name == "fsdp2" else 1)
        strategy = set_up_strategy(settings, 1.0, device)
        model = initialize_model(config, config.init_seed, device if strategy.shard else "cpu", strategy.shard)
        found = digest(model)
        if where.rank == 0:
            print("birth", name, found)
    pretrain(replace(config, trainer=replace(config.trainer, strategy="fsdp2", replicas=2)), RunDir(Path(out)))
"""
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed, an optional dependency, is not installed")
ZERO = ["zero1", "zero2", "zero3"]

#: Steps of a run. More of AdamW, under strategies in turn: test_optimizers_of_strategies.py.
STEPS = 3

#: A run without snapshots and averages.
BARE = ["--snapshot.enabled=false", "--optim.ema=null"]

#: Ways to keep, compile and offload, which change no loss.
OPTIONS = {
    "fsdp2-full": {"activation_checkpointing": "full"},
    "fsdp2-selective-blocks": {"activation_checkpointing": "selective", "compile": "blocks"},
    "ddp-selective": {"activation_checkpointing": "selective"},
    "zero3-full-cpu": {"activation_checkpointing": "full", "offload": "cpu"},
}

#: Those that shard while a backward pass runs, gradients or weights too; zero1 does so after it.
SHARDING = ["zero2", "zero3"]

#: A mixture whose load balance shows in the losses, and batches that two processes share as 1 + 1 and 1 + 0 samples.
MIXTURE = ["--model.experts.n_experts=5", "--model.experts.d_ff=16", "--model.experts.load_balance=2.0"]
MIXTURE += ["--model.experts.router_z_loss=0.1", "--trainer.global_batch_size=3", "--trainer.micro_batch_size=1"]
MIXTURE += [*BARE, "--trainer.checkpoint_every=1"]


def is_zero(name):
    return any(kind in name for kind in ZERO)


def runnable(names):
    """Those that need no library that is missing here."""
    return [name for name in names if HAS_DEEPSPEED or not is_zero(name)]


def params(names):
    return [pytest.param(name, marks=needs_deepspeed if is_zero(name) else ()) for name in names]


@pytest.fixture(scope="module")
def config(tiny):
    """Two micro-batches a step and rank, a probe and validation that two ranks cannot share evenly."""
    fields = {"optim.schedule": "constant", "optim.lr": 0.003, "optim.ema": 0.8, "model.mlp": "swiglu"}
    fields |= {"trainer.max_steps": STEPS, "trainer.checkpoint_every": STEPS, "trainer.global_batch_size": 8}
    fields |= {"trainer.val_sequences": 7, "snapshot.n_sequences": 11, "snapshot.gradients": True}
    return tiny(fields | {"eval.tasks": ["backcopy"], "eval.n_docs": 5, "eval.share": 1.0})


@pytest.fixture(scope="module")
def folder(config, tmp_path_factory):
    """The config's file, and all runs by name."""
    folder = tmp_path_factory.mktemp("strategies")
    config_file(folder / "run.yaml", config)
    return folder


@pytest.fixture(scope="module")
def single(config, folder):
    return run(config, folder / "single")


@pytest.fixture(scope="module")
def runs(folder, launch_runs):
    """``runs(name)``: a run from birth by strategy, and by options behind a dash; all from one launch."""
    flags = {name: [] for name in ("ddp", "fsdp2", *ZERO)}
    flags |= {n: [*(f"--trainer.{field}={x}" for field, x in fs.items()), *BARE] for n, fs in OPTIONS.items()}
    flags |= {f"{name}-bare": BARE for name in SHARDING}
    flags |= {f"{name}-mixture": MIXTURE for name in ("ddp", "fsdp2", *SHARDING)}
    flags["fsdp2-mixture"] = [*MIXTURE, "--trainer.activation_checkpointing=full"]
    flags["ddp-mixture"] = [*MIXTURE, "--trainer.max_steps=1"]
    in_bf16 = ["--trainer.precision=bf16", "--trainer.gather=bf16", "--optim.ema=null"]
    flags |= {f"{name}-bf16": in_bf16 for name in ("fsdp2", "zero3")}
    asked = {name: [f"--trainer.strategy={name.partition('-')[0]}", *flags[name]] for name in runnable(flags)}
    launch_runs(folder / "run.yaml", [(folder / name, False, given) for name, given in asked.items()])
    return lambda name: RunDir.open(folder / name)


def digest_of(run):
    return json.loads(run.birth.read_text())["digest"]


def assert_alike(found, single):
    """All that a run has logged, measured and averaged."""
    assert digest_of(found) == digest_of(single)
    assert logged(found, "ema/val/loss").keys() == {STEPS}
    assert averages(found, STEPS) == pytest.approx(averages(single, STEPS), abs=1e-5)
    for key in ("ema/val/loss", "ema/eval/backcopy/excess_loss", "ema/bias/alignment"):
        assert logged(found, key) == pytest.approx(logged(single, key), rel=1e-3)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        ours, theirs = logged(found, key), logged(single, key)
        assert ours.keys() == theirs.keys()
        assert len(ours) == (2 if key == "val/loss" else STEPS)
        assert ours == pytest.approx(theirs, rel=1e-5)
    scores = [logged(r, "eval/backcopy/excess_loss") for r in (found, single)]
    assert len(scores[0]) >= 2
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    births = [Snapshot.read(r.snapshot(0)) for r in (found, single)]
    assert births[0].bias == pytest.approx(births[1].bias, rel=1e-5, abs=1e-6)
    arrays = ("mean_prob", "stranger_mean_prob", "mean_direction", "stranger_direction", "sink_rate", "n_eff")
    for name in (*arrays, "gradient_mlp", "gradient_attention", "gradient_key", "gradient_value"):
        np.testing.assert_allclose(births[0].arrays[name], births[1].arrays[name], rtol=1e-5, atol=1e-6, err_msg=name)
    ends = [Snapshot.read(r.snapshot(STEPS)).bias for r in (found, single)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("strategy", params(["fsdp2", *ZERO]))
def test_a_strategy_has_the_birth_losses_and_snapshots_of_the_single_process(strategy, runs, single):
    assert_alike(runs(strategy), single)


@needs_deepspeed
@pytest.mark.parametrize("norm", [math.inf, torch.tensor(2.0), torch.tensor(2.0, device="meta")], ids=str)
def test_the_norm_that_an_engine_gives_lies_where_losses_do(norm, config, monkeypatch):
    """With offload it lies on the host, and a skipped step's is a number; the meta device stands for a GPU."""
    meta, seen = torch.device("meta"), []
    strategy = ZeroStrategy(replace(config.trainer, strategy="zero2", offload="cpu"), 1.0)
    strategy.parallel_devices = [meta]
    strategy._lightning_module = SimpleNamespace(
        optimizer_config=None, parameter_groups=list, see_gradient_norm=seen.append
    )
    engine = SimpleNamespace(is_gradient_accumulation_boundary=lambda: True, get_global_grad_norm=lambda: norm)
    monkeypatch.setattr(ZeroStrategy, "deepspeed_engine", engine)
    monkeypatch.setattr(DeepSpeedStrategy, "optimizer_step", lambda self: None)
    copies = []

    def note(function, args, result):
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            copies.append(function)  # the host waits for it

    with Operators(note):
        strategy.optimizer_step()
    (found,) = seen
    assert (found.device, found.dtype, found.shape, copies) == (meta, torch.float32, (), [])


@pytest.fixture(scope="module")
def four(config, folder, forked):
    """The births that four processes give, by strategy, and their run in two replicas."""
    names = runnable(["ddp", "fsdp2", *ZERO])
    smaller = replace(config, trainer=replace(config.trainer, micro_batch_size=1))
    config_file(folder / "four.yaml", smaller)
    (folder / "four.py").write_text(FOUR)
    printed = forked(folder / "four.py", folder / "four.yaml", folder / "replicas", *names, n=4)
    births = dict(line.split()[1:] for line in printed.splitlines() if line.startswith("birth "))
    return births, RunDir.open(folder / "replicas")


def test_four_processes_in_two_replicas_too(four, single):
    assert_alike(four[1], single)


@pytest.mark.parametrize("strategy", params(["ddp", "fsdp2", *ZERO]))
def test_four_processes_give_the_birth_of_one_under_every_strategy(strategy, four, config):
    assert four[0][strategy] == digest(born(config.model, config.init_seed))


@pytest.mark.parametrize("options", params(OPTIONS))
def test_what_is_kept_compiled_and_offloaded_changes_no_loss(options, runs, single):
    found = logged(runs(options), "train/loss")
    assert len(found) == STEPS
    assert found == pytest.approx(logged(single, "train/loss"), rel=1e-5)


@pytest.mark.parametrize("without", params(["ddp-selective", "fsdp2-full", *(f"{name}-bare" for name in SHARDING)]))
def test_snapshots_and_their_backward_pass_leave_training_alone_bit_for_bit(without, runs):
    """What is computed again changes no bit either."""
    with_it, without_it = runs(without.split("-")[0]), runs(without)
    assert "gradient_sink" in Snapshot.read(with_it.snapshot(0)).bias
    assert without_it.snapshot_folders() == []
    for key in ("train/loss", "train/grad_norm"):
        assert logged(with_it, key) == logged(without_it, key)


@pytest.fixture(scope="module")
def single_in_bf16(config, folder):
    """The first step of a single process under bf16 autocast."""
    shorter = replace(config.trainer, precision="bf16", max_steps=1)
    return run(replace(config, trainer=shorter), folder / "single-bf16")


@pytest.mark.parametrize("strategy", params(["fsdp2", "zero3"]))
def test_weights_gathered_in_bf16_round_no_activations(strategy, runs, single_in_bf16, single):
    """Autocast rounds the weights of a newborn's maps as well, and gains of 1 are not changed by rounding."""
    found = runs(f"{strategy}-bf16")
    losses = logged(found, "train/loss")
    assert losses[1] == pytest.approx(logged(single_in_bf16, "train/loss")[1], rel=1e-6)
    # They train, and are said to be measured so.
    assert digest_of(found) == digest_of(single)
    assert losses == pytest.approx(logged(single, "train/loss"), rel=0.03)
    assert Snapshot.read(found.snapshot(STEPS)).summary["probe"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"strategy": "ddp", "replicas": 2}, "trainer.replicas is 2, which strategy ddp does not read"),
        ({"gather": "bf16"}, "trainer.gather is bf16, which strategy single does not read"),
        ({"strategy": "zero2", "gather": "bf16"}, "trainer.gather is bf16, which strategy zero2 does not read"),
        ({"strategy": "zero3", "reduce": "bf16"}, "trainer.reduce is bf16, which strategy zero3 does not read: remove"),
        ({"strategy": "ddp", "reduce": "bf16"}, "trainer.reduce is bf16, which strategy ddp does not read: remove it"),
        ({"strategy": "ddp", "accumulate": "sharded"}, "trainer.accumulate is sharded, which strategy ddp does not"),
        ({"strategy": "fsdp2", "offload": "cpu"}, "trainer.offload is cpu, which strategy fsdp2 does not read"),
        ({"strategy": "fsdp2", "gather": "bf16"}, "trainer.precision is fp32: set both"),
        ({"strategy": "fsdp2", "compile": "step"}, "trainer.compile is step, but fsdp2 gathers weights"),
        (
            {"strategy": "zero3", "compile": "blocks"},
            "trainer.compile is blocks, but zero3 gathers the weights of every",
        ),
        ({"strategy": "zero3", "activation_checkpointing": "selective"}, "selective, but zero3 gathers"),
        ({"strategy": "zero2", "offload": "nvme", "offload_dir": "/x"}, "trainer.offload is nvme, which zero2 cannot"),
        ({"strategy": "zero3", "offload": "nvme"}, "give trainer.offload_dir"),
        ({"keep_last": 0}, "trainer.keep_last is 0: give at least 1"),
        ({"keep_every": 100}, "trainer.keep_every is 100, but all are kept"),
        ({"strategy": "fsdp2", "replicas": 0}, "trainer.replicas is 0: give at least 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, expected):
    with pytest.raises(UsageError, match=expected):
        RunConfig(trainer=TrainerConfig(device="cpu", **fields))


def _built(operator):
    """Whether an operator of DeepSpeed has been compiled here: minutes, on first use."""
    from torch.utils.cpp_extension import get_default_build_root

    folders = Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root()))
    return any(folders.rglob(f"{operator}.so"))


@needs_deepspeed
@pytest.mark.skipif(
    not _built("async_io"), reason="DeepSpeed's asynchronous I/O is not compiled here (docs/cluster.md)"
)
def test_optimizer_state_on_a_drive_changes_no_loss(tiny, launch_runs, tmp_path):
    # Smaller states stay in memory.
    wide = tiny({"model.d_model": 512, "snapshot.enabled": False})
    config_file(tmp_path / "run.yaml", wide)
    flags = ["--trainer.strategy=zero3", "--trainer.offload=nvme", f"--trainer.offload_dir={tmp_path / 'drive'}"]
    launch_runs(
        tmp_path / "run.yaml",
        [(tmp_path / "ddp", False, ["--trainer.strategy=ddp"]), (tmp_path / "nvme", False, flags)],
    )
    apart, on_drive = (RunDir.open(tmp_path / name) for name in ("ddp", "nvme"))
    assert any(file.stat().st_size for file in (tmp_path / "drive").rglob("exp_avg*.swp"))
    assert logged(on_drive, "train/loss") == pytest.approx(logged(apart, "train/loss"), rel=1e-5)


@needs_deepspeed
def test_a_drive_that_cannot_be_written_is_named(tmp_path):
    from birthmark.trainer.strategies.zero import check_drive

    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"trainer\.offload_dir .*file/state: cannot write there \(Not a directory\)"):
        check_drive(tmp_path / "file" / "state")


def test_replicas_must_divide_the_processes():
    with pytest.raises(UsageError, match=r"trainer\.replicas 2 does not divide 3 processes"):
        check_launch(
            TrainerConfig(strategy="fsdp2", replicas=2, global_batch_size=48, device="cpu"), LaunchedProcess(0, 3, 0, 3)
        )


def test_running_moments_would_move_twice_in_a_block_that_is_computed_again():
    calibrated = AttentionConfig(aggregation="calibrated", calibration=CalibrationConfig(correlation="estimated"))
    with pytest.raises(UsageError, match="activation_checkpointing computes blocks again"):
        RunConfig(
            model=ModelConfig(attention=calibrated),
            trainer=TrainerConfig(activation_checkpointing="full", device="cpu"),
        )


@pytest.fixture(scope="module")
def mixture(folder):
    """The mixture in one process and one micro-batch."""
    whole = dict(flag.removeprefix("--").split("=", 1) for flag in MIXTURE) | {"trainer.micro_batch_size": "3"}
    one = read_config(folder / "run.yaml", whole)
    return one, run(one, folder / "one")


@pytest.mark.parametrize("name", params(["ddp", "fsdp2", *SHARDING]))
def test_a_mixture_trains_the_same_loss_however_its_batch_is_split(name, runs, mixture):
    """The load balance is of the global batch: that of one process and one micro-batch, from birth or resumed."""
    one, single = mixture
    shared = runs(f"{name}-mixture")
    if name == "ddp":
        run(one, shared.path, resume=True)
    for key in ("train/loss", "train/load_balance", "train/router_z", "train/grad_norm", "val/loss"):
        found, expected = logged(shared, key), logged(single, key)
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=1e-6), key
