"""Traces of chosen steps."""

import gzip
import json
import shutil
from types import SimpleNamespace

import pytest
from quiet_runs import logged, run

from birthmark.errors import UsageError
from birthmark.trainer.config import RunConfig, TrainerConfig
from birthmark.trainer.loop.profiling import check_room


def test_traces_hold_the_chosen_steps_and_change_no_number(tiny, tmp_path):
    plain = run(tiny({"snapshot.enabled": False}), tmp_path / "plain")
    profiled = run(tiny({"snapshot.enabled": False, "trainer.profile": [2, 3, 5]}), tmp_path / "profiled")
    assert not (plain.path / "profile").exists()
    n_steps = {}
    for file in (profiled.path / "profile").iterdir():
        with gzip.open(file, "rt") as text:
            names = [event.get("name", "") for event in json.load(text)["traceEvents"]]
        assert "aten::embedding" in names
        n_steps[file.name] = sum(name.startswith("Optimizer.step#AdamW") for name in names)
    assert n_steps == {"steps-00000002-00000003.json.gz": 2, "steps-00000005-00000005.json.gz": 1}
    assert logged(profiled, "train/loss") == logged(plain, "train/loss")


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([0, 2], r"trainer\.profile has step 0: give steps from 1 to trainer\.max_steps \(6\)"),
        ([7], r"trainer\.profile has step 7: give steps from 1"),
        ([2, 2], r"trainer\.profile has step 2 twice"),
        (list(range(1, 7)) * 20, r"trainer\.profile has 120 steps: give at most 100"),
    ],
)
def test_steps_that_no_run_has_are_refused(steps, expected):
    with pytest.raises(UsageError, match=expected):
        RunConfig(trainer=TrainerConfig(device="cpu", max_steps=6, profile=steps))


def test_a_folder_that_cannot_be_written_or_is_full_is_named_before_the_first_step(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"trainer\.profile writes to .*file/profile, which cannot be written"):
        check_room(tmp_path / "file" / "profile")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    with pytest.raises(UsageError, match=r"where 5 MB are free: make 1000 MB of room"):
        check_room(tmp_path / "profile")
