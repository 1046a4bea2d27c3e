"""The shipped backcopy runs, a tenth as long: a sink in one and none in its head-normed twin."""

import re
from pathlib import Path

import pytest
from quiet_runs import run

import birthmark
from birthmark.measure.metrics_log import read_metrics
from birthmark.trainer.config_file import read_config

ROOT = Path(birthmark.__file__).parent


def final(name, path):
    """Every metric after 450 steps of a shipped config, of half as many sequences; the sink mass of its birth."""
    steps = {"trainer.max_steps": 450, "trainer.checkpoint_every": 450}
    batch = {"trainer.micro_batch_size": 32, "trainer.global_batch_size": 32}
    config = read_config(ROOT / "configs" / name, steps | batch | {"trainer.device": "cpu", "log.wandb": "off"})
    done = run(config, path)
    last = {key: value for record in read_metrics(done.metrics) for key, value in record.items()}
    return last | {"birth": done.snapshots()[0].summary["bias_text"]["sink_mass"]}


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
    for last in runs:
        # Chance on a trigger position is about 4 nats; the exact floor of the whole task is 2.437.
        assert last["val/loss_trigger"] < 0.3
        assert last["val/loss"] < 2.55


def test_the_readmes_sink_mass_of_the_birth_is_that_of_these_runs(runs):
    """Its last one is that of more steps."""
    words = r"sink mass goes from (0\.\d+) to about 0\.\d+; with head-wise RMSNorm it stays at (0\.\d+)"
    ((plain, headnorm),) = re.findall(words, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert runs[0]["birth"] == pytest.approx(float(plain), abs=0.005)
    assert runs[1]["bias_text/sink_mass"] == pytest.approx(float(headnorm), abs=0.02)
