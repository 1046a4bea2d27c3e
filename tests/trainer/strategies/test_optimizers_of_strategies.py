"""Every optimizer under every strategy that can run it, in one launch. A run is handed from strategy to strategy and at
last to a single process: each two steps have the losses of a run in a single process all along."""

import importlib.util
from dataclasses import asdict, replace

import pytest
import yaml
from rich.console import Console

from birthmark.data.batch_sizes import BatchRamp
from birthmark.measure.records import RunDir, read_metrics
from birthmark.models.adapter_config import AdapterConfig
from birthmark.trainer.optimizers.table import OPTIMIZERS, optimizer_strategy_problem
from birthmark.trainer.run import pretrain
from birthmark.trainer.strategies.table import STRATEGIES

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_SOAP = importlib.util.find_spec("pytorch_optimizer") is not None
#: AdamW runs under every strategy in test_strategies.py.
NAMES = [name for name in OPTIMIZERS if name != "adamw" and (name != "soap" or HAS_SOAP)]
#: Of a loss. The first eigenbasis of SOAP has directions without a gradient, which rounding alone orients; Adam then
#: steps along them. Without its state a run would be off by several percent.
TOLERANCE = {"soap": 5e-3}
LEG = 2


def can_run(name, strategy):
    """Whether a strategy's processes can be launched here with what has this name: an optimizer, ``ramp``, ``lora``."""
    facts = STRATEGIES[strategy]
    if not facts.launched or (facts.engine and not HAS_DEEPSPEED):
        return False
    if name == "lora":
        return True
    return not facts.engine if name == "ramp" else optimizer_strategy_problem(name, strategy) is None


def legs(number, name):
    """Strategies in the order in which they take a run over; each optimizer begins with another."""
    able = [strategy for strategy in STRATEGIES if can_run(name, strategy)]
    first = number % len(able)
    return [*able[first:], *able[:first], "single"]


#: And AdamW with a batch that grows on the way, and with it the micro-batches of a step.
NAMES.append("ramp")
#: And an adapter on a frozen model; all kinds: test_adapters_of_runs.py.
NAMES.append("lora")
LORA = {"kind": "lora", "rank": 2}
RAMP = {"start": 2, "increment": 2, "sequences": 12}
LEGS = {name: legs(number, name) for number, name in enumerate(NAMES)}
PAIRS = [(name, strategy) for name, strategies in LEGS.items() for strategy in strategies]


@pytest.fixture(scope="module")
def config(tiny):
    return tiny(
        {
            "trainer.global_batch_size": 8,
            "trainer.checkpoint_every": LEG,
            "trainer.keep_last": 1,
            "snapshot.enabled": False,
            "optim.schedule": "constant",
            "optim.weight_decay": 0.2,
        }
    )


def logged(run):
    return {r["step"]: r["train/loss"] for r in read_metrics(run.metrics) if "train/loss" in r}


def of(config, name, n_legs, base=""):
    trainer = replace(config.trainer, max_steps=LEG * n_legs)
    if name == "ramp":
        return replace(config, trainer=replace(trainer, micro_batch_size=1, batch_ramp=BatchRamp(**RAMP)))
    if name == "lora":
        return replace(config, trainer=trainer, adapter=AdapterConfig(**LORA), init_from=base)
    return replace(config, optim=replace(config.optim, name=name), trainer=trainer)


@pytest.fixture(scope="module")
def base(config, tmp_path_factory):
    """What the adapter is attached to."""
    run = pretrain(
        of(config, "adamw", 1), RunDir(tmp_path_factory.mktemp("base") / "run"), console=Console(quiet=True)
    ).run
    return f"{run.path}@{LEG}"


@pytest.fixture(scope="module")
def handed_on(config, base, launch_runs, tmp_path_factory):
    """Losses by optimizer and step of runs that strategies hand on to each other."""
    folder = tmp_path_factory.mktemp("launched")
    (folder / "run.yaml").write_text(yaml.safe_dump(asdict(config)))
    own = {
        "ramp": ["--trainer.micro_batch_size=1", *(f"--trainer.batch_ramp.{k}={v}" for k, v in RAMP.items())],
        "lora": [f"--init_from={base}", *(f"--adapter.{k}={v}" for k, v in LORA.items())],
    }
    launch_runs(
        folder / "run.yaml",
        [
            (
                folder / name,
                leg > 0,
                [
                    *own.get(name, [f"--optim.name={name}"]),
                    f"--trainer.strategy={strategy}",
                    f"--trainer.max_steps={LEG * (leg + 1)}",
                ],
            )
            for name in NAMES
            for leg, strategy in enumerate(LEGS[name][:-1])
        ],
    )
    runs = {name: RunDir.open(folder / name) for name in NAMES}
    for name, run in runs.items():
        pretrain(of(config, name, len(LEGS[name]), base), run, resume=True, console=Console(quiet=True))
    return {name: logged(run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def single(config, base, tmp_path_factory):
    """Losses by optimizer and step of runs in a single process."""
    folder = tmp_path_factory.mktemp("single")
    return {
        name: logged(
            pretrain(of(config, name, len(LEGS[name]), base), RunDir(folder / name), console=Console(quiet=True)).run
        )
        for name in NAMES
    }


@pytest.mark.parametrize(("name", "strategy"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_an_optimizer_goes_on_under_a_strategy_with_the_losses_of_the_single_process(name, strategy, handed_on, single):
    leg = LEGS[name].index(strategy)
    # The first step of a leg is that of the weights that it was handed; the state that came with them shows after it.
    steps = range(LEG * leg + 1, LEG * (leg + 1) + 1)
    ours, theirs = ({step: run[name][step] for step in steps} for run in (handed_on, single))
    assert ours == pytest.approx(theirs, rel=TOLERANCE.get(name, 1e-5))
