"""Runs that train an adapter: what checkpoints hold, what RUN@STEP loads, what is refused. Under strategies:
strategies/test_optimizers_of_strategies.py."""

import shutil
from dataclasses import replace

import pytest
import torch
from quiet_runs import logged, run, same_weights

from birthmark.data.prepare import prepare
from birthmark.errors import RunError, UsageError
from birthmark.launch.cli import main
from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.adapters import base_digest, is_adapter
from birthmark.models.birth import digest
from birthmark.models.config import ModelConfig
from birthmark.trainer.by_name.model_names import open_source
from birthmark.trainer.checkpoints.folder_io import FolderCheckpointIO, load_model
from birthmark.trainer.config_file import read_config
from birthmark.trainer.initial_model import resolve_init_from
from birthmark.trainer.optimizers.parameter_groups import parameter_groups
from birthmark.trainer.optimizers.table import OPTIMIZERS

KINDS = {
    "lora": AdapterConfig("lora", rank=2, maps=["attn.q", "mlp.down"]),
    "prefix": AdapterConfig("prefix", length=3),
    "prefix_plus": AdapterConfig("prefix_plus"),
}


def train(config, path, **more):
    return run(resolve_init_from(config), path, **more)


@pytest.fixture(scope="module")
def base(tiny, tmp_path_factory):
    return run(tiny({"snapshot.enabled": False, "trainer.max_steps": 2}), tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def adapting(tiny, base):
    """``adapting(kind, overrides)``: the config of a run that trains an adapter on the base."""

    def build(kind, overrides=None):
        plain = {"model": ModelConfig(max_seq_len=12), "init_from": str(base.path), "adapter": KINDS[kind]}
        more = {"snapshot.enabled": False, "trainer.max_steps": 4, "optim.schedule": "constant", "optim.lr": 0.05}
        return tiny({**plain, **more, **(overrides or {})})

    return build


@pytest.fixture(scope="module")
def runs(adapting, tmp_path_factory):
    """A run of every kind: four steps, checkpoints of 2 and 4."""
    folder = tmp_path_factory.mktemp("adapted")
    return {kind: train(adapting(kind), folder / kind) for kind in KINDS}


def stored(run, step):
    return FolderCheckpointIO().load_checkpoint(run.checkpoint(step))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_adapter_alone_and_names_its_base(kind, runs, base):
    whole = load_model(read_config(runs[kind].config).model, base.checkpoint(2))
    for step in (2, 4):
        checkpoint = stored(runs[kind], step)
        assert checkpoint["base_digest"] == base_digest(whole) == digest(whole)
        held = checkpoint["state_dict"]
        assert held
        assert all(is_adapter(name) for name in held)
        (optimizer,) = checkpoint["optimizer_states"]
        assert len(optimizer["state"]) == len(held)
    first, last = stored(runs[kind], 2)["state_dict"], stored(runs[kind], 4)["state_dict"]
    assert not any(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_a_run_load_base_and_adapter_and_step_0_is_the_start(kind, runs, base):
    whole = load_model(read_config(runs[kind].config).model, base.checkpoint(2))
    tokens = torch.arange(12)[None]
    at_start = open_source(f"{runs[kind].path}@0").load()
    assert torch.equal(at_start(tokens), whole(tokens)) == (kind != "prefix")
    model, held = open_source(str(runs[kind].path)).load(), stored(runs[kind], 4)["state_dict"]
    for name, tensor in model.state_dict().items():
        expected = held[f"model.{name}"] if is_adapter(name) else whole.state_dict()[name]
        assert torch.equal(tensor, expected), name
    assert not torch.allclose(model(tokens), whole(tokens), atol=1e-4)
    trained = [
        p for group in parameter_groups(model, read_config(runs[kind].config).optim.optimizer) for p in group["params"]
    ]
    assert {id(p) for p in trained} == {id(p) for name, p in model.named_parameters() if is_adapter(name)}


def test_it_trains_as_a_loop_by_hand_and_resumes_to_the_bit(runs, adapting, tmp_path):
    kind = "prefix_plus"
    config = adapting(kind, {"trainer.max_steps": 2})
    halves = train(config, tmp_path / "run")
    halves = train(replace(config, trainer=replace(config.trainer, max_steps=4)), halves.path, resume=True)
    assert same_weights(halves, runs[kind], 4)
    losses = logged(halves, "train/loss")
    assert losses == logged(runs[kind], "train/loss")
    # The loss falls on one batch that is shown again and again: gradients have the right sign.
    model = open_source(f"{halves.path}@0").load().train()
    data = prepare(config.data, vocab_size=24, seq_len=12).train
    first, second = (torch.from_numpy(data.batch(n, 4)) for n in (0, 4))

    def loss_of(batch):
        return torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, betas=(0.9, 0.95), weight_decay=0.1
    )
    loss = loss_of(first)
    assert loss.item() == pytest.approx(losses[1], rel=1e-5)
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
    # Warm-up over two steps: the first has half the rate.
    optimizer.param_groups[0]["lr"] = 0.025
    optimizer.step()
    assert loss_of(second).item() == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.steps_matrices])
@pytest.mark.parametrize("kind", ["lora", "prefix_plus"])
def test_an_optimizer_of_matrices_trains_adapters_that_have_nothing_else(kind, name, adapting, tmp_path):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer", reason="soap is optional: pip install pytorch-optimizer")
    fields = {"optim.name": name, "optim.warmup_steps": 0, "optim.weight_decay": 0.0, "trainer.checkpoint_every": 1}
    config = adapting(kind, {**fields, "trainer.max_steps": 3})
    whole = train(config, tmp_path / "whole")
    halves = train(replace(config, trainer=replace(config.trainer, max_steps=1)), tmp_path / "halves")
    train(config, halves.path, resume=True)
    for there, tensor in stored(halves, 3)["state_dict"].items():
        # soap's bases lie by columns until they are stored, and products with thin ones are rounded otherwise then.
        torch.testing.assert_close(tensor, stored(whole, 3)["state_dict"][there], rtol=0, atol=1e-5 * (name == "soap"))
    (optimizer,) = stored(whole, 3)["optimizer_states"]
    state = stored(whole, 1)["state_dict"]
    assert len(optimizer["state"]) == len(state)
    # The first step of muon is .2·√max(rows, columns) times the rate along every direction of a gradient.
    moved = [p.double() for name, p in state.items() if name.endswith(("up.weight", "matrix"))]
    for matrix in moved if name == "muon" else []:
        lengths = torch.linalg.svdvals(matrix) / (0.05 * 0.2 * max(matrix.shape) ** 0.5)
        assert ((lengths < 1e-3) | ((lengths > 0.6) & (lengths < 1.3))).all(), lengths
    # The last linear map of a LoRA starts at 0, and so do the matrices of queries.
    assert moved
    assert all(name == "soap" or matrix.any() for matrix in moved)


@pytest.mark.parametrize(("name", "field"), [("muon", "adamw_lr"), ("muon", "beta1"), ("soap", "adamw_weight_decay")])
def test_what_adamw_would_read_is_refused_where_nothing_is_its(name, field, adapting):
    with pytest.raises(UsageError, match=rf"^optim\.{field} is 0\.5, which AdamW reads for what is no matrix"):
        adapting("lora", {"optim.name": name, f"optim.{field}": 0.5})
    assert getattr(adapting("prefix", {"optim.name": name, f"optim.{field}": 0.5}).optim, field) == 0.5


def test_a_base_that_changed_is_refused_in_a_line(tiny, adapting, base, tmp_path):
    """Another run in the base's place: neither a load nor a resume goes on with it."""
    moved = tmp_path / "base"
    shutil.copytree(base.path, moved)
    config = adapting("lora", {"init_from": str(moved), "trainer.max_steps": 2})
    adapted = train(config, tmp_path / "run")
    shutil.rmtree(moved)
    train(tiny({"snapshot.enabled": False, "trainer.max_steps": 2, "init_seed": 4}), moved)
    with pytest.raises(
        RunError, match=r"its adapter is for .*base@2 with digest .* which now has .*; restore that model"
    ):
        open_source(str(adapted.path)).load()
    longer = replace(config, trainer=replace(config.trainer, max_steps=3))
    with pytest.raises(RunError, match=r"base@2 now gives"):
        train(longer, adapted.path, resume=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--adapter.kind", "none"], "adapter.kind is none: give --adapter.kind lora, prefix or prefix_plus"),
        (
            ["--adapter.kind", "lora", "--adapter.length", "4"],
            "adapter.length is set, but only adapter.kind prefix reads",
        ),
        (["--adapter.kind", "lora", "--adapter.rank", "16"], "adapter.rank is 16, and attn.q has a side of 16"),
        (["--adapter.kind", "lora", "--adapter.maps", "[attn.x]"], "adapter.maps"),
        (["--adapter.kind", "lora", "--adapter.maps", "[mlp.gate]"], "adapter.maps names mlp.gate, but model.mlp gelu"),
        (["--adapter.kind", "prefixes"], "adapter.kind"),
        (["--adapter.kind", "lora", "--trainer.precision", "fp8"], "trainer.precision is fp8"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_anything_runs(words, expected, base, tmp_path, refused):
    target = tmp_path / "run"
    assert expected in refused("adapt", base.path, "--data.path", "backcopy", "--run_dir", target, *words)
    assert not target.exists()


def test_other_commands_say_in_a_line_what_they_cannot_do_with_an_adapter(runs, base, refused):
    lora = str(runs["lora"].path)
    for words, expected in (
        (["pretrain", "--adapter.kind", "lora", "--data.path", "backcopy"], "starts at a birth"),
        (["adapt", "--adapter.kind", "lora"], "nothing to adapt: give a model first"),
        (["adapt", lora, "--adapter.kind", "lora", "--data.path", "backcopy"], "holds an adapter (lora)"),
        (["snapshot", lora, "--stream"], "has an adapter (lora)"),
        (["plan", str(runs["lora"].config), "--n_gpus", "1"], "a plan counts a training of all weights"),
    ):
        assert expected in refused(*words)
    with pytest.raises(UsageError, match="keeps its adapter"):
        main(["adapt", "--resume", lora, "--adapter.rank", "3", "--debug"])


def test_a_snapshot_of_a_run_is_that_of_the_adapted_model(runs, capsys):
    assert main(["snapshot", str(runs["prefix"].path), "--n_sequences", "4", "--seq_len", "6", "--json"]) == 0
    assert "prefix_mass" in capsys.readouterr().out


def test_export_writes_the_adapter_for_peft_or_the_whole_model_merged(runs, tmp_path, refused):
    lora, tokens = str(runs["lora"].path), torch.arange(12)[None]
    assert main(["export", lora, str(tmp_path / "adapter")]) == 0
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert main(["export", lora, str(tmp_path / "merged"), "--merge"]) == 0
    ours, merged = open_source(lora).load(), open_source(str(tmp_path / "merged")).load().eval()
    torch.testing.assert_close(merged(tokens), ours(tokens), atol=1e-5, rtol=1e-5)
    assert "--merge: adapter.kind is prefix" in refused("export", runs["prefix"].path, tmp_path / "no", "--merge")
