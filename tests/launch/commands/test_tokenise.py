"""Shards made beforehand are those that a run makes."""

import json
import subprocess
import sys

import pytest
import yaml

from birthmark.data.prepare import prepare
from birthmark.launch.cli import main
from birthmark.trainer.config_file import read_config


@pytest.fixture
def config(tmp_path):
    for name, n in (("a", 40), ("b", 12)):
        (tmp_path / name).mkdir()
        for i in range(n):
            (tmp_path / name / f"{i:02d}.txt").write_text(f"{name} word{i} alpha beta gamma\n" * 20)
    sources = [{"path": str(tmp_path / name)} for name in "ab"]
    content = {
        "model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 300, "max_seq_len": 16},
        "snapshot": {"n_sequences": 8, "seq_len": 8, "n_strangers": 1},
        "data": {"sources": sources, "val_fraction": 0.2, "cache_dir": str(tmp_path / "cache")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "run.yaml"


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_run_finds_what_it_would_have_made(config, tmp_path, capsys):
    assert main(["tokenise", str(config), "--workers", "2", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert said[0].startswith("a: 40 documents, ")
    assert "MB/s" in said[2]
    run = read_config(config)
    prepare(run.data, vocab_size=300, seq_len=16)
    assert files(tmp_path / "cache") == files(tmp_path / "out")

    assert main(["tokenise", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sources"]["b"]["documents"] == 12
    assert found["sources"]["b"]["bytes"] == sum(path.stat().st_size for path in (tmp_path / "b").iterdir())
    assert main(["tokenise", str(config)]) == 0
    assert "nothing was to do" in capsys.readouterr().out


def test_text_is_tokenised_without_loading_a_framework(config):
    code = (
        f"import sys; from birthmark.launch.cli import main; main(['tokenise', {str(config)!r}]); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "birthmark.data.shards" in done.stdout.split()
    assert not set(done.stdout.split()) & {"torch", "lightning", "datasets", "transformers", "scipy"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--workers", "-1"], "data.n_workers: -1 is not 0 to 4096"),
        (["--set", "data.val_fraction=2"], "data.val_fraction"),
        (["--out", ""], "data.cache_dir: empty"),
    ],
)
def test_what_cannot_be_is_one_line(config, more, message, refused):
    assert message in refused("tokenise", config, *more)


def test_samples_that_are_computed_have_no_text(config, refused):
    content = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(content | {"data": {"path": "backcopy"}}))
    assert "data.path: backcopy has no text to tokenise" in refused("tokenise", config)


def test_a_stream_is_tokenised_by_the_run(config, tmp_path, refused):
    content = yaml.safe_load(config.read_text())
    (tmp_path / "tokenizer.json").write_text("{}")
    data = {"path": "hf:a", "stream": True, "tokenizer": str(tmp_path / "tokenizer.json")}
    config.write_text(yaml.safe_dump(content | {"data": data}))
    said = refused("tokenise", config, "--workers", "2")
    assert "data.stream is true: the run tokenises as it reads; there is nothing to prepare" in said
