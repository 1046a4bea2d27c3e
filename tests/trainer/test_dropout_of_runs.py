"""Runs with dropout: however a batch is shared, and wherever a run stops, the same samples lose the same channels."""

import numpy as np
import pytest
from quiet_runs import logged, run, same_weights, up_to

from birthmark.measure.records import Snapshot

SHORT = {"trainer.max_steps": 4, "snapshot.n_strangers": 0}
RATES = SHORT | {"model.dropout.embedding": 0.1, "model.dropout.residual": 0.2, "model.dropout.attention": 0.1}


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """A run of four steps; one of micro-batches of half the size; and what is left of the first at step 2, gone
    on with."""
    folder = tmp_path_factory.mktemp("runs")
    halves = tiny().trainer.micro_batch_size // 2
    configs = {
        "whole": tiny(RATES | {"trainer.checkpoint_every": 2}),
        "halves": tiny(RATES | {"trainer.micro_batch_size": halves}),
        "plain": tiny(SHORT),
    }
    found = {name: run(config, folder / name) for name, config in configs.items()}
    parts = up_to(2, found["whole"], folder / "parts")
    return found | {"parts": run(configs["whole"], parts.path, resume=True)}


def test_losses_do_not_depend_on_micro_batches(runs):
    halves, whole, plain = (logged(runs[name], "train/loss") for name in ("halves", "whole", "plain"))
    assert halves == pytest.approx(whole, rel=1e-5)
    assert plain[1] != pytest.approx(whole[1], rel=1e-3)


def test_a_run_goes_on_bit_for_bit(runs):
    assert same_weights(runs["whole"], runs["parts"], 4)


def test_births_and_their_snapshots_know_no_dropout(runs):
    whole, plain = (Snapshot.read(runs[name].snapshot(0)) for name in ("whole", "plain"))
    assert all(np.array_equal(array, plain.arrays[name], equal_nan=True) for name, array in whole.arrays.items())
    assert logged(runs["whole"], "val/loss")[0] == logged(runs["plain"], "val/loss")[0]
