"""Two processes under a real torchrun are the single one: same birth, losses, snapshots, and checkpoints for both."""

import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import yaml
from quiet_runs import logged, ranks_of, run, up_to

from birthmark.errors import UsageError
from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir, Snapshot
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.config import TrainerConfig
from birthmark.trainer.config_file import read_config
from birthmark.trainer.processes.launched_process import LaunchedProcess, launched_process
from birthmark.trainer.strategies.lightning_setup import SETUPS, check_launch
from birthmark.trainer.strategies.table import STRATEGIES, STRATEGY_FIELDS

# One launch for several runs, because starting takes longer than they do. Each looks like a launch of its own.
SCRIPT = """
import os, shutil, signal, sys, threading, time
from pathlib import Path

from birthmark.errors import RunError
from birthmark.launch.cli import main
from birthmark.trainer import run as training
from birthmark.trainer.module import PretrainModule

rank, (file, out, *fields), statuses = os.environ["RANK"], sys.argv[1:], []

def run(name, *flags):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = name
    # A launch of its own begins without an error; torchrun takes the oldest, if all end between two of its looks.
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink(missing_ok=True)
    statuses.append(main(["pretrain", "--config", file, "--run_dir", f"{out}/{name}", *flags]))
    print(f"rank {rank} after {name}: {statuses}", flush=True)

def interrupt():
    metrics = Path(f"{out}/stopped/metrics.jsonl")
    while not metrics.is_file() or "train/loss" not in metrics.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

check_finite = PretrainModule.check_finite

def fail(self, *, weights=False):
    if self.global_step == 3:
        raise RunError("at step 3")
    check_finite(self, weights=weights)  # the other rank waits for this one there

run("bad", "--trainer.global_batch_size=1")
run("two")
training._write_report = lambda run: None  # the pages of the others take longer than they do
uneven = ["--trainer.global_batch_size=5", "--trainer.micro_batch_size=2", "--snapshot.enabled=false"]
run("uneven", *uneven)
few = ["--trainer.global_batch_size=6", "--trainer.micro_batch_size=2", "--snapshot.enabled=false"]
run("packed", *fields, *few)
if rank == "1":
    threading.Thread(target=interrupt, daemon=True).start()
run("stopped", "--trainer.max_steps=100000", "--trainer.checkpoint_every=100000", "--trainer.micro_batch_size=3")
# A file system that shows one node a new run a moment later.
if rank == "0":
    shutil.copytree(f"{out}/uneven", f"{out}/late")
    shutil.rmtree(f"{out}/late/checkpoints/step-00000010")
else:
    same = training._check_same_everywhere
    training._check_same_everywhere = lambda *found: (same(*found), threading.Timer(1, see).start())
os.makedirs(node := f"{out}/node-{rank}/seen")
os.chdir(node)
see = lambda: os.symlink(f"{out}/late", "late")
if rank == "0":
    see()
run("late", *uneven, "--trainer.timeout_s=5", "--run_dir=late")
if rank == "1":
    training._check_same_everywhere = same
    PretrainModule.check_finite = fail
run("broken")
sys.exit(1)
"""


@pytest.fixture(scope="module")
def config(tiny):
    """Probe and validation that two ranks cannot share evenly, and a checkpoint after an odd number of steps."""
    odd = {"trainer.checkpoint_every": 5, "trainer.val_sequences": 7, "snapshot.n_sequences": 11}
    return tiny(odd | {"optim.schedule": "constant", "trainer.max_steps": 10})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def one(config, folder):
    return run(config, folder / "one")


@pytest.fixture(scope="module")
def packed(config, folder, write_documents):
    """Fields of a run whose sequences hold different numbers of tokens."""
    text = {"data.path": str(write_documents(folder / "text")), "data.cache_dir": str(folder / "cache")}
    text |= {"data.packing": "documents", "data.val_fraction": 0.2}
    return text | {"model.vocab_size": 280, "trainer.max_steps": 5}


@pytest.fixture(scope="module")
def output(config, folder, packed, torchrun, python):
    """What torchrun printed of the runs of the script, on both channels."""
    file, script = folder / "tiny.yaml", folder / "script.py"
    asked = asdict(config)
    asked["trainer"]["strategy"] = "ddp"
    file.write_text(yaml.safe_dump(asked))
    script.write_text(SCRIPT)
    process = torchrun(script, file, folder, *(f"--{name}={value}" for name, value in packed.items()), python=python)
    try:
        output, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    return output, errors


@pytest.fixture(scope="module")
def two(output, folder):
    return RunDir.open(folder / "two")


def test_two_processes_are_born_alike_and_train_alike(one, two):
    assert json.loads(two.birth.read_text())["digest"] == json.loads(one.birth.read_text())["digest"]
    for key in ("train/loss", "train/grad_norm", "train/lr", "train/tokens", "val/loss", "val/loss_trigger"):
        assert len(logged(one, key)) in (3, 10)
        assert logged(two, key) == pytest.approx(logged(one, key), rel=1e-5), key
    assert [r["step"] for r in read_metrics(two.metrics)] == [r["step"] for r in read_metrics(one.metrics)]


def test_sequences_count_alike_where_two_processes_cannot_share_them_evenly(config, output, folder, tmp_path):
    trainer = replace(config.trainer, global_batch_size=5, micro_batch_size=5)
    snapshot = replace(config.snapshot, enabled=False)
    whole = run(replace(config, trainer=trainer, snapshot=snapshot), tmp_path / "whole")
    uneven = RunDir.open(folder / "uneven")
    said = "micro-batches of 2 or 1 sequences for trainer.micro_batch_size 2: so 2 processes can share the 5 of a step"
    assert output[0].count(said) == 2  # uneven, late
    for key in ("train/loss", "train/grad_norm", "train/tokens", "val/loss"):
        assert logged(uneven, key) == pytest.approx(logged(whole, key), rel=1e-5), key


def test_tokens_count_alike_where_sequences_are_padded(tiny, packed, output, folder, tmp_path):
    alone = {"optim.schedule": "constant", "trainer.checkpoint_every": 5, "trainer.val_sequences": 7}
    alone |= {"trainer.global_batch_size": 6, "trainer.micro_batch_size": 6, "snapshot.enabled": False}
    whole, shared = run(tiny(packed | alone), tmp_path / "whole"), RunDir.open(folder / "packed")
    for key in ("train/loss", "train/grad_norm", "val/loss", "val/bits_per_byte"):
        assert logged(shared, key) == pytest.approx(logged(whole, key), rel=1e-5), key


def test_two_processes_share_the_probe_and_see_the_whole(one, two):
    births = [Snapshot.read(run.snapshot(0)) for run in (one, two)]
    assert births[1].bias == pytest.approx(births[0].bias, rel=1e-5, abs=1e-7)
    assert births[0].arrays.keys() == births[1].arrays.keys()
    for name in ("mean_prob", "stranger_mean_prob", "mean_direction", "stranger_direction", "sink_rate", "n_eff"):
        np.testing.assert_allclose(births[1].arrays[name], births[0].arrays[name], rtol=1e-5, atol=1e-7, err_msg=name)
    late = [Snapshot.read(run.snapshot(10)).bias for run in (one, two)]
    assert late[1] == pytest.approx(late[0], rel=1e-3, abs=1e-5)


def test_one_goes_on_from_what_two_have_saved(config, one, two, tmp_path):
    parts = up_to(5, two, tmp_path / "parts")
    run(config, parts.path, resume=True)
    assert logged(parts, "train/loss") == pytest.approx(logged(one, "train/loss"), rel=1e-5)
    assert len(logged(parts, "train/loss")) == 10


@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="finds the processes under /proc")
def test_two_go_on_from_what_one_has_saved_and_end_together_when_one_is_killed(one, tmp_path, torchrun, python):
    parts = up_to(5, one, tmp_path / "parts")
    flags = ["--trainer.strategy=ddp", "--trainer.max_steps=1000000", "--trainer.checkpoint_every=1000000"]
    process = torchrun("-m", "birthmark.launch.cli", "pretrain", "--resume", parts.path, *flags, python=python)
    try:
        while process.poll() is None and len(logged(parts, "train/loss")) < 12:
            time.sleep(0.05)
        ranks = ranks_of(parts.path)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())
    # torchrun's own summary may repeat it, where rank 0 ended before torchrun looked.
    assert sum(line.startswith("birthmark: ") for line in errors.splitlines()) <= 1
    assert {s: v for s, v in logged(parts, "train/loss").items() if s <= 10} == pytest.approx(
        logged(one, "train/loss"), rel=1e-5
    )
    assert FolderCheckpointIO().load_checkpoint(parts.checkpoints()[-1])["global_step"] == 5


#: A script of a user: rank 1 is taken down while rank 0 waits for it.
LOST = """
import os
import torch
import torch.distributed as dist
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group

process = launched_process()
with join_process_group(process, torch.device("cpu")):
    dist.all_reduce(torch.ones(1))
    if process.rank == 1:
        os._exit(1)
    dist.all_reduce(torch.ones(1))
"""


def test_a_rank_that_loses_another_says_so_without_a_traceback_of_torch(tmp_path, python, free_port):
    file = tmp_path / "script.py"
    file.write_text(LOST)
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen([python, file], env={**common, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert said[1] == ""
    # torch puts the rank before each line.
    line = (
        "birthmark.errors.RunError: rank 0: another process of the run is gone, and its own message or the launcher's"
    )
    assert line in said[0].splitlines()[-1]
    assert said[0].count("Traceback (most recent call last)") == 1
    assert "gloo" not in said[0]
    assert f"torch{os.sep}distributed" not in said[0]


def test_a_batch_that_cannot_be_shared_is_one_line_and_status_2_and_nothing_is_written(output, folder):
    assert output[1].count("birthmark: error: trainer.global_batch_size 1 is less than 2 processes") == 1
    for rank in (0, 1):
        assert f"rank {rank} after stopped: [2, 0, 0, 0, 0]" in output[0]
    assert not (folder / "bad").exists()


def test_a_signal_to_one_process_stops_all_at_one_step(output, folder):
    stopped = RunDir.open(folder / "stopped")
    (last,) = stopped.checkpoints()
    step = int(last.name[5:])
    assert 0 < step < 100000
    assert max(logged(stopped, "train/loss")) == max(logged(stopped, "val/loss")) == step
    assert output[0].count(f"stopped by SIGTERM at step {step}") == 1


def test_a_micro_batch_that_does_not_divide_is_made_to_and_said_once(output, folder):
    said = "micro-batches of 2 sequences for trainer.micro_batch_size 3: so 2 processes can share the 4 of a step"
    assert output[0].count(said) == 1
    # What was asked for stays, for another number of processes.
    assert read_config(RunDir.open(folder / "stopped").config).trainer.micro_batch_size == 3


def test_a_run_goes_on_where_one_process_does_not_see_it_yet(output, folder):
    """It hung for half an hour: the processes did not agree if they go on with a run."""
    assert f"rank 1 after late: {[2, *[0] * 5]}" in output[0]
    late, uneven = (logged(RunDir.open(folder / name), "train/loss") for name in ("late", "uneven"))
    assert late == uneven


def test_what_one_process_fails_of_is_printed_once_with_its_rank_and_ends_all(output, folder):
    alone = f"birthmark: error: at step 3 (said by rank 1 on host {socket.gethostname()})"
    lines = output[1].splitlines()
    assert lines.count(alone) == 1
    assert sum(line.startswith("birthmark: ") for line in lines) == 2  # the other one is the batch
    # A torchrun that our launch files did not start prints a summary after it, whose last words are the cause.
    assert lines[-2].split(" : ") == ["  traceback", alone]
    assert len(logged(RunDir.open(folder / "broken"), "train/loss")) <= 3


def test_only_one_process_prints(output, folder):
    assert output[0].count("  2 processes") == 6
    assert output[0].count(f"report: {folder / 'two' / 'report.html'}") == 1
    assert output[0].count("step     10") == 3  # two, uneven, late


def test_every_strategy_of_the_config_is_in_the_table():
    assert set(STRATEGIES) == set(SETUPS) == set(get_args(get_type_hints(TrainerConfig)["strategy"]))


def test_the_table_names_fields_of_the_config_and_their_defaults():
    defaults = vars(TrainerConfig())
    assert {name: defaults[name] for name in STRATEGY_FIELDS} == STRATEGY_FIELDS
    for name, facts in STRATEGIES.items():
        assert facts.reads <= STRATEGY_FIELDS.keys()
        for field, value in facts.refuses:
            assert value in get_args(get_type_hints(TrainerConfig)[field]), (name, field)


@pytest.mark.parametrize(
    ("strategy", "where", "expected"),
    [
        ("single", LaunchedProcess(0, 2, 0, 2), "trainer.strategy is single, but 2 processes were started"),
        ("ddp", None, "trainer.strategy is ddp, but no launcher"),
        (
            "ddp",
            LaunchedProcess(0, 3, 0, 3),
            "global_batch_size 2 is less than 3 processes: give 3 or more, or start 2",
        ),
    ],
)
def test_strategy_processes_and_batch_must_go_together(strategy, where, expected):
    with pytest.raises(UsageError, match=expected):
        check_launch(TrainerConfig(strategy=strategy, device="cpu", global_batch_size=2), where)


@pytest.mark.parametrize(
    "variables", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": "3"}]
)
def test_an_environment_that_fits_no_run_is_refused(variables, monkeypatch):
    for name, value in {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"environment"):
        launched_process()
