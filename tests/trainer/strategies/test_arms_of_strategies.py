"""Every arm of every study under every strategy, in one launch: losses, gradients and snapshots of a loop by hand in a
single process. Arms that hold the same tensors are the same to a strategy: by default one of them runs."""

import importlib.util
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles import routing_cost
from torch.nn import functional as F

import birthmark
from birthmark.measure.measurement import measure
from birthmark.models.birth import born, empty_decoder
from birthmark.models.config import DropoutConfig, ExpertsConfig
from birthmark.models.dropout import Dropout, keys_of_samples
from birthmark.study.arms.trials import arm_trials, read_arm_study
from birthmark.study.table import KINDS, kind_of
from birthmark.trainer.optimizers.parameter_groups import parameter_groups
from birthmark.trainer.strategies.table import STRATEGIES

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
STUDIES = Path(birthmark.__file__).parent / "configs" / "studies"

#: Sizes at which windows, prefixes and grouped positions still differ from none; every draw at its usual scale.
TINY = {"model.d_model": 16, "model.n_layers": 2, "model.n_heads": 2, "model.vocab_size": 24, "model.max_seq_len": 20}
TINY |= {"model.init.kind": "fan_in", "snapshot.seq_len": 20, "optim.warmup_steps": 0, "optim.lr": 0.01}
TINY |= {"trainer.device": "cpu", "trainer.max_steps": 2, "trainer.micro_batch_size": 2, "trainer.global_batch_size": 4}

#: More experts than some rank's tokens reach, losses of their router that a rank's tokens decide.
EXPERTS = ExpertsConfig(12, 1, renormalise=False, d_ff=12, d_shared=8, n_dense=1, load_balance=0.3, router_z_loss=0.1)
DROPOUT = DropoutConfig(embedding=0.1, residual=0.2, attention=0.3)

#: Arms of the study of blocks that all strategies train: maps in two steps, and vectors whose product is a factor.
ALSO = ("sinks_blocks: latent_queries", "sinks_blocks: differential")

#: Strategies that can run here. The engine's first stage shards what its second does: it gets every fourth arm.
WAYS = [name for name, facts in STRATEGIES.items() if facts.launched and (HAS_DEEPSPEED or not facts.engine)]

# A run of two processes for each config: losses and gradient norms of its steps and, where weights are sharded and arms
# are measured, the scalars of a snapshot.
SCRIPT = """
import gc, json, logging, pickle, sys, time, warnings
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from birthmark.measure.measurement import measure
from birthmark.measure.ranks import sum_over_ranks, world_size
from birthmark.models import linear_cross_entropy
from birthmark.models.experts.routed_mlp import Mixture
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.initial_model import initialize_model
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.processes.process_group import LauncherEnvironment
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.strategies.lightning_setup import set_up_strategy
from birthmark.trainer.strategies.table import STRATEGIES

# Models of this size would take the plain formula.
linear_cross_entropy.PLAIN = 0
# Experts are one operator, whoever shards their weights: there is no other way, but where a snapshot looks at units.
one_by_one = Mixture._mixed

def looked_at(self, *arguments):
    assert arguments[-1] is not None, "nobody looks at the experts' units"
    return one_by_one(self, *arguments)

Mixture._mixed = looked_at

configs, tokens, out = sys.argv[1:]
(configs, measured), tokens_SBT = pickle.loads(Path(configs).read_bytes()), torch.load(tokens)
device, where = torch.device("cpu"), launched_process()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")


class Watch(L.Callback):
    def __init__(self, measured):
        self.measured, self.steps, self.snapshot = measured, [], {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for seen in module.watch.take():
            loss = sum_over_ranks(torch.tensor(seen.loss)) / world_size()
            self.steps.append((loss.item(), seen.grad_norm))

    def on_train_end(self, trainer, module):
        if self.measured:
            self.snapshot = measure(module.model, tokens_SBT[0, :, :-1].numpy()).scalars


def train(config):
    setup = set_up_strategy(config.trainer, config.optim.grad_clip, device)
    model = initialize_model(config, config.init_seed, device, setup.shard)
    watch = Watch(measured and STRATEGIES[config.trainer.strategy].shards_weights)
    mine = tokens_SBT.tensor_split(world_size(), dim=1)[where.rank]
    trainer = L.Trainer(
        accelerator="cpu", devices=world_size(), strategy=setup.lightning, max_steps=len(mine), max_epochs=-1,
        callbacks=[watch], plugins=[FolderCheckpointIO(), LauncherEnvironment(where)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(PretrainModule(model, config.optim, config.trainer), DataLoader(list(mine), batch_size=None))
    # DeepSpeed collects garbage whenever it starts, and would look through all libraries each time.
    gc.freeze()
    return watch.steps, watch.snapshot


results = {}
for way, of_arms in configs.items():
    # Each way in a group of its own, as runs that follow one another in one Python process have them.
    with join_process_group(where, device):
        results[way] = {arm: train(config) for arm, config in of_arms.items()}
        # A snapshot keeps rank 0 longer. The other must not find the store of a group that rank 0 has yet to close.
        torch.distributed.barrier()
    time.sleep(where.rank)
if where.rank == 0:
    Path(out).write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def every_arm(tmp_path_factory):
    """Every arm of every study by name; those that come to the same config once."""
    folder, found = tmp_path_factory.mktemp("trials"), {}
    for file in sorted(STUDIES.glob("*.yaml")):
        if kind_of(file) is KINDS["arms"]:
            study = replace(read_arm_study(file), init_seeds=(0,))
            # Optimizers under strategies have a test of their own.
            if any(field.startswith("optim.") for fields in study.arms.values() for field in fields):
                continue
            for trial in arm_trials(study, folder, TINY):
                found[trial.config.run_dir] = (f"{file.stem}: {trial.arm}", trial.config)
    plain = next(iter(found.values()))[1]
    return dict(found.values()) | {
        "experts and dropout": replace(plain, model=replace(plain.model, experts=EXPERTS, dropout=DROPOUT))
    }


@pytest.fixture(scope="module")
def batches():
    """The batches of two steps ``[2, B, T+1]``."""
    size = (2, TINY["trainer.global_batch_size"], TINY["model.max_seq_len"] + 1)
    return torch.randint(TINY["model.vocab_size"], size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def arms(every_arm):
    """The first arm of those that hold the same tensors. Of the study of blocks two: the others hold gains and biases
    as arms of other studies do."""
    first = {}
    for arm, config in every_arm.items():
        if arm.startswith("sinks_blocks: ") and arm not in ALSO:
            continue
        model = empty_decoder(config.model)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        first.setdefault(tuple((name, tuple(tensor.shape)) for name, tensor in tensors), arm)
    return {arm: every_arm[arm] for arm in first.values()}


def by_hand(config, tokens_SBT, measured=True):
    """Losses and gradient norms of the steps, and a snapshot's scalars: torch alone."""
    model = born(config.model, config.init_seed)
    optimizer = config.optim.optimizer.build(parameter_groups(model, config.optim.optimizer), config.optim.lr)
    steps = []
    for step, batch_BT in enumerate(tokens_SBT):
        n = len(batch_BT)
        keys_B = torch.from_numpy(keys_of_samples(0, range(step * n, step * n + n)))
        first = config.model.attention.prefix or 1  # of the targets; those before it stand in the prefix
        logits_BTV, targets_BT = (
            model(batch_BT[:, :-1], dropout=Dropout(config.model.dropout, keys_B)),
            batch_BT[:, first:],
        )
        loss = F.cross_entropy(logits_BTV[:, first - 1 :].flatten(0, 1), targets_BT.flatten())
        cross_entropy = loss.item()
        if config.model.experts.n_experts:
            dropout = Dropout(config.model.dropout, keys_B)
            _, cost, chosen = routing_cost(model, batch_BT[:, :-1], dropout=dropout)
            loss = loss + cost
            # Some expert gets no token of one process.
            assert min(len(half.unique()) for one in chosen for half in one.chunk(2)) < config.model.experts.n_experts
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((cross_entropy, norm.item()))
    return steps, measure(model, tokens_SBT[0, :, :-1].numpy()).scalars if measured else {}


@pytest.fixture(scope="module")
def expected(arms, batches):
    return {arm: by_hand(config, batches) for arm, config in arms.items()}


def arms_of(way, arms):
    """Those of the arms that a strategy trains."""
    return [arm for i, arm in enumerate(reversed(arms)) if way != "zero1" or i % 4 == 0]


def spread(of_arms, batches, measured, forked, folder):
    """(steps, snapshot) by strategy and arm."""
    configs = {
        way: {
            arm: replace(of_arms[arm], trainer=replace(of_arms[arm].trainer, strategy=way))
            for arm in arms_of(way, of_arms)
        }
        for way in WAYS
    }
    (folder / "configs.pickle").write_bytes(pickle.dumps((configs, measured)))
    torch.save(batches, folder / "tokens.pt")
    (folder / "script.py").write_text(SCRIPT)
    forked(folder / "script.py", folder / "configs.pickle", folder / "tokens.pt", folder / "results.json")
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def trained(arms, batches, forked, tmp_path_factory):
    return spread(arms, batches, True, forked, tmp_path_factory.mktemp("arms"))


def agree(trained, expected, measured, way):
    """Steps and snapshots of one way to spread runs, and those by hand."""
    assert [*trained[way]] == arms_of(way, expected)
    for arm, (steps, snapshot) in trained[way].items():
        theirs, scalars = expected[arm]
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in theirs], rel=1e-6), arm
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in theirs], rel=1e-5), arm
        if STRATEGIES[way].shards_weights and measured:
            assert snapshot == pytest.approx(scalars, rel=1e-4, abs=1e-5), arm
        else:
            assert not snapshot


@pytest.mark.parametrize("way", WAYS)
def test_every_arm_trains_as_a_single_process_does(way, trained, expected):
    agree(trained, expected, True, way)


@pytest.mark.slow
def test_arms_that_hold_the_same_tensors_do_too(every_arm, arms, batches, forked, tmp_path):
    others = {arm: config for arm, config in every_arm.items() if arm not in arms}
    assert others
    expected = {arm: by_hand(config, batches, False) for arm, config in others.items()}
    trained = spread(others, batches, False, forked, tmp_path)
    for way in trained:
        agree(trained, expected, False, way)
