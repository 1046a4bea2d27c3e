"""Every strategy under a real torchrun, gloo and DeepSpeed's engine included: the birth, losses, snapshots and
checkpoints of the single process."""

import importlib.util
import json
import os
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from birthmark.errors import UsageError
from birthmark.measure.records import RunDir, Snapshot, read_metrics
from birthmark.models.birth import born, digest
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.trainer.config import RunConfig, TrainerConfig
from birthmark.trainer.processes.launched_process import LaunchedProcess
from birthmark.trainer.run import pretrain
from birthmark.trainer.strategies.lightning_setup import check_launch

# What a run does before it trains, once for each strategy.
BIRTHS = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from birthmark.trainer.config_file import resolve
from birthmark.models.birth import digest
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.initial_model import initialize_model
from birthmark.trainer.strategies.lightning_setup import set_up_strategy

file, *names = sys.argv[1:]
config, where, device = resolve(Path(file)), launched_process(), torch.device("cpu")
with join_process_group(where, device):
    for name in names:
        settings = replace(config.trainer, strategy=name, replicas=2 if name == "fsdp2" else 1)
        strategy = set_up_strategy(settings, 1.0, device)
        model = initialize_model(config, config.init_seed, device if strategy.shard else "cpu", strategy.shard)
        found = digest(model)
        if where.rank == 0:
            print("birth", name, found)
"""
STRATEGIES = ["fsdp2", "zero1", "zero2", "zero3"]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed, an optional dependency, is not installed"
)
EVERY = [pytest.param(s, marks=needs_deepspeed) if s.startswith("zero") else s for s in STRATEGIES]


class Cluster:
    """Runs of one config, each under its own launch."""

    def __init__(self, folder, config, launch):
        self.folder, self.config, self.launch = folder, config, launch
        (folder / "run.yaml").write_text(yaml.safe_dump(asdict(config)))

    def run(self, name, *flags, n=2, resume=False):
        self.launch(self.folder / "run.yaml", self.folder / name, "resume" if resume else "begin", *flags, n=n)
        return RunDir.open(self.folder / name)

    def half(self, source, name):
        """A copy of a run as it was at its first checkpoint."""
        shutil.copytree(source.path, self.folder / name)
        part = RunDir(self.folder / name)
        for step in (s for s in part.checkpoints_by_step() if s > 50):
            shutil.rmtree(part.checkpoint(step))
            shutil.rmtree(part.snapshot(step))
        return part


@pytest.fixture(scope="module")
def clusters(launched, pretrain_script):
    """``clusters(folder, config)``: a :class:`Cluster`."""
    return partial(Cluster, launch=partial(launched, pretrain_script))


@pytest.fixture(scope="module")
def cluster(tiny, clusters, tmp_path_factory):
    """Two micro-batches a step and rank, a probe and validation that two ranks cannot share evenly."""
    overrides = {
        "optim.schedule": "constant",
        "optim.lr": 0.003,
        "model.mlp": "swiglu",
        "trainer.global_batch_size": 8,
        "trainer.max_steps": 100,
        "trainer.checkpoint_every": 50,
        "trainer.val_sequences": 7,
        "snapshot.n_sequences": 11,
    }
    return clusters(tmp_path_factory.mktemp("strategies"), tiny(overrides))


@pytest.fixture(scope="module")
def single(cluster):
    return pretrain(cluster.config, RunDir(cluster.folder / "single"), console=Console(quiet=True)).run


@pytest.fixture(scope="module")
def runs(cluster):
    """A run by strategy, trained when it is first asked for."""
    found = {}

    def of(strategy):
        if strategy not in found:
            found[strategy] = cluster.run(strategy, f"--trainer.strategy={strategy}")
        return found[strategy]

    return of


def logged(run, key):
    return {r["step"]: r[key] for r in read_metrics(run.metrics) if key in r}


def digest_of(run):
    return json.loads(run.birth.read_text())["digest"]


def assert_alike(run, single):
    assert digest_of(run) == digest_of(single)
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        ours, theirs = logged(run, key), logged(single, key)
        assert ours.keys() == theirs.keys()
        assert len(ours) in (3, 100)
        assert {s: v for s, v in ours.items() if s <= 10} == pytest.approx(
            {s: v for s, v in theirs.items() if s <= 10}, rel=1e-5
        )
        assert ours == pytest.approx(theirs, rel=1e-3)
    births = [Snapshot.read(r.snapshot(0)) for r in (run, single)]
    assert births[0].bias == pytest.approx(births[1].bias, rel=1e-5, abs=1e-6)
    for name in ("mean_prob", "stranger_mean_prob", "mean_direction", "stranger_direction", "sink_rate", "n_eff"):
        np.testing.assert_allclose(births[0].arrays[name], births[1].arrays[name], rtol=1e-5, atol=1e-6, err_msg=name)
    ends = [Snapshot.read(r.snapshot(100)).bias for r in (run, single)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("strategy", EVERY)
def test_a_strategy_has_the_birth_losses_and_snapshots_of_the_single_process(strategy, runs, single):
    assert_alike(runs(strategy), single)


def test_four_processes_in_two_replicas_too(cluster, single):
    flags = ["--trainer.strategy=fsdp2", "--trainer.replicas=2", "--trainer.micro_batch_size=1"]
    assert_alike(cluster.run("replicas", *flags, n=4), single)


@pytest.mark.parametrize(
    ("source", "strategy"),
    [
        ("single", "fsdp2"),
        pytest.param("fsdp2", "zero1", marks=needs_deepspeed),
        pytest.param("zero1", "zero2", marks=needs_deepspeed),
        pytest.param("zero2", "zero3", marks=needs_deepspeed),
        pytest.param("zero3", "single", marks=needs_deepspeed),
    ],
)
def test_a_run_goes_on_under_another_strategy(source, strategy, cluster, runs, single):
    before = single if source == "single" else runs(source)
    part = cluster.half(before, f"{source}-{strategy}")
    if strategy == "single":
        pretrain(cluster.config, part, resume=True, console=Console(quiet=True))
    else:
        cluster.run(part.path.name, f"--trainer.strategy={strategy}", resume=True)
    ours, theirs = logged(part, "train/loss"), logged(before, "train/loss")
    assert ours.keys() == theirs.keys()
    assert len(ours) == 100
    assert {s: v for s, v in ours.items() if s <= 60} == pytest.approx(
        {s: v for s, v in theirs.items() if s <= 60}, rel=1e-5
    )
    assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(
    "flags",
    [
        ["--trainer.strategy=fsdp2", "--trainer.activation_checkpointing=full"],
        ["--trainer.strategy=fsdp2", "--trainer.activation_checkpointing=selective", "--trainer.compile=blocks"],
        ["--trainer.strategy=ddp", "--trainer.activation_checkpointing=selective"],
        pytest.param(
            ["--trainer.strategy=zero3", "--trainer.activation_checkpointing=full", "--trainer.offload=cpu"],
            marks=needs_deepspeed,
        ),
    ],
)
def test_what_is_kept_compiled_and_offloaded_changes_no_loss(flags, cluster, single):
    name = "-".join(flag.partition("=")[2] for flag in flags)
    found = logged(cluster.run(name, *flags, "--trainer.max_steps=10"), "train/loss")
    assert len(found) == 10
    assert found == pytest.approx({s: v for s, v in logged(single, "train/loss").items() if s <= 10}, rel=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_weights_gathered_in_bf16_train_and_are_said_to_be_measured_so(strategy, cluster, single):
    flags = [f"--trainer.strategy={strategy}", "--trainer.precision=bf16", "--trainer.gather=bf16"]
    run = cluster.run(f"bf16-{strategy}", *flags, "--trainer.max_steps=50")
    assert digest_of(run) == digest_of(single)
    losses = logged(run, "train/loss")
    assert losses == pytest.approx({s: v for s, v in logged(single, "train/loss").items() if s <= 50}, rel=0.03)
    assert Snapshot.read(run.snapshot(50)).summary["probe"]["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"strategy": "ddp", "replicas": 2}, "trainer.replicas is 2, which strategy ddp does not read"),
        ({"gather": "bf16"}, "trainer.gather is bf16, which strategy single does not read"),
        ({"strategy": "zero2", "gather": "bf16"}, "trainer.gather is bf16, which strategy zero2 does not read"),
        ({"strategy": "fsdp2", "offload": "cpu"}, "trainer.offload is cpu, which strategy fsdp2 does not read"),
        ({"strategy": "fsdp2", "gather": "bf16"}, "trainer.precision is fp32: set both"),
        ({"strategy": "fsdp2", "compile": "step"}, "trainer.compile is step, but fsdp2 gathers weights"),
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


@needs_deepspeed
def test_four_processes_give_the_birth_of_one_under_every_strategy(tiny, launched_script, tmp_path):
    config = tiny({"trainer.global_batch_size": 8})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(asdict(config)))
    names = ["ddp", *STRATEGIES]
    printed = launched_script(BIRTHS, str(tmp_path / "run.yaml"), *names, n=4)
    found = dict(line.split()[1:] for line in printed.splitlines() if line.startswith("birth "))
    assert found == dict.fromkeys(names, digest(born(config.model, config.init_seed)))


def _built(operator):
    """Whether an operator of DeepSpeed has been compiled here: minutes, on first use."""
    from torch.utils.cpp_extension import get_default_build_root

    folders = Path(os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root()))
    return any(folders.rglob(f"{operator}.so"))


@needs_deepspeed
@pytest.mark.skipif(
    not _built("async_io"), reason="DeepSpeed's asynchronous I/O is not compiled here (docs/cluster.md)"
)
def test_optimizer_state_on_a_drive_changes_no_loss(tiny, clusters, tmp_path):
    # Smaller states stay in memory.
    wide = clusters(tmp_path, tiny({"model.d_model": 512, "snapshot.enabled": False}))
    apart = wide.run("ddp", "--trainer.strategy=ddp")
    flags = ["--trainer.strategy=zero3", "--trainer.offload=nvme", f"--trainer.offload_dir={tmp_path / 'drive'}"]
    on_drive = wide.run("nvme", *flags)
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
