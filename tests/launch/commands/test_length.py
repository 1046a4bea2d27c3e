"""`birthmark length`: arms side by side in a table, as JSON and as a picture, and what is refused."""

import csv
import json

import numpy as np
import pytest
import quiet_runs

from birthmark.launch.cli import main
from birthmark.measure.loss_by_position import evictions, loss_by_position
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.trainer.by_name.model_names import open_source
from birthmark.trainer.by_name.texts_of_runs import held_out_tokens

FEW = ["--n_sequences=5", "--batch_size=2", "--to=4x"]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A run of one step on the task without text."""
    config = tiny({"trainer.max_steps": 1, "snapshot.enabled": False})
    return quiet_runs.run(config, tmp_path_factory.mktemp("runs") / "tiny").path


def test_a_model_of_long_training_is_read_for_a_first_look(word_tokenizer, capsys, tmp_path):
    config = ModelConfig(d_model=8, n_layers=1, n_heads=1, vocab_size=270, max_seq_len=1024, mlp="swiglu")
    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    save_pretrained(born(config, 0), tmp_path / "long", tokenizer_file=tmp_path / "tokenizer.json")
    (tmp_path / "text.md").write_text(" ".join(str(i) for i in range(9000)))
    name, data = str(tmp_path / "long"), f"--data={tmp_path / 'text.md'}"
    assert main(["length", name, data, "--evict=0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["n_sequences"], printed["models"][0]["prefix"], printed["models"][0]["length"]) == (8, 512, 4096)
    # Asked for, lengths count from the training length.
    assert main(["length", name, data, "--evict=0", "--json", "--to=2x", "--n_sequences=2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["n_sequences"], printed["models"][0]["prefix"], printed["models"][0]["length"]) == (2, 1024, 2048)


def test_arms_and_models_stand_side_by_side(run, tiny, capsys, tmp_path):
    out = tmp_path / "length.png"
    models = [str(run), f"{run}@0"]
    assert main(["length", *models, *FEW, "--evict=1,0", "--json", f"--out={out}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(m["model"], m["length"], m["prefix"]) for m in printed["models"]] == [(name, 48, 12) for name in models]
    tokens = held_out_tokens(open_source(models[1]), 5, 49, None)
    assert (tokens[:, 0] == 0).all()
    newborn = born(tiny().model, tiny().init_seed)
    losses = {n: loss_by_position(newborn, tokens, e) for n, e in evictions([0, 1], 12, None).items()}
    for arm in printed["models"][1]["arms"]:
        own = losses[arm["evict"]]
        np.testing.assert_allclose(arm["loss_by_position"], own.mean(0), rtol=1e-6)
        assert [(r["start"], r["stop"]) for r in arm["ranges"]] == [(0, 12), (12, 24), (24, 48)]
        assert arm["ranges"][1]["loss"] == pytest.approx(own[:, 12:24].mean())
    cost = printed["models"][1]["arms"][1]["cost"]
    assert cost["loss"] == pytest.approx((losses[1] - losses[0])[:, 12:].mean(), rel=1e-6)
    assert out.stat().st_size > 10_000
    with out.with_suffix(".csv").open() as f:
        rows = [row for row in csv.DictReader(f) if row["run"] == models[1] and row["evicted"] == "1"]
    np.testing.assert_allclose([float(row["value"]) for row in rows], losses[1].mean(0), rtol=1e-6)


def test_the_table_has_a_row_for_each_arm(run, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["length", str(run), *FEW, "--evict=0,4", "--window=8", "--prefix=10", "--out=length.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run}: prefix 10, window 8"
    assert [word for word in lines[1].split() if "–" in word] == ["0–9", "10–19", "20–39", "40–47"]
    assert [line.split()[0] for line in lines[3:5]] == ["0", "4"]
    assert lines[3].split()[-1] == "–"
    assert lines[4].split()[-2] == "±"
    assert all(len(line) <= 80 for line in lines[1:5])
    # The cache of each arm lets keys go: with a window, none has every key.
    assert "every key" not in " ".join(lines)
    assert (tmp_path / "length.png").is_file()


def test_what_is_impossible_is_one_line(run, tmp_path, refused):
    for arguments, expected in (
        ((run, "--to=0x"), "--to 0x: give positions, 2 or more"),
        ((run, "--to=long"), "--to long: give positions"),
        ((run, "--evict=1,,2"), "--evict 1,,2: give whole numbers of keys with commas between"),
        ((run, "--evict=13"), f"--evict 13: {run} reads a prefix of 12; give no more"),
        ((run, "--window=0"), "--window is 0"),
        ((run, "--n_sequences=1"), "--n_sequences is 1"),
        ((run, "--out=length.pdf"), "--out length.pdf: is no picture; give a name that ends in .png"),
        ((run, f"--data={tmp_path}"), f"{run}: has no tokenizer to read text with"),
        (("tiny_demo",), "tiny_demo: cannot read 512 positions, its learned ones end at 64"),
        ((tmp_path / "none",), "neither a run"),
    ):
        assert expected in refused("length", *arguments)
