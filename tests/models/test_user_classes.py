"""Where the modules come from that a config names: nothing of a run's choice is run."""

import os
import sys
from dataclasses import asdict

import pytest
import yaml

from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.models import user_classes
from birthmark.models.user_classes import (
    VARIABLE,
    import_user_class,
    name_user_code,
    note_code_of_run,
    user_code_for_children,
)

ARM = """
from pathlib import Path
from birthmark.models.attention.normalisers import Similarity

Path("ran").touch()


class Squared(Similarity):
    def phi(self, scores):
        return scores.relu().square()
"""


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
    """Nothing has been named yet, and no module of a test is loaded."""
    monkeypatch.setattr(user_classes, "_named", set())
    monkeypatch.setattr(user_classes, "_of_runs", set())
    monkeypatch.delenv(VARIABLE, raising=False)
    before = set(sys.modules)
    yield
    for name in {"placed_arm", "placed_other"} & (sys.modules.keys() - before):
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a module."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here/placed_arm.py").write_text("PLACE = 'working folder'")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def forget():
    sys.modules.pop("placed_arm", None)


def test_what_a_person_names_comes_from_the_working_folder_after_what_is_installed(folder, monkeypatch):
    path = list(sys.path)
    name_user_code({"model": {"attention": {"gate": "placed_arm:PLACE"}}})
    assert import_user_class("placed_arm:PLACE", "gate") == "working folder"
    assert sys.path == path
    forget()
    (folder / "installed").mkdir()
    (folder / "installed/placed_arm.py").write_text("PLACE = 'installed'")
    monkeypatch.setattr(sys, "path", [str(folder / "here"), *sys.path, str(folder / "installed")])
    assert import_user_class("placed_arm:PLACE", "gate") == "installed"


def test_what_a_run_alone_names_comes_from_named_folders(folder, monkeypatch):
    note_code_of_run({"snapshot": {"metrics": ["placed_arm:PLACE"]}})
    refused = r"metrics placed_arm:PLACE: the run's config names it, and nothing .* as in BIRTHMARK_CODE=\. "
    for first in (os.curdir, "", str(folder / "here")):
        monkeypatch.setattr(sys, "path", [first, *sys.path] if first != os.curdir else list(sys.path))
        with pytest.raises(UsageError, match=refused):
            import_user_class("placed_arm:PLACE", "metrics")
        assert "placed_arm" not in sys.modules
    monkeypatch.setenv(VARIABLE, f"/nowhere{os.pathsep}.")
    assert import_user_class("placed_arm:PLACE", "metrics") == "working folder"


SAID = ["--metrics placed_arm:PLACE", "--snapshot.metrics=[a:B,placed_arm:PLACE]", "--metrics='placed_arm:PLACE'"]


@pytest.mark.parametrize("said", [*map(str.split, SAID), {"snapshot": {"metrics": ["placed_arm:PLACE"]}}])
def test_naming_it_again_is_enough(folder, said):
    note_code_of_run("placed_arm:PLACE")
    name_user_code(said)
    assert import_user_class("placed_arm:PLACE", "metrics") == "working folder"


@pytest.mark.parametrize("said", ["x.placed_arm:PLACE", "placed_arm:PLACE.x", "a/placed_arm:PLACE", "placed_arm:PLA"])
def test_another_name_is_another_one(folder, said):
    note_code_of_run("placed_arm:PLACE")
    name_user_code([said])
    with pytest.raises(UsageError, match="the run's config names it"):
        import_user_class("placed_arm:PLACE", "metrics")


def test_children_may_import_what_a_person_named_to_their_parent(folder, monkeypatch):
    assert user_code_for_children() == {}
    name_user_code("placed_arm:PLACE")
    assert user_code_for_children() == {VARIABLE: str(folder / "here")}
    monkeypatch.setenv(VARIABLE, "..")
    assert user_code_for_children()[VARIABLE].split(os.pathsep)[1] == str(folder / "here")


def test_opening_a_run_runs_nothing_beside_it_and_ones_own_goes_on(folder, tiny, no_page, monkeypatch, capsys):
    """The run is trained, then opened as by another process, in a folder with a module of that name."""

    def command(*words):
        monkeypatch.setattr(user_classes, "_named", set())
        monkeypatch.setattr(user_classes, "_of_runs", set())
        forget()
        (here / "ran").unlink(missing_ok=True)
        with no_page():
            status = main(list(words))
        return status, (here / "ran").exists(), capsys.readouterr().err

    here = folder / "here"
    (here / "placed_arm.py").write_text(ARM)
    arm = {"model.attention.normaliser": "placed_arm:Squared", "snapshot.enabled": False, "trainer.max_steps": 2}
    (here / "run.yaml").write_text(yaml.safe_dump(asdict(tiny(arm))))
    assert command("pretrain", "--config", "run.yaml", "--run_dir", "run")[:2] == (0, True)
    resume = ("pretrain", "--resume", "run")
    for words in (
        ("snapshot", "run", "--n_sequences=4", "--seq_len=8"),
        (*resume, "--trainer.max_steps=3"),
        ("plan", "run/config.yaml", "--n_gpus=1"),
    ):
        status, ran, said = command(*words)
        assert (status, ran) == (2, False), (words, said)
        assert "model.attention.normaliser placed_arm:Squared: the run's config names it" in said
    assert command("report", "run")[:2] == (0, False)
    again = "--model.attention.normaliser=placed_arm:Squared"
    assert command(*resume, "--trainer.max_steps=3", again)[:2] == (0, True)
    monkeypatch.setenv(VARIABLE, ".")
    assert command(*resume, "--trainer.max_steps=4")[:2] == (0, True)
