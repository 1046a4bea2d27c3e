"""Every optimizer under every strategy that can run it, in one launch. A run is handed from strategy to strategy and at
last to a single process: each two steps have the losses of a run in a single process all along."""

import importlib.util

import pytest
from quiet_runs import averages, config_file, logged, run

from birthmark.measure.records import Snapshot
from birthmark.trainer.config_file import read_config
from birthmark.trainer.optimizers.table import OPTIMIZERS, optimizer_strategy_problem
from birthmark.trainer.strategies.table import STRATEGIES

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_SOAP = importlib.util.find_spec("pytorch_optimizer") is not None
#: Of a loss. The first eigenbasis of SOAP has directions without a gradient, which rounding alone orients; Adam then
#: steps along them. Without its state a run would be off by several percent.
TOLERANCE = {"soap": 5e-3}
LEG = 2
#: Strategies in the order in which they take a run over, a single process at last. AdamW goes through all, and through
#: replicas of shards. Processes of ddp step as a single one does, and zero1 shards the state that zero2 shards: what
#: steps element by element takes one of each two.
LEGS = {
    "adamw": ["single", "replicas", "ddp", "fsdp2", "zero1", "zero2", "zero3", "single"],
    "nadam": ["fsdp2", "zero1", "zero3", "single"],
    "sgd": ["zero2", "zero3", "fsdp2", "single"],
    "lion": ["zero3", "ddp", "fsdp2", "zero2", "single"],
    "adafactor": ["ddp", "single"],
    "muon": ["ddp", "fsdp2", "single"],
    "soap": ["ddp", "single"],
    # The step of AdamW scales gradients to the norm, which is small here.
    "clip": ["fsdp2", "single"],
    # State in bf16, rounded by the places of elements.
    "bf16": ["fsdp2", "ddp", "single"],
    # A batch that grows on the way, and with it the micro-batches of a step.
    "ramp": ["fsdp2", "ddp", "single"],
    # Adapters on a frozen model.
    "lora": ["zero2", "zero3", "ddp", "fsdp2", "single"],
    "prefix": ["zero3", "fsdp2", "single"],
    "prefix_plus": ["fsdp2", "zero3", "single"],
}
LEGS = {
    name: [way for way in ways if HAS_DEEPSPEED or not way.startswith("zero")]
    for name, ways in LEGS.items()
    if name != "soap" or HAS_SOAP
}
SLOW = {"prefix", "prefix_plus"}
NAMES = [name for name in LEGS if name not in SLOW]
PAIRS = [(name, leg) for name in NAMES for leg in range(len(LEGS[name]))]
#: Fields of a run by its name, where they are more than the optimizer's.
FIELDS = {
    "adamw": {"optim.ema": "0.8", "trainer.keep_last": "null"}
    | {"snapshot.enabled": "true", "snapshot.gradients": "true"},
    "clip": {"optim.grad_clip": "0.02", "optim.clip_in_step": "true"},
    "bf16": {"optim.state_dtype": "bf16", "optim.beta2": "0.999"},
    "ramp": {"trainer.micro_batch_size": "1"}
    | {f"trainer.batch_ramp.{name}": n for name, n in (("start", "2"), ("increment", "2"), ("sequences", "12"))},
    "lora": {"adapter.kind": "lora", "adapter.rank": "2", "adapter.maps": "[attn.q, mlp.down]"},
    "prefix": {"adapter.kind": "prefix", "adapter.length": "3", "optim.lr": "0.05"},
    "prefix_plus": {"adapter.kind": "prefix_plus", "optim.lr": "0.05"},
}


def flags(fields, way):
    spread = {"trainer.strategy": "fsdp2", "trainer.replicas": 2} if way == "replicas" else {"trainer.strategy": way}
    return [f"--{name}={value}" for name, value in (fields | spread).items()]


@pytest.fixture(scope="module")
def fields(tiny, tmp_path_factory):
    """The config's file; and ``fields(name, n_legs)``: those that differ in a run of so many legs."""
    folder = tmp_path_factory.mktemp("handed")
    config = tiny(
        {"trainer.global_batch_size": 8, "trainer.checkpoint_every": LEG, "trainer.keep_last": 1}
        | {"snapshot.enabled": False, "optim.schedule": "constant", "optim.weight_decay": 0.2}
    )
    config_file(file := folder / "run.yaml", config)
    # What the adapter is attached to.
    base = run(read_config(file, {"trainer.max_steps": f"{LEG}"}), folder / "base")

    def of(name, n_legs):
        more = FIELDS.get(name, {"optim.name": name}) | {"trainer.max_steps": f"{LEG * n_legs}"}
        return more | ({"init_from": f"{base.path}@{LEG}"} if "adapter.kind" in more else {})

    return file, of


@pytest.fixture(scope="module")
def trained(fields, launch_runs):
    """``trained(names)``: by name a run that strategies hand on to each other, and one of a single process."""
    file, of = fields

    def train(name, n_legs, path, resume=False):
        return run(read_config(file, of(name, n_legs)), file.parent / path, resume=resume)

    def both(names):
        # Those that begin with a single process.
        for name in (name for name in names if LEGS[name][0] == "single"):
            train(name, 1, name)
        launched = [
            (file.parent / name, leg > 0, flags(of(name, leg + 1), way))
            for name in names
            for leg, way in enumerate(LEGS[name][:-1])
            if way != "single"
        ]
        launch_runs(file, launched)
        n = {name: len(LEGS[name]) for name in names}
        return {name: (train(name, n[name], name, True), train(name, n[name], f"single-{name}")) for name in names}

    return both


@pytest.fixture(scope="module")
def runs(trained):
    return trained(NAMES)


@pytest.mark.parametrize(("name", "leg"), PAIRS, ids=[f"{name}-{LEGS[name][leg]}" for name, leg in PAIRS])
def test_an_optimizer_goes_on_under_a_strategy_with_the_losses_of_the_single_process(name, leg, runs):
    # The first step of a leg is that of the weights that it was handed; the state that came with them shows after it.
    steps = range(LEG * leg + 1, LEG * (leg + 1) + 1)
    losses = [logged(one, "train/loss") for one in runs[name]]
    ours, theirs = ({step: found[step] for step in steps} for found in losses)
    assert ours == pytest.approx(theirs, rel=TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize(("leg", "way"), [*enumerate(LEGS["adamw"])])
def test_a_checkpoint_holds_of_each_process_what_it_alone_has(leg, way, runs):
    """Keep one of equal copies."""
    files = [*runs["adamw"][0].checkpoint(LEG * (leg + 1)).glob("*.safetensors")]
    assert len(files) == (1 if way in ("single", "ddp", "replicas") else 2)


def test_averages_and_snapshots_go_on_as_well(runs):
    ours, theirs = runs["adamw"]
    last = LEG * len(LEGS["adamw"])
    assert averages(ours, last) == pytest.approx(averages(theirs, last), abs=1e-5)
    found = logged(ours, "ema/val/loss")
    assert list(found) == [*range(LEG, last + 1, LEG)]
    assert found == pytest.approx(logged(theirs, "ema/val/loss"), rel=1e-5)
    biases = [[Snapshot.read(folder).bias for folder in one.snapshot_folders()] for one in (ours, theirs)]
    assert len(biases[0]) == len(biases[1]) >= 2
    for bias, expected in zip(*biases, strict=True):
        assert bias == pytest.approx(expected, rel=1e-2, abs=1e-3)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_DEEPSPEED, reason="DeepSpeed is not installed")
def test_prefixes_of_keys_go_from_strategy_to_strategy_too(trained):
    for name, (ours, theirs) in trained(sorted(SLOW)).items():
        alone = logged(theirs, "train/loss")
        assert logged(ours, "train/loss") == pytest.approx(alone, rel=1e-5), name
        # They would be the same all along if nothing were trained.
        assert len({round(loss, 4) for loss in alone.values()}) > 2, name


def test_every_optimizer_meets_every_kind_of_strategy_that_can_run_it():
    """A new one gets its legs here."""
    kinds = ({"ddp"}, {"fsdp2", "replicas"}, {"zero1", "zero2"}, {"zero3"})
    names = set(OPTIMIZERS) - (set() if HAS_SOAP else {"soap"})
    assert names <= set(LEGS)
    for name in names:
        able = {
            way
            for way, facts in STRATEGIES.items()
            if optimizer_strategy_problem(name, way) is None and (HAS_DEEPSPEED or not facts.engine)
        }
        missed = [kind for kind in kinds if kind & able and not kind & set(LEGS[name])]
        assert missed in ([], [{"ddp"}] if OPTIMIZERS[name].elementwise else []), name
