"""A step that one rank alone would ruin is skipped on all of them, under every strategy."""

import importlib.util
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from quiet_runs import config_file

from birthmark.measure.metrics_log import read_metrics
from birthmark.measure.records import RunDir
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO

# The loss of step 2 is NaN on one rank, and torch's optimizers wait for the device or do not.
POISON = f"""
import os
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from birthmark.trainer.loop.steps import StepGuard
from birthmark.trainer.module import PretrainModule

sys.path.append({str(Path(__file__).parents[2])!r})
from poisoned_losses import poisoned

_TrainingEpochLoop._broadcast_sigterm_tensor = lambda self: Path(folder, "asked").touch()
hold = StepGuard.hold
StepGuard.hold = lambda *args, wait: hold(*args, wait=wait and not folder.endswith("async"))
PretrainModule.training_step = poisoned(lambda module, index: module.global_step == 1 and os.environ["RANK"] == "1")
"""
RUNS = ["ddp-adamw-waits", "ddp-nadam-async", "fsdp2-adamw-waits", "fsdp2-adamw-async", "fsdp2-sgd-async"]
ZERO = ["zero2-adamw-waits", "zero3-adamw-waits"]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture(scope="module")
def folder(tiny, launch_runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipped")
    fields = {"trainer.checkpoint_every": 1, "trainer.max_steps": 3, "snapshot.enabled": False}
    file = config_file(folder / "run.yaml", tiny({**fields, "trainer.global_batch_size": 8}))
    parts = {name: name.split("-") for name in (*RUNS, *(ZERO if HAS_DEEPSPEED else []))}
    flags = {name: [f"--trainer.strategy={part[0]}", f"--optim.name={part[1]}"] for name, part in parts.items()}
    launch_runs(file, [(folder / name, False, given) for name, given in flags.items()], before=POISON)
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
    assert not list(folder.glob("*/asked"))
