"""A run that starts from another's checkpoint: what it takes over, what it leaves, what it refuses."""

import shutil
from dataclasses import replace

import pytest
import quiet_runs
import torch
import yaml

from birthmark.data.prepare import prepare
from birthmark.errors import RunError, UsageError
from birthmark.files import read_json, write_sealed_json
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.trainer.checkpoints.folder_io import load_model
from birthmark.trainer.config_file import read_config
from birthmark.trainer.initial_model import initialize_model, resolve_init_from
from birthmark.trainer.lr_schedule import continued_rate, with_continued_rate
from birthmark.trainer.saved_config import write_config

CALIBRATED = {
    "model.attention.aggregation": "calibrated",
    "model.attention.calibration.correlation": "estimated",
    "snapshot.enabled": False,
    "optim.schedule": "constant",
    "optim.warmup_steps": 0,
}


def run(config, path, **more):
    return quiet_runs.run(resolve_init_from(config), path, **more)


@pytest.fixture(scope="module")
def source(tiny, tmp_path_factory):
    """A run of an arm with buffers, which must come along; checkpoints of steps 2, 4 and 6."""
    return run(tiny(CALIBRATED), tmp_path_factory.mktemp("source") / "run")


@pytest.fixture
def going_on(tiny, source):
    """``going_on(name, overrides=None)``: a run that starts from ``name`` and leaves the model to it."""

    def build(name, overrides=None):
        plain = {key: value for key, value in CALIBRATED.items() if not key.startswith("model.")}
        model = ModelConfig(max_seq_len=12)
        return tiny({**plain, "model": model, "init_from": str(name), "data.data_seed": 9, **(overrides or {})})

    return build


def test_a_checkpoint_has_three_names_and_all_become_the_same_one(source, going_on):
    for name in (source.path, f"{source.path}@6", source.checkpoint(6)):
        config = resolve_init_from(going_on(name))
        assert config.init_from == f"{source.path}@6"
        assert config.model.attention.calibration.correlation == "estimated"
        assert config.model.d_model == 16
        assert resolve_init_from(config) == config
    assert resolve_init_from(going_on(f"{source.path}@4")).init_from == f"{source.path}@4"


def test_weights_and_buffers_are_the_checkpoints_and_strangers_are_births(source, going_on):
    config = resolve_init_from(going_on(f"{source.path}@4"))
    model = initialize_model(config, config.init_seed)
    assert model.training
    there = quiet_runs.weights(source, 4)
    state = model.state_dict()
    assert set(there) == {f"model.{name}" for name in state}
    assert any(name not in dict(model.named_parameters()) for name in state)
    assert all(torch.equal(tensor, there[f"model.{name}"]) for name, tensor in state.items())
    assert digest(initialize_model(config, 8)) == digest(born(config.model, 8))


def test_it_trains_on_from_there_with_an_optimizer_of_its_own(source, going_on, tmp_path):
    """Against a loop written by hand, on the data of the new run from its first step."""
    config = going_on(f"{source.path}@6", {"trainer.max_steps": 2, "trainer.checkpoint_every": 1})
    done = run(config, tmp_path / "run")
    record = read_json(done.birth)
    model = load_model(resolve_init_from(config).model, source.checkpoint(6)).train()
    assert record["init_from"] == f"{source.path}@6"
    assert record["digest"] == digest(model) != read_json(source.birth)["digest"]

    batches = prepare(config.data, vocab_size=24, seq_len=12).train
    optimizer = quiet_runs.adamw(model)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            batch = torch.from_numpy(batches.batch(step * 4 + micro * 2, 2))
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / 2
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        after = quiet_runs.weights(done, step + 1)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(after[f"model.{name}"], tensor, atol=1e-6, rtol=1e-5)


def test_it_goes_on_after_a_stop_and_notices_a_changed_source(source, going_on, tmp_path):
    shutil.copytree(source.path, tmp_path / "source")
    config = going_on(tmp_path / "source")
    whole = run(config, tmp_path / "whole")
    first = run(replace(config, trainer=replace(config.trainer, max_steps=2)), tmp_path / "halves")
    assert [folder.name for folder in first.checkpoints()] == ["step-00000002"]
    halves = run(config, tmp_path / "halves", resume=True)
    assert quiet_runs.same_weights(whole, halves, 6)

    shutil.rmtree(tmp_path / "source" / "checkpoints" / "step-00000006")
    other = (tmp_path / "source" / "checkpoints" / "step-00000004").rename(RunDir(tmp_path / "source").checkpoint(6))
    with pytest.raises(RunError, match=r"state\.json: damaged \(step is 4, and the folder is of another\)"):
        run(config, tmp_path / "halves", resume=True)
    state = read_json(other / "state.json") | {"step": 6}
    write_sealed_json(other / "state.json", {name: value for name, value in state.items() if name != "sha256"})
    with pytest.raises(RunError, match=r"@6 now gives .* the certificate says"):
        run(config, tmp_path / "halves", resume=True)


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("{source}@5", None, "has checkpoints of steps 2, 4, 6"),
        ("{source}@x", None, "'x' is no step"),
        ("{source}/checkpoints", None, "neither a run, RUN@STEP, a checkpoint nor a folder of transformers"),
        ("{source}/nothing@2", None, "neither a run, RUN@STEP"),
        ("{source}", {"model.d_model": 32}, "model.d_model is 32, but --init_from"),
        ("{source}", {"data.path": "stdlib"}, "has no tokenizer.json"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused(source, going_on, name, overrides, expected):
    with pytest.raises(UsageError) as error:
        resolve_init_from(going_on(name.format(source=source.path), overrides))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_without_a_checkpoint_or_of_another_version_is_told(source, going_on, tmp_path, seal_config):
    copy = RunDir(shutil.copytree(source.path, tmp_path / "copy"))
    config = yaml.safe_load(copy.config.read_text())
    seal_config(copy.config, yaml.safe_dump(config | {"model": config["model"] | {"telepathy": True}}))
    with pytest.raises(RunError, match=r"model\.telepathy is unknown to this version"):
        resolve_init_from(going_on(copy.path))
    shutil.rmtree(copy.path / "checkpoints")
    with pytest.raises(UsageError, match=r"has no checkpoint yet; train it further, or give RUN@0$"):
        resolve_init_from(going_on(copy.path))


# ── the learning rate, where none is given ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("optim", "name", "lr", "why"),
    [
        ({"schedule": "constant"}, "run", 0.01, "had at step 6"),
        ({"schedule": "cosine", "min_lr_ratio": 0.2}, "run", 0.002, "had at step 6"),
        ({"schedule": "cosine", "min_lr_ratio": 0.0}, "run", 0.001, "a tenth of"),
        ({"schedule": "cosine", "warmup_steps": 4}, "run@4", 0.01, "the peak of"),
        (None, "gpt2", 3e-5, "usually"),
    ],
)
def test_the_rate_is_that_of_the_source_at_its_checkpoint(optim, name, lr, why, source, tmp_path):
    if optim is not None:
        shutil.copytree(source.path, tmp_path / "run")
        stored = read_config(source.config)
        write_config(replace(stored, optim=replace(stored.optim, **optim)), tmp_path / "run/config.yaml")
        name = str(tmp_path / name)
    found = continued_rate(name)
    assert found.lr == pytest.approx(lr)
    assert why in found.why


def test_a_command_without_a_config_takes_it_and_says_so_and_one_with_a_rate_keeps_that(
    source, tmp_path, capsys, no_page
):
    fields = ["--trainer.max_steps=1", "--snapshot.enabled=false", "--log.wandb=off", "--model.max_seq_len=12"]
    fields += ["--data.path=backcopy", "--init-from", str(source.path), "--trainer.micro_batch_size=2"]
    asked = {"fitting": [], "given": ["--optim.lr=0.5"]}
    for name, more in asked.items():
        with no_page():
            assert main(["pretrain", *fields, "--run_dir", str(tmp_path / name), *more]) == 0
    stored = {name: read_config(tmp_path / name / "config.yaml").optim.lr for name in asked}
    assert stored == {"fitting": 0.01, "given": 0.5}
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("optim.lr")]
    assert f"optim.lr 0.01: what {source.path} had at step 6" in line
    assert with_continued_rate({"init_from": str(source.path)})["optim.lr"] == 0.01
    assert with_continued_rate({"init_from": str(source.path), "optim.lr": 1.0})["optim.lr"] == 1.0


def test_a_name_that_the_hub_does_not_give_is_refused_by_its_field(tiny):
    with pytest.raises(UsageError, match=r"^--init_from nobody: no such folder, and not from the hub either"):
        resolve_init_from(tiny({"init_from": "nobody"}))
