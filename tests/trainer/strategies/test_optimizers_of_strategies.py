"""Every optimizer under every strategy that can run it, in one launch. A run is handed from strategy to strategy and at
last to a single process: each two steps have the losses of a run in a single process all along."""

import importlib.util
from dataclasses import asdict

import pytest
import yaml
from quiet_runs import averages, logged, run

from birthmark.measure.records import Snapshot
from birthmark.trainer.config_file import read_config
from birthmark.trainer.optimizers.table import OPTIMIZERS, optimizer_strategy_problem
from birthmark.trainer.strategies.table import STRATEGIES

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_SOAP = importlib.util.find_spec("pytorch_optimizer") is not None
NAMES = [name for name in OPTIMIZERS if name != "soap" or HAS_SOAP]
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
    """Strategies in the order in which they take a run over; each optimizer begins with another, AdamW with none, and
    AdamW has replicas of shards too."""
    able = [strategy for strategy in STRATEGIES if can_run(name, strategy)]
    first = number % len(able)
    if name == "adamw":
        return ["single", "replicas", *able, "single"]
    return [*able[first:], *able[:first], "single"]


#: And AdamW with a batch that grows on the way, and with it the micro-batches of a step.
NAMES.append("ramp")
#: And an adapter on a frozen model; all kinds: test_adapters_of_runs.py.
NAMES.append("lora")
LEGS = {name: legs(number, name) for number, name in enumerate(NAMES)}
PAIRS = [(name, leg) for name, strategies in LEGS.items() for leg in range(len(strategies))]
#: Fields of a run by its name, where they are more than the optimizer's.
FIELDS = {
    "adamw": {
        "optim.ema": "0.8",
        "snapshot.enabled": "true",
        "snapshot.gradients": "true",
        "trainer.keep_last": "null",
    },
    "ramp": {
        "trainer.micro_batch_size": "1",
        "trainer.batch_ramp.start": "2",
        "trainer.batch_ramp.increment": "2",
        "trainer.batch_ramp.sequences": "12",
    },
    "lora": {"adapter.kind": "lora", "adapter.rank": "2"},
}


def flags(fields, way):
    spread = {"trainer.strategy": "fsdp2", "trainer.replicas": 2} if way == "replicas" else {"trainer.strategy": way}
    return [f"--{name}={value}" for name, value in (fields | spread).items()]


@pytest.fixture(scope="module")
def fields(tiny, tmp_path_factory):
    """The config's file; and ``fields(name, n_legs)``: those that differ in a run of so many legs."""
    folder = tmp_path_factory.mktemp("handed")
    config = tiny(
        {
            "trainer.global_batch_size": 8,
            "trainer.checkpoint_every": LEG,
            "trainer.keep_last": 1,
            "snapshot.enabled": False,
            "optim.schedule": "constant",
            "optim.weight_decay": 0.2,
        }
    )
    (file := folder / "run.yaml").write_text(yaml.safe_dump(asdict(config)))
    # What the adapter is attached to.
    base = run(read_config(file, {"trainer.max_steps": f"{LEG}"}), folder / "base")

    def of(name, n_legs):
        more = FIELDS.get(name, {"optim.name": name}) | ({"init_from": f"{base.path}@{LEG}"} if name == "lora" else {})
        return more | {"trainer.max_steps": f"{LEG * n_legs}"}

    return file, of


@pytest.fixture(scope="module")
def handed_on(fields, launch_runs):
    """Runs by optimizer that strategies hand on to each other."""
    file, of = fields
    run(read_config(file, of("adamw", 1)), file.parent / "adamw")
    launched = [
        (file.parent / name, leg > 0, flags(of(name, leg + 1), way))
        for name in NAMES
        for leg, way in enumerate(LEGS[name][:-1])
        if way != "single"
    ]
    launch_runs(file, launched)
    return {name: run(read_config(file, of(name, len(LEGS[name]))), file.parent / name, resume=True) for name in NAMES}


@pytest.fixture(scope="module")
def single(fields):
    """Runs by optimizer in a single process."""
    file, of = fields
    return {name: run(read_config(file, of(name, len(LEGS[name]))), file.parent / f"single-{name}") for name in NAMES}


@pytest.mark.parametrize(("name", "leg"), PAIRS, ids=[f"{name}-{LEGS[name][leg]}" for name, leg in PAIRS])
def test_an_optimizer_goes_on_under_a_strategy_with_the_losses_of_the_single_process(name, leg, handed_on, single):
    # The first step of a leg is that of the weights that it was handed; the state that came with them shows after it.
    steps = range(LEG * leg + 1, LEG * (leg + 1) + 1)
    losses = [logged(runs[name], "train/loss") for runs in (handed_on, single)]
    ours, theirs = ({step: found[step] for step in steps} for found in losses)
    assert ours == pytest.approx(theirs, rel=TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize(("leg", "way"), [*enumerate(LEGS["adamw"])])
def test_a_checkpoint_holds_of_each_process_what_it_alone_has(leg, way, handed_on):
    """Keep one of equal copies."""
    files = [*handed_on["adamw"].checkpoint(LEG * (leg + 1)).glob("*.safetensors")]
    assert len(files) == (1 if way in ("single", "ddp", "replicas") else 2)


def test_averages_and_snapshots_go_on_as_well(handed_on, single):
    ours, theirs = handed_on["adamw"], single["adamw"]
    last = LEG * len(LEGS["adamw"])
    assert averages(ours, last) == pytest.approx(averages(theirs, last), abs=1e-5)
    found = logged(ours, "ema/val/loss")
    assert list(found) == [*range(LEG, last + 1, LEG)]
    assert found == pytest.approx(logged(theirs, "ema/val/loss"), rel=1e-5)
    biases = [[Snapshot.read(folder).bias for folder in one.snapshot_folders()] for one in (ours, theirs)]
    assert len(biases[0]) == len(biases[1]) >= 2
    for bias, expected in zip(*biases, strict=True):
        assert bias == pytest.approx(expected, rel=1e-2, abs=1e-3)
