"""The shipped backcopy runs, a tenth as long: a sink in one and none in its head-normed twin."""

from pathlib import Path

import pytest
from rich.console import Console

import birthmark
from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.config_file import read_config
from birthmark.trainer.run import pretrain

CONFIGS = Path(birthmark.__file__).parent / "configs"


def final(name, path):
    """Last value of every metric after 450 steps of a shipped config, of half as many sequences."""
    steps = {"trainer.max_steps": 450, "trainer.checkpoint_every": 450}
    batch = {"trainer.micro_batch_size": 32, "trainer.global_batch_size": 32}
    config = read_config(CONFIGS / name, steps | batch | {"trainer.device": "cpu", "log.wandb": "off"})
    run = pretrain(config, RunDir(path), console=Console(quiet=True)).run
    return {key: value for record in read_metrics(run.metrics) for key, value in record.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sinks")
    return [final(name, folder / name) for name in ("sinks.yaml", "sinks_headnorm.yaml")]


def test_a_sink_forms_in_the_plain_run_and_not_in_its_head_normed_twin(runs):
    plain, headnorm = runs
    assert plain["bias_text/sink_mass"] > 0.6
    assert plain["bias_text/sink_mass"] > 8 * plain["bias_text/sink_uniform"]
    assert headnorm["bias_text/sink_mass"] < 0.02
    assert plain["bias/sink_mass"] > 2 * plain["bias/sink_uniform"] > 10 * headnorm["bias/sink_mass"]


def test_both_solve_the_task(runs):
    for run in runs:
        # Chance on a trigger position is about 4 nats; the exact floor of the whole task is 2.437.
        assert run["val/loss_trigger"] < 0.3
        assert run["val/loss"] < 2.55
