"""``birthmark doctor``: what it finds on this machine, and what it says of what is missing."""

import dataclasses
import json
import shlex
import shutil
from importlib import metadata

import pytest
import yaml

from birthmark.launch.cli import main
from birthmark.launch.command_table import parse_command
from birthmark.launch.readiness import _room
from birthmark.trainer.config_file import config_of


@pytest.fixture
def config(tiny, tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(dataclasses.asdict(tiny({"run_dir": str(tmp_path / "runs/tiny")}))))
    return str(file)


@pytest.fixture
def doctor(config, capsys):
    """``doctor(*fields)``: exit status, the whole answer, and its findings by name."""

    def ask(*fields):
        status = main(["doctor", config, "--json", *(["--set", *fields] if fields else [])])
        answer = json.loads(capsys.readouterr().out)
        return status, answer, {finding["name"]: finding for finding in answer["findings"]}

    return ask


def test_a_run_that_would_start(doctor, config):
    status, answer, found = doctor()
    assert (status, answer["starts"]) == (0, True)
    assert answer["run"]["command"] == f"birthmark pretrain --config {config}"
    assert (answer["run"]["strategy"], answer["run"]["processes"]) == ("single", 1)
    assert found["torch"]["text"] == metadata.version("torch")
    assert {"python", "lightning", "wandb", "deepspeed", "transformers", "cpu", "bf16", "srun", "run_dir"} <= set(found)
    assert "× float32's speed on" in found["bf16"]["text"]
    assert found["W&B"]["text"].startswith("off")


@pytest.mark.parametrize(
    ("strategy", "start", "processes"), [("single", ["pretrain"], 1), ("ddp", ["launch", "torchrun"], 2)]
)
def test_the_command_starts_the_run_that_was_asked_about(strategy, start, processes, doctor):
    _, answer, _ = doctor(f"trainer.strategy={strategy}", "trainer.max_steps=7", "log.project=two words")
    words = shlex.split(answer["run"]["command"])
    assert words[: len(start) + 1] == ["birthmark", *start]
    assert answer["run"]["processes"] == processes
    run = config_of(parse_command("pretrain", words[words.index("--config") :]))
    assert (run.trainer.strategy, run.trainer.max_steps, run.log.project) == (strategy, 7, "two words")


def without(monkeypatch, *names):
    known = metadata.version

    def version(name):
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)


def test_a_missing_library_has_its_install_line_and_only_a_needed_one_stops(doctor, monkeypatch):
    without(monkeypatch, "wandb")
    status, _, found = doctor()
    assert (status, found["wandb"]["state"], found["wandb"]["mend"]) == (0, "note", "pip install wandb")
    without(monkeypatch, "lightning")
    status, answer, found = doctor()
    assert (status, answer["run"], found["lightning"]["state"]) == (1, None, "stop")
    assert found["lightning"]["mend"].startswith("pip install 'lightning")


@pytest.mark.parametrize(
    ("field", "name", "mend"),
    [
        ("model.d_model=1048576", "memory", "birthmark plan"),
        ("run_dir=/dev/null/run", "run_dir", "--run_dir"),
        ("trainer.strategy=ddp trainer.global_batch_size=1", "batch", "give 2 or more"),
    ],
)
def test_what_stops_a_run_has_a_mend(field, name, mend, doctor):
    status, _, found = doctor(*field.split())
    assert (status, found[name]["state"]) == (1, "stop")
    assert mend in found[name]["mend"]


def test_a_full_disk_is_seen_before_the_run(doctor, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))
    status, _, found = doctor()
    assert (status, found["run_dir"]["state"]) == (1, "stop")
    assert "3 checkpoints" in found["run_dir"]["text"]


@pytest.mark.parametrize(
    ("steps", "every", "keep_last", "keep_every", "expected"),
    [
        (10_000, 1000, None, None, "10 checkpoints"),
        (10_000, 1000, 1, 1500, "5 checkpoints"),  # 3000, 6000, 9000, 10000, and one that goes
        (10_000, 1000, 20, None, "10 checkpoints"),
        (9, 2, 2, None, "3 checkpoints"),
        (6, 2, 1, None, "2 checkpoints"),
        (2, 2, 1, None, "1 checkpoint"),
        (10**10, 1000, 2, None, "3 checkpoints"),
    ],
)
def test_room_is_asked_for_the_checkpoints_on_the_disk_at_once(steps, every, keep_last, keep_every, expected, tiny):
    fields = {"max_steps": steps, "checkpoint_every": every, "keep_last": keep_last, "keep_every": keep_every}
    found = next(_room(tiny({f"trainer.{name}": value for name, value in fields.items()})))
    assert found.text.endswith(f"for {expected}")


def test_a_folder_in_use_is_said(doctor, tmp_path):
    run = tmp_path / "runs/tiny"
    run.mkdir(parents=True)
    for name in ("config.yaml", "birth.json"):
        (run / name).touch()
    status, _, found = doctor()
    assert (status, found["run_dir"]["state"]) == (0, "note")
    assert f"--resume {run}" in found["run_dir"]["mend"]


def test_in_words(config, capsys):
    assert main(["doctor", config]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "note") for line in lines)
    assert "would start: 1 process on cpu, strategy single, fp32: birthmark pretrain" in last
