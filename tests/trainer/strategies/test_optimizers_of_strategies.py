"""Every optimizer under every strategy that can run it, in one launch: losses of the single process, also when a run
goes on from a single process's checkpoint, and the other way round."""

import importlib.util
import shutil
from dataclasses import asdict, replace

import pytest
import yaml
from rich.console import Console

from birthmark.measure.records import RunDir, read_metrics
from birthmark.trainer.optimizers import OPTIMIZERS
from birthmark.trainer.run import pretrain
from birthmark.trainer.strategies.table import STRATEGIES

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None

#: AdamW runs under every strategy in test_strategies.py.
PAIRS = [
    (optimizer, strategy)
    for optimizer, row in OPTIMIZERS.items()
    for strategy, facts in STRATEGIES.items()
    if facts.launched and optimizer != "adamw" and (row.elementwise or not facts.shards_optimizer)
]


def logged(run):
    return {r["step"]: r["train/loss"] for r in read_metrics(run.metrics) if "train/loss" in r}


def half(run, folder):
    """A copy of a run of six steps as it was after three."""
    shutil.copytree(run.path, folder)
    shutil.rmtree(RunDir(folder).checkpoint(6))
    return RunDir(folder)


@pytest.fixture(scope="module")
def config(tiny):
    return tiny(
        {
            "trainer.global_batch_size": 8,
            "trainer.checkpoint_every": 3,
            "snapshot.enabled": False,
            "optim.schedule": "constant",
            "optim.weight_decay": 0.2,
        }
    )


@pytest.fixture(scope="module")
def single(config, tmp_path_factory):
    """A run in a single process by optimizer."""
    folder = tmp_path_factory.mktemp("single")

    def run(name):
        its = replace(config, optim=replace(config.optim, name=name))
        return pretrain(its, RunDir(folder / name), console=Console(quiet=True)).run

    return {name: run(name) for name in OPTIMIZERS if name != "adamw"}


@pytest.fixture(scope="module")
def launched_runs(config, single, launch_runs, tmp_path_factory):
    """The folder of all launched runs: OPTIMIZER-STRATEGY from birth, and OPTIMIZER-STRATEGY-resumed."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "run.yaml").write_text(yaml.safe_dump(asdict(config)))
    runs = []
    for optimizer, strategy in PAIRS:
        if STRATEGIES[strategy].engine and not HAS_DEEPSPEED:
            continue
        flags = [f"--optim.name={optimizer}", f"--trainer.strategy={strategy}"]
        runs.append((folder / f"{optimizer}-{strategy}", False, flags))
        runs.append((half(single[optimizer], folder / f"{optimizer}-{strategy}-resumed").path, True, flags))
    launch_runs(folder / "run.yaml", runs)
    return folder


@pytest.fixture(params=PAIRS, ids=["-".join(pair) for pair in PAIRS])
def pair(request):
    if STRATEGIES[request.param[1]].engine and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed, an optional dependency, is not installed")
    return request.param


def test_an_optimizer_under_a_strategy_has_the_losses_of_the_single_process(pair, launched_runs, single):
    ours, theirs = logged(RunDir.open(launched_runs / "-".join(pair))), logged(single[pair[0]])
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_run_of_a_single_process_goes_on_under_a_strategy(pair, launched_runs, single):
    ours, theirs = logged(RunDir.open(launched_runs / f"{'-'.join(pair)}-resumed")), logged(single[pair[0]])
    assert len(ours) == 6
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_run_under_a_strategy_goes_on_in_a_single_process(pair, launched_runs, config, single, tmp_path):
    optimizer = pair[0]
    part = half(RunDir.open(launched_runs / "-".join(pair)), tmp_path / "run")
    pretrain(
        replace(config, optim=replace(config.optim, name=optimizer)), part, resume=True, console=Console(quiet=True)
    )
    assert logged(part) == pytest.approx(logged(single[optimizer]), rel=1e-5)
