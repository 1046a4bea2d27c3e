"""The grammar of a model's name: every form that people write, and the kind that it is read as."""

from pathlib import Path

import pytest

import birthmark
from birthmark.errors import UsageError
from birthmark.trainer.by_name.name_grammar import at_step, read_name, whole_run

CONFIGS = Path(birthmark.__file__).parent / "configs"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with one of each kind; files are empty, since a name is read without its content."""

    def file(path, text="{}"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for run in ("runs/x", "a@1", "demo"):
        file(f"{run}/config.yaml")
        file(f"{run}/birth.json")
    file("runs/x/checkpoints/step-00000002/state.json")
    file("runs/x/snapshots/step-00000002/summary.json")
    file("bias/snapshots/step-00000500/summary.json")
    file("alone/state.json")
    file("measured/summary.json")
    file("mine.yaml", "init_seed: 7")
    file("hf/config.json")
    file("q/m.gguf")
    file("llama-60m/config.json")
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "kind", "path", "number"),
    [
        ("runs/x", "run", "runs/x", None),
        ("runs/x/", "run", "runs/x", None),
        ("~/runs/x@2", "run", "{place}/runs/x", 2),
        ("runs/x@2", "run", "runs/x", 2),
        ("runs/x@0", "run", "runs/x", 0),
        ("runs/x/checkpoints/step-00000002", "run", "runs/x", 2),
        ("runs/x/snapshots/step-00000002", "snapshot", "runs/x/snapshots/step-00000002", None),
        ("a@1", "run", "a@1", None),
        ("a@1@2", "run", "a@1", 2),
        ("runs/x@ema", "run", "runs/x", None),
        ("runs/x@2@mean3", "run", "runs/x", 2),
        ("runs/x/checkpoints/step-00000002@ema", "run", "runs/x", 2),
        ("alone", "checkpoint", "alone", None),
        ("bias", "measured", "bias", None),
        ("bias@500", "measured", "bias", 500),
        ("measured", "snapshot", "measured", None),
        ("mine.yaml", "birth", "mine.yaml", None),
        ("mine.yaml@3", "birth", "mine.yaml", 3),
        ("tiny_demo", "birth", "{configs}/tiny_demo.yaml", None),
        ("tiny_demo@18446744073709551615", "birth", "{configs}/tiny_demo.yaml", 18446744073709551615),
        ("configs/demo.yaml@1", "birth", "{configs}/demo.yaml", 1),
        ("models/gpt2-1.5b@0", "birth", "{configs}/models/gpt2-1.5b.yaml", 0),
        # What exists comes first: a run in a folder of a config's name; and a folder has no seed.
        ("demo", "run", "demo", None),
        ("demo@0", "run", "demo", 0),
        ("llama-60m", "folder", "llama-60m", None),
        ("llama-60m@0", "birth", "{configs}/models/llama-60m.yaml", 0),
        ("hf", "folder", "hf", None),
        ("q", "gguf", "q", None),
        ("q/m.gguf", "gguf", "q/m.gguf", None),
        ("none.gguf", "gguf", "none.gguf", None),
        ("gpt2", "hub", "gpt2", None),
        ("Qwen/Qwen3-0.6B", "hub", "Qwen/Qwen3-0.6B", None),
        ("Qwen/Qwen3-0.6B@main", "hub", "Qwen/Qwen3-0.6B@main", None),
        # A path that is not there is not asked of the hub.
        ("org/none", "folder", "org/none", None),
        ("./none", "folder", "none", None),
        ("/", "folder", "/", None),
        ("runs/none@3", "folder", "runs/none@3", None),
    ],
)
def test_every_form_of_a_name_is_read_as_one_kind(place, text, kind, path, number):
    found = read_name(text)
    assert (found.text, found.kind, found.number) == (text, kind, number)
    assert found.average == {"ema": "ema", "mean3": "mean3"}.get(text.rpartition("@")[2], "")
    assert str(found.path) == path.format(place=place, configs=CONFIGS)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "'': a name is empty; give a run, a config, a folder, a GGUF file or a hub id"),
        ("runs/x@last", "runs/x@last: 'last' is no step: give a whole number up to 18446744073709551615 after the @"),
        ("runs/x@", "runs/x@: '' is no step"),
        ("tiny_demo@-1", "tiny_demo@-1: '-1' is no seed"),
        ("mine.yaml@18446744073709551616", "mine.yaml@18446744073709551616: 18446744073709551616 is no seed"),
        ("none.yaml@3", "none.yaml: no such file, nor a config that comes with the package"),
    ],
)
def test_what_can_be_no_name_is_one_line(place, text, line):
    with pytest.raises(UsageError) as error:
        read_name(text)
    assert str(error.value).replace("'18446744073709551616'", "18446744073709551616").startswith(line)


def test_a_step_beside_a_name_is_that_of_a_whole_run(place):
    assert at_step("runs/x", 2) == "runs/x@2"
    assert at_step("runs/x@ema", 2) == "runs/x@2@ema"
    assert at_step("hf", None) == "hf"
    for text, line in {
        "runs/x@2": "--step 3: runs/x@2 says its step itself; leave one of them out",
        "hf": "--step 3: hf is no run's folder; leave --step out",
        "tiny_demo@0": "--step 3: tiny_demo@0 is no run's folder; leave --step out",
    }.items():
        with pytest.raises(UsageError) as error:
            at_step(text, 3)
        assert str(error.value) == line


def test_what_needs_a_whole_run_says_why_another_name_is_none(place):
    """Other kinds, by the commands: tests/launch/commands/test_names.py."""
    Path("runs/seed-0.log").touch()
    assert whole_run("runs/x/", "why").path == Path("runs/x")
    assert whole_run("runs/x", "why").path == Path("runs/x")
    assert whole_run("bias", "why").path == Path("bias")
    for text, line in {
        "runs/x@2@ema": "is an average of a run's weights; why: give runs/x",
        "bias@500": "is one of the snapshots of a training; why: give bias",
        "tiny_demo@0": "is a birth of a config; why: give the folder that `pretrain` wrote",
        "alone": "is a checkpoint without its run; why: give",
        "gpt2": "not a run (no config.yaml and birth.json in it); give the folder that `pretrain` wrote",
        "./none": "not a run",
        "runs/seed-0.log": "is a file; why: give folders of runs, runs/*/ for those beside it",
    }.items():
        with pytest.raises(UsageError) as error:
            whole_run(text, "why")
        assert str(error.value).removeprefix("./").startswith(f"{text.removeprefix('./')}: {line}")
