"""Config files found by name, from any folder."""

from pathlib import Path

import pytest
import yaml

import birthmark
from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.models.birth import certificate_of
from birthmark.trainer.by_name.model_names import open_source_with_birth
from birthmark.trainer.by_name.shipped_configs import find_config, shipped_configs
from birthmark.trainer.config_file import read_config

CONFIGS = Path(birthmark.__file__).parent / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder without configs."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "file"),
    [
        ("demo", "run", "demo.yaml"),
        ("demo.yaml", "run", "demo.yaml"),
        ("configs/demo.yaml", "run", "demo.yaml"),
        ("models/llama-60m", "run", "models/llama-60m.yaml"),
        ("llama-60m", "run", "models/llama-60m.yaml"),
        ("gpt2-1.5b", "run", "models/gpt2-1.5b.yaml"),
        ("sinks", "run", "sinks.yaml"),
        ("sinks", "study", "studies/sinks.yaml"),
        ("studies/sinks", "study", "studies/sinks.yaml"),
        ("studies/sinks.yaml", "study", "studies/sinks.yaml"),
        ("configs/studies/sinks.yaml", "study", "studies/sinks.yaml"),
    ],
)
def test_a_shipped_file_is_found_by_name(name, kind, file):
    assert find_config(name, kind) == CONFIGS / file


def test_a_folder_hides_no_shipped_file_and_that_of_a_run_is_its_config(tmp_path):
    for name in ("demo", "mine", "empty"):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "config.yaml").write_text("init_seed: 7")
            (tmp_path / name / "birth.json").write_text("{}")
    assert find_config("demo") == CONFIGS / "demo.yaml"
    assert find_config("./demo/") == Path("demo/config.yaml")
    assert find_config("mine") == Path("mine/config.yaml")
    (tmp_path / "sinks").mkdir()
    assert find_config("sinks", "study") == CONFIGS / "studies" / "sinks.yaml"
    for kind, said in {"run": "is a folder without a run in it", "study": "is a folder and no study"}.items():
        with pytest.raises(UsageError, match=f"^empty: {said}; give a YAML file$"):
            find_config("empty", kind)


def test_a_file_that_exists_wins(tmp_path):
    (tmp_path / "demo").write_text("init_seed: 7")
    (tmp_path / "demo.yaml").write_text("init_seed: 8")
    assert (read_config("demo").init_seed, read_config("demo.yaml").init_seed) == (7, 8)
    assert open_source_with_birth("demo.yaml@3").config.d_model == read_config("demo.yaml").model.d_model


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("dmo", "run", "did you mean demo?"),
        ("llama60m", "run", "did you mean models/llama-60m?"),
        ("sink", "study", "did you mean studies/sinks?"),
        ("frobnicate", "run", "birthmark configs lists"),
        ("/no/such.yaml", "run", "birthmark configs lists"),
    ],
)
def test_a_name_that_is_neither_is_refused_with_the_nearest(name, kind, hint):
    with pytest.raises(UsageError, match=rf"^{name}: no such file, nor a config that comes with the package; .*") as no:
        find_config(name, kind)
    assert hint in str(no.value)


def test_births_of_shipped_configs_have_names():
    found = open_source_with_birth("sinks@5")
    config = read_config(CONFIGS / "sinks.yaml")
    assert (found.config, found.step) == (config.model, 0)
    drawn, expected = found.load(), certificate_of(config.model, 5)
    assert sum(p.numel() for p in drawn.parameters()) == expected["n_params"]
    assert open_source_with_birth("models/llama-60m").config.n_layers == 10
    assert open_source_with_birth("gpt2") is None  # a hub id


def test_the_list_has_every_file_with_its_first_line(capsys):
    assert main(["configs"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    files = {file.relative_to(CONFIGS).with_suffix("").as_posix(): file for file in CONFIGS.rglob("*.yaml")}
    assert lines.keys() == files.keys()
    for name, summary in lines.items():
        assert files[name].read_text().startswith(f"# {summary}\n")
        assert summary.endswith((".", "?"))
        assert len(summary) < 110


def test_kinds_are_what_the_files_hold():
    for config in shipped_configs():
        content = yaml.safe_load(config.file.read_text())
        assert {"run": "trainer", "model": "model", "study": "base"}[config.kind] in content
        assert config.kind == "study" or "base" not in content
