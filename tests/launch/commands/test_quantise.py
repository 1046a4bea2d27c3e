"""`birthmark quantise`: what it prints and draws, and each wrong request as one line."""

import csv
import json

import pytest

from birthmark.launch.cli import main

MODEL = """
model: {d_model: 16, n_layers: 1, n_heads: 2, vocab_size: 40, max_seq_len: 12}
data: {path: backcopy}
snapshot: {seq_len: 8}
"""
PROBE = ["--n_sequences=6", "--seq_len=8"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(MODEL)
    return "tiny.yaml@3"


def test_json_has_every_setting_beside_the_model_as_it_is(model, capsys):
    assert main(["quantise", model, "--bits=w8a8,w2a2", *PROBE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found["probe"], found["n_sequences"], found["seq_len"]] == ["random", 6, 8]
    plain, eight, two = found["settings"]
    assert [s["bits"] for s in found["settings"]] == ["w16a16", "w8a8", "w2a2"]
    assert plain["increase"] == 0
    assert abs(eight["increase"]) < abs(two["increase"])
    assert eight["rank_correlation"] > two["rank_correlation"]


@pytest.mark.heavy
def test_a_table_a_picture_and_its_numbers(model, capsys, tmp_path):
    assert main(["quantise", model, *PROBE, "--out=low.png"]) == 0
    printed = capsys.readouterr().out
    assert "random tokens, which cannot show what text would lose: give text, --data PATH" in " ".join(printed.split())
    assert [line.split()[0] for line in printed.splitlines() if line.startswith("w")] == [
        "w16a16", "w8a8", "w4a16", "w4a4",
    ]  # fmt: skip
    assert (tmp_path / "low.png").stat().st_size > 1000
    rows = list(csv.DictReader((tmp_path / "low.csv").open()))
    assert {row["bits"] for row in rows} == {"w16a16", "w8a8", "w4a16", "w4a4"}
    assert {row["quantity"] for row in rows} >= {"loss", "increase", "increase_se", "rank_correlation"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bits=w4"], "--bits w4: 'w4' is no setting"),
        (["--out=low.pdf"], "--out low.pdf: is no picture; give a name that ends in .png"),
        (["--data=nowhere"], "has no tokenizer to read text with"),
        (["--n_sequences=0"], "n_sequences"),
    ],
)
def test_wrong_requests_are_one_line(model, options, says, refused):
    assert says in refused("quantise", model, *options)
