"""A step that one rank alone would ruin is skipped on all of them, under every strategy."""

import importlib.util
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO

SCRIPT = """
import os, sys
from pathlib import Path

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from birthmark.measure.records import RunDir
from birthmark.trainer.config_file import read_config
from birthmark.trainer.loop.steps import StepGuard
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.run import pretrain

file, out, tests, *runs = sys.argv[1:]
sys.path.append(tests)
from poisoned_losses import poisoned

_TrainingEpochLoop._broadcast_sigterm_tensor = lambda self: Path(out, "asked").touch()
hold = StepGuard.hold
on_one_rank = lambda module, index: module.global_step == 1 and os.environ["RANK"] == "1"
PretrainModule.training_step = poisoned(on_one_rank)
for start, run in enumerate(runs):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(start)
    strategy, optimizer, way = run.split("-")
    StepGuard.hold = hold if way == "waits" else lambda *args, wait: hold(*args, wait=False)
    pretrain(read_config(file, {"trainer.strategy": strategy, "optim.name": optimizer}), RunDir(Path(out, run)))
"""
TESTS = Path(__file__).parents[2]
RUNS = ["ddp-adamw-waits", "ddp-nadam-async", "fsdp2-adamw-waits", "fsdp2-adamw-async", "fsdp2-sgd-async"]
ZERO = ["zero1-adamw-waits", "zero2-adamw-waits", "zero3-adamw-waits"]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture(scope="module")
def folder(tiny, launched, tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipped")
    fields = {"trainer.checkpoint_every": 1, "trainer.max_steps": 3, "snapshot.enabled": False}
    (folder / "run.yaml").write_text(yaml.safe_dump(asdict(tiny({**fields, "trainer.global_batch_size": 8}))))
    (folder / "script.py").write_text(SCRIPT)
    launched(folder / "script.py", folder / "run.yaml", folder, TESTS, *RUNS, *(ZERO if HAS_DEEPSPEED else []))
    return folder


@pytest.mark.parametrize("name", RUNS + ZERO)
def test_a_loss_that_is_not_finite_on_one_rank_moves_nothing_on_any(name, folder):
    if name in ZERO and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed, an optional dependency, is not installed")
    run = RunDir.open(folder / name)
    states = [FolderCheckpointIO().load_checkpoint(run.checkpoint(step)) for step in (1, 2, 3)]

    def tensors(state):
        optimizer = state["optimizer_states"][0]["state"]
        moments = {f"{i}.{k}": torch.as_tensor(v) for i, entries in optimizer.items() for k, v in entries.items()}
        return state["state_dict"] | moments

    one, two, three = map(tensors, states)
    assert one.keys() == two.keys() == three.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert sum(not torch.equal(two[name], three[name]) for name in two) > 0.9 * len(two)
    skipped = [r["train/skipped_steps"] for r in read_metrics(run.metrics) if "train/skipped_steps" in r]
    assert skipped == [0, 1, 1]


def test_no_micro_batch_waits_to_hear_of_signals(folder):
    """Lightning's loop would broadcast before each whether one came, and read it from the device."""
    assert "_broadcast_sigterm_tensor" in _TrainingEpochLoop.advance.__code__.co_names
    assert not (folder / "asked").exists()
