"""What a run says of the code and machines that made it, in its certificate and in W&B."""

import json
import subprocess
from dataclasses import asdict
from functools import partial

import pytest
import yaml

from birthmark.measure.records import RunDir
from birthmark.trainer.provenance import code


@pytest.fixture
def repository(tmp_path):
    """A repository of one file, and its commit as git keeps it."""
    folder = tmp_path / "repository"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "file.py").write_text("1\n")
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for command in (["init", "-q", "-b", "trunk"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    return folder, (folder / ".git" / "refs" / "heads" / "trunk").read_text().strip()


def test_the_commit_is_that_of_the_package(repository, tmp_path, monkeypatch):
    folder, commit = repository
    monkeypatch.chdir(tmp_path)
    assert code(folder / "package") == {"commit": commit, "changed": False}
    (folder / "new.txt").write_text("not tracked")
    assert code(folder / "package") == {"commit": commit, "changed": False}
    (folder / "package" / "file.py").write_text("2\n")
    assert code(folder / "package") == {"commit": commit, "changed": True}


def test_an_installed_package_tells_of_the_working_folder(repository, tmp_path, monkeypatch):
    folder, commit = repository
    installed = folder / "venv" / "package"  # lies in the repository, which does not hold it
    installed.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert code(installed) == {"commit": commit, "changed": False}
    monkeypatch.chdir(tmp_path)
    assert code(installed) is None
    assert code(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code(folder / "package") is None


@pytest.mark.slow
def test_many_ranks_are_one_wandb_run_that_is_resumed_under_its_id(
    tiny, launched, pretrain_script, offline_wandb, tmp_path
):
    file, run = tmp_path / "run.yaml", RunDir(tmp_path / "run")
    file.write_text(yaml.safe_dump(asdict(tiny({"log.wandb": "offline"}))))
    start = partial(launched, pretrain_script, file, run.path)
    start("begin", "--trainer.strategy=ddp", "--trainer.max_steps=4")
    start("resume", "--trainer.strategy=fsdp2", "--trainer.max_steps=6")
    born = json.loads(run.birth.read_text())
    starts = offline_wandb(run.path)
    assert [start.id for start in starts] == [born["run_id"]] * 2
    steps = [[line["trainer/global_step"] for line in start.history if "train/loss" in line] for start in starts]
    assert steps == [[1, 2, 3, 4], [5, 6]]
    for started, strategy in zip(starts, ("ddp", "fsdp2"), strict=True):
        config = started.config
        assert "bias/alignment" in started.logged
        assert (config["birth"], config["init_seed"]) == (born["digest"], born["init_seed"])
        assert config["trainer"]["strategy"] == strategy
        assert config["code"] == born["code"]
        assert (config["environment"]["processes"], config["environment"]["nodes"]) == (2, 1)
        assert config["environment"]["versions"] == born["versions"]
