"""What a run says of the code and machines that made it, in its certificate and in W&B."""

import json
import subprocess
from functools import partial

import pytest
from quiet_runs import config_file

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


def test_nothing_that_a_repository_configures_is_run(repository, tmp_path, monkeypatch):
    """A monitor, a filter, hooks and programs for differences, each of which would leave a file."""
    folder, commit = repository
    git, told = ["git", "-C", str(folder)], tmp_path / "told"
    told.mkdir()

    def plant(name):
        file = folder / ".git" / name
        file.write_text(f"#!/bin/sh\ntouch {told}/{name}\ncat\n")
        file.chmod(0o755)
        return str(file)

    for hook in ("post-index-change", "reference-transaction", "post-checkout", "pre-auto-gc"):
        (folder / ".git/hooks").mkdir(exist_ok=True)
        plant(f"hooks/{hook}")
        (told / "hooks").mkdir(exist_ok=True)
    fields = ("core.fsmonitor", "filter.f.clean", "filter.f.process", "diff.external", "diff.f.textconv", "core.pager")
    for field in fields:
        subprocess.run([*git, "config", field, plant(field)], check=True)
    (folder / ".gitattributes").write_text("* filter=f diff=f\n")
    (folder / "package" / "file.py").write_text("2\n")
    monkeypatch.chdir(folder)
    for package in (folder / "package", tmp_path):
        assert code(package) == {"commit": commit, "changed": True}
    assert [file for file in told.rglob("*") if file.is_file()] == []
    # The plants work: git itself runs them where it reads this configuration.
    subprocess.run([*git, "status"], capture_output=True, stdin=subprocess.DEVNULL)
    assert (told / "core.fsmonitor").is_file()


def test_the_commit_is_found_wherever_git_keeps_it(repository, tmp_path, monkeypatch):
    folder, commit = repository
    git = ["git", "-C", str(folder)]
    monkeypatch.chdir(tmp_path)
    subprocess.run([*git, "worktree", "add", "-q", "--detach", tmp_path / "linked"], check=True)
    assert code(tmp_path / "linked/package") == {"commit": commit, "changed": False}
    subprocess.run([*git, "pack-refs", "--all"], check=True)
    assert not (folder / ".git/refs/heads/trunk").exists()
    assert code(folder / "package") == {"commit": commit, "changed": False}
    # Staged and not committed.
    (folder / "package" / "file.py").write_text("2\n")
    subprocess.run([*git, "add", "."], check=True)
    assert code(folder / "package") == {"commit": commit, "changed": True}


@pytest.mark.parametrize(
    "head", ["", "ref: ../../secret", "ref: refs/heads/../../secret", "ref: refs/heads/none", "secret", "é" * 40]
)
def test_a_head_that_names_no_commit_is_none(repository, head, tmp_path, monkeypatch):
    folder, _ = repository
    (folder / ".git/secret").write_text("f" * 39)
    (folder / ".git/HEAD").write_text(head)
    monkeypatch.chdir(tmp_path)
    assert code(folder / "package") is None


def test_a_damaged_repository_has_a_commit_and_no_comparison(repository, tmp_path, monkeypatch):
    folder, commit = repository
    monkeypatch.chdir(folder)
    (folder / ".git/index").write_bytes(b"DIRC" + bytes(100))
    assert code(tmp_path) == {"commit": commit, "changed": None}
    for name, content in ((".git/HEAD", bytes([255])), (".git/commondir", b"/dev/zero")):
        (folder / name).write_bytes(content)
        assert code(tmp_path) is None


@pytest.mark.slow
def test_many_ranks_are_one_wandb_run_that_is_resumed_under_its_id(
    tiny, launched, pretrain_script, offline_wandb, tmp_path
):
    file, run = tmp_path / "run.yaml", RunDir(tmp_path / "run")
    config_file(file, tiny({"log.wandb": "offline"}))
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
