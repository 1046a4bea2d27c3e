"""What two processes of FSDP2 send in a step, what they hold afterwards, and what they get."""

import json
from dataclasses import asdict

import pytest
import yaml

from birthmark.trainer.config import TrainerConfig

# Two steps of each config in one group: collectives of the second by name and dtype, losses, weights at the end, and
# whether all weights are sharded after a step and after an evaluation.
SCRIPT = """
import json, logging, sys, warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from birthmark.measure.measurement import evaluation_mode
from birthmark.models.birth import born
from birthmark.models.tensor_shards import full_tensor
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO
from birthmark.trainer.config_file import read_config
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.processes.process_group import LauncherEnvironment
from birthmark.trainer.processes.launched_process import launched_process
from birthmark.trainer.processes.process_group import join_process_group
from birthmark.trainer.strategies.lightning_setup import set_up_strategy

file, cases, out = sys.argv[1:]
config, cases = read_config(Path(file)), json.loads(Path(cases).read_text())
device, where = torch.device("cpu"), launched_process()
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
MICRO = 3


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "c10d" and isinstance(arguments[1], torch.Tensor):
            name = function.name().split("::")[1].partition(".")[0]
            self.found[f"{name} {arguments[1].dtype}".replace("torch.", "")] += 1
        return function(*arguments, **(options or {}))


class Watch(L.Callback):
    def __init__(self):
        self.losses, self.count = [], Count()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == MICRO:
            self.count.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2 * MICRO - 1:
            self.count.__exit__(None, None, None)
        self.losses.append(outputs["loss"].item())


def case(fields):
    changed = {name: value for name, value in fields.items() if name != "tie_embeddings"}
    run = replace(
        config,
        trainer=replace(config.trainer, **changed),
        model=replace(config.model, tie_embeddings=fields.get("tie_embeddings", False)),
    )
    setup = set_up_strategy(run.trainer, run.optim.grad_clip, device)
    model = born(run.model, 0, "cpu", setup.shard)
    generator = torch.Generator().manual_seed(where.rank)
    batches = [torch.randint(run.model.vocab_size, (2, 9), generator=generator) for _ in range(2 * MICRO)]
    watch = Watch()
    L.Trainer(
        accelerator="cpu", devices=2, strategy=setup.lightning, max_steps=2, max_epochs=-1,
        accumulate_grad_batches=MICRO, callbacks=[watch], logger=False,
        plugins=[FolderCheckpointIO(), LauncherEnvironment(where)], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    ).fit(PretrainModule(model, run.optim, run.trainer), DataLoader(batches, batch_size=None))

    def sharded():
        wanted = run.trainer.strategy == "fsdp2"
        return all((type(p).__name__ == "DTensor") == wanted for p in model.parameters())

    after_step = sharded()
    with evaluation_mode(model):
        model(batches[0])
    return {
        "collectives": watch.count.found,
        "losses": watch.losses,
        "weights": {name: full_tensor(p).flatten()[:64].tolist() for name, p in model.named_parameters()},
        "sharded": [after_step, sharded()],
    }


with join_process_group(where, device):
    results = {name: case(fields) for name, fields in cases.items()}
if where.rank == 0:
    Path(out).write_text(json.dumps(results))
"""

BF16 = {"precision": "bf16"}
CASES = {
    "ddp": {"strategy": "ddp"},
    "whole": {},
    "sharded": {"accumulate": "sharded"},
    "replicas": {"replicas": 2},
    "tied ddp": {"strategy": "ddp", "tie_embeddings": True},
    "tied": {"tie_embeddings": True},
    "bf16": BF16,
    "bf16 gathered wide": BF16 | {"gather": "fp32"},
    "bf16 reduced": BF16 | {"reduce": "bf16"},
    "bf16 ddp": BF16 | {"strategy": "ddp"},
}

#: Blocks of the model, and micro-batches of a step.
BLOCKS, MICRO = 2, 3


@pytest.fixture(scope="module")
def found(tiny, forked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    config = asdict(tiny({"trainer.global_batch_size": 12, "optim.warmup_steps": 0}))
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    cases = {name: {"strategy": "fsdp2"} | fields for name, fields in CASES.items()}
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "script.py").write_text(SCRIPT)
    forked(folder / "script.py", folder / "run.yaml", folder / "cases.json", folder / "found.json")
    return json.loads((folder / "found.json").read_text())


def count(case, name):
    return {key.split()[1]: n for key, n in case["collectives"].items() if key.startswith(name)}


@pytest.mark.parametrize(("case", "reductions"), [("whole", 1), ("sharded", MICRO)])
def test_a_group_is_reduced_once_per_step_or_after_every_micro_batch(found, case, reductions):
    groups = 1 + BLOCKS + 1  # embedding, blocks, last norm and head
    assert count(found[case], "_reduce_scatter_base_") == {"float32": reductions * groups}
    # Before the forward pass all, before the backward pass blocks alone: the head has stayed, the table is not needed.
    assert count(found[case], "_allgather_base_") == {"float32": MICRO * (groups + BLOCKS)}


def test_tied_tables_lie_in_the_outermost_group_and_are_gathered_once(found):
    assert count(found["tied"], "_reduce_scatter_base_") == {"float32": BLOCKS + 1}
    assert count(found["tied"], "_allgather_base_") == {"float32": MICRO * (2 * BLOCKS + 1)}


def test_under_bf16_all_but_the_table_is_gathered_so_and_gradients_are_reduced_in_float32(found):
    assert count(found["bf16"], "_allgather_base_") == {"float32": MICRO, "bfloat16": MICRO * (2 * BLOCKS + 1)}
    assert count(found["bf16"], "_reduce_scatter_base_") == {"float32": BLOCKS + 2}
    assert count(found["bf16 gathered wide"], "_allgather_base_") == {"float32": MICRO * (2 * BLOCKS + 2)}
    assert count(found["bf16 reduced"], "_reduce_scatter_base_") == {"bfloat16": BLOCKS + 2}


def test_nothing_is_left_gathered(found):
    assert {name: case["sharded"] for name, case in found.items()} == {name: [True, True] for name in found}


@pytest.mark.parametrize(
    ("case", "of_ddp", "tolerance"),
    [
        ("whole", "ddp", 1e-6),
        ("sharded", "ddp", 1e-6),
        ("replicas", "ddp", 1e-6),
        ("tied", "tied ddp", 1e-6),
        # Gains are rounded, by 2⁻⁹ of themselves at most, when they are gathered; at birth they are 1.
        ("bf16", "bf16 ddp", 2**-9),
        ("bf16 gathered wide", "bf16 ddp", 1e-5),
        ("bf16 reduced", "bf16 ddp", 1e-2),
    ],
)
def test_losses_are_those_of_ddp(found, case, of_ddp, tolerance):
    ours, theirs = found[case], found[of_ddp]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=tolerance)
    assert ours["losses"][:MICRO] == pytest.approx(theirs["losses"][:MICRO], rel=1e-6)
    assert ours["weights"].keys() == theirs["weights"].keys()


def test_a_rounded_reduction_is_not_the_plain_one(found):
    assert found["bf16 reduced"]["weights"] != found["bf16"]["weights"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"strategy": "fsdp2", "precision": "bf16"}, "bf16"),
        ({"strategy": "fsdp2"}, "fp32"),
        ({"strategy": "fsdp2", "precision": "bf16", "gather": "fp32"}, "fp32"),
        ({"strategy": "zero3", "precision": "bf16"}, "bf16"),
        ({"strategy": "ddp", "precision": "bf16"}, "fp32"),
        # As a run under fsdp2 has recorded it that goes on in a single process.
        ({"strategy": "single", "precision": "bf16", "gather": "bf16"}, "bf16"),
    ],
)
def test_weights_are_gathered_in_the_runs_precision_unless_a_field_says_otherwise(fields, expected):
    config = TrainerConfig(**fields)
    assert config.gathers_in == expected
    assert config.problems() == []
