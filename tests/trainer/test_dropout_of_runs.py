"""Runs with dropout: however a batch is shared, and wherever a run stops, the same samples lose the same channels."""

import shutil

import numpy as np
import pytest
import torch
from rich.console import Console

from birthmark.measure.records import RunDir, Snapshot, read_metrics
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.run import pretrain

SHORT = {"trainer.max_steps": 4, "snapshot.n_strangers": 0}
RATES = SHORT | {"model.dropout.embedding": 0.1, "model.dropout.residual": 0.2, "model.dropout.attention": 0.1}


@pytest.fixture(scope="module")
def runs(tiny, no_page, tmp_path_factory):
    """A run of four steps; one of micro-batches of half the size; and what is left of the first at step 2, gone
    on with."""
    folder, quiet = tmp_path_factory.mktemp("runs"), Console(quiet=True)
    halves = tiny().trainer.micro_batch_size // 2
    configs = {
        "whole": tiny(RATES | {"trainer.checkpoint_every": 2}),
        "halves": tiny(RATES | {"trainer.micro_batch_size": halves}),
        "plain": tiny(SHORT),
    }
    with no_page():
        found = {name: pretrain(config, RunDir(folder / name), console=quiet).run for name, config in configs.items()}
        parts = RunDir(folder / "parts")
        shutil.copytree(found["whole"].path, parts.path)
        shutil.rmtree(parts.checkpoint(4))
        found["parts"] = pretrain(configs["whole"], parts, resume=True, console=quiet).run
    return found


def losses(run, key="train/loss"):
    return [line[key] for line in read_metrics(run.metrics) if key in line]


def test_losses_do_not_depend_on_micro_batches(runs):
    assert losses(runs["halves"]) == pytest.approx(losses(runs["whole"]), rel=1e-5)
    assert losses(runs["plain"])[0] != pytest.approx(losses(runs["whole"])[0], rel=1e-3)


def test_a_run_goes_on_bit_for_bit(runs):
    a, b = (FolderCheckpointIO().load_checkpoint(runs[name].checkpoint(4)) for name in ("whole", "parts"))
    assert all(torch.equal(a["state_dict"][name], tensor) for name, tensor in b["state_dict"].items())


def test_births_and_their_snapshots_know_no_dropout(runs):
    whole, plain = (Snapshot.read(runs[name].snapshot(0)) for name in ("whole", "plain"))
    assert all(np.array_equal(array, plain.arrays[name], equal_nan=True) for name, array in whole.arrays.items())
    assert losses(runs["whole"], "val/loss")[0] == losses(runs["plain"], "val/loss")[0]
