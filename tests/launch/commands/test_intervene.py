"""`birthmark intervene`: what it prints and draws, the same from Python, and each wrong request as one line."""

import json

import numpy as np
import pytest

import birthmark as bm
from birthmark.data.probes import passage_probe, random_probe
from birthmark.launch.cli import main
from birthmark.measure.intervention_kinds import Intervention
from birthmark.measure.interventions import intervene
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.pretrained import save_pretrained

SHAPE = {"d_model": 16, "n_layers": 30, "n_heads": 2, "d_ff": 24, "vocab_size": 32, "max_seq_len": 24}
PROBE = ["--n_sequences=6", "--seq_len=12"]


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.yaml").write_text(f"model: {json.dumps(SHAPE)}\nsnapshot: {{seq_len: 12}}\n")
    return "deep.yaml@3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, word_tokenizer, enliven):
    """A model of transformers whose tokenizer puts ``<s>`` before a text, and text beside it."""
    folder = tmp_path_factory.mktemp("model")
    config = ModelConfig(d_model=16, n_layers=3, n_heads=2, d_ff=24, mlp="swiglu", vocab_size=270, max_seq_len=32)
    (folder / "own.json").write_bytes(word_tokenizer.content)
    save_pretrained(enliven(Decoder(config)), folder / "model", tokenizer_file=folder / "own.json")
    (folder / "text.txt").write_text(" ".join(f"text {i} world {i * i}" for i in range(99)))
    return folder


def test_json_has_every_figure_of_every_dose(model, capsys):
    asked = ["--kind=amplify", "--layers=1..3,5", "--position=4", "--lambda=1,8", "--json"]
    assert main(["intervene", model, *asked, *PROBE]) == 0
    printed = json.loads(capsys.readouterr().out)
    what = Intervention("amplify", (1, 2, 3, 5), (4,), lambdas=(1.0, 8.0))
    expected = intervene(born(ModelConfig(**SHAPE), 3), random_probe(32, 6, 12, 0), what)
    assert [printed[name] for name in ("layers", "positions", "lambdas", "keys")] == [[1, 2, 3, 5], [4], [1, 8], [4]]
    assert [figures["dose"] for figures in printed["passes"]] == [None, 1, 8]
    for name in ("attention", "attention_to_first", "state_norm", "channel_value"):
        found = [figures[name] for figures in printed["passes"]]
        np.testing.assert_allclose(found, expected.stacked(name), atol=1e-5, rtol=1e-5)
    found = bm.intervene(model, "amplify", layers=[1, 2, 3, 5], positions=4, lambdas=[1, 8], n_sequences=6, seq_len=12)
    assert found.sentence == printed["sentence"]
    attention = found["attention"]
    assert (attention.dims, attention.shape) == (("dose", "layer", "head", "position"), (3, 30, 2, 1))
    by_head = printed["passes"][2]["attention"][6]
    np.testing.assert_allclose(attention.sel(dose=8, layer=7, position=4).values, [h[0] for h in by_head], atol=1e-7)


def test_a_table_of_thirty_blocks_fits_eighty_columns(model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["intervene", model, "--kind=mask", "--layer=2", "--position=4,7", *PROBE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "deep.yaml@3: mask at positions 4, 7 in block 2"
    assert lines[1].startswith("No sink forms at 4: attention to it goes from 0.1")
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if "→" in line and line.split()[0].rstrip("*").isdigit()]
    assert len(rows) == 2 * 30
    # block, three numbers before and after, channel and value
    assert all(len(row.split()) == 12 and "…" not in row for row in rows)
    assert [row.split()[0] for row in rows[:3]] == ["1", "2*", "3"]


def test_text_is_read_with_and_without_bos(folder, capsys, word_tokenizer):
    text = ["--data", f"{folder}/text.txt"]
    command = ["intervene", f"{folder}/model", "--kind=ablate_value", "--layers=1,2", "--position=0", "--json"]
    sizes = ["--n_sequences=4", "--seq_len=10"]
    probes = {}
    for name, more in (("text", text), ("text_without_bos", text), ("bos", []), ("random", [])):
        assert main([*command, *sizes, f"--probe={name}", *more]) == 0
        probes[name] = json.loads(capsys.readouterr().out)
    passages = passage_probe(f"{folder}/text.txt", word_tokenizer, 4, 11, 270)
    random = random_probe(270, 4, 10, 0)
    assert (passages[:, 0] == 269).all()
    model = bm.load(folder / "model").module
    what = Intervention("ablate_value", (1, 2), (0,))
    behind_bos = np.concatenate([np.full((4, 1), 269), random[:, :-1]], axis=1)
    for name, tokens in (("text_without_bos", passages[:, 1:]), ("bos", behind_bos), ("random", random)):
        expected = intervene(model, tokens, what, is_text=name.startswith("text"))
        for figures, other in zip(probes[name]["passes"], expected.passes, strict=True):
            np.testing.assert_allclose(figures["attention"], other.attention, atol=1e-6)
            assert (figures["loss"] is None) == (other.losses is None) == (not name.startswith("text"))
        if expected.loss(1) is not None:
            assert probes[name]["passes"][1]["loss_increase"] == pytest.approx(expected.loss_increase(1), abs=1e-5)
    assert "The loss goes from" in probes["text"]["sentence"]
    assert "The loss" not in probes["bos"]["sentence"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kind=mask", "--layers=40", "--position=3"], "--layers 40: this model has 30 blocks; give 1 to 30"),
        (["--kind=mask", "--layers=x", "--position=3"], "--layers x: give whole numbers, such as 20, 1..12"),
        (["--kind=mask", "--layers=1..99999999999", "--position=3"], "--layers 1..99999999999: no model has so many"),
        (["--kind=mask", "--layers=1", "--position=11"], "--positions 11: the probe has 12, and queries must follow"),
        (["--kind=mask", "--layers=1"], "--positions: kind mask needs one, from 0 to 10"),
        (["--kind=mask", "--layers=1", "--position=3", "--lambda=2"], "--lambda: kind mask does not read it"),
        (["--kind=scale", "--layers=1", "--position=3", "--lambda=1,x"], "--lambda 1,x: give numbers"),
        (["--kind=scale", "--layers=1", "--position=3", "--units=2"], "--units: kind scale does not read it"),
        (["--kind=ablate_unit", "--layers=1", "--units=24"], "--units 24: a block has 24; give 0 to 23"),
        (["--kind=ablate_channel", "--layers=1", "--channels=16"], "--channels 16: a block has 16; give 0 to 15"),
        (["--kind=ablate_head", "--layers=1", "--heads=2"], "--heads 2: a block has 2; give 0 to 1"),
        (["--kind=ablate_head", "--layers=1", "--heads=0", "--probe=bos"], "--probe bos: deep.yaml@3 has no tokenizer"),
        (["--kind=ablate_head", "--layers=1", "--heads=0", "--probe=text"], "--probe text: deep.yaml@3 is no run with"),
        (
            ["--kind=ablate_head", "--layers=1", "--heads=0", "--data=x.txt"],
            "--probe text: deep.yaml@3 has no tokenize",
        ),
        (
            ["--kind=ablate_head", "--layers=1", "--heads=0", "--probe=random", "--data=x.txt"],
            "--data: probe random does not read it",
        ),
        (["--kind=twist", "--layers=1"], "twist"),
        (["--kind=mask", "--layers=1", "--position=3", "--n_sequences=1"], "--n_sequences is 1"),
    ],
)
def test_wrong_requests_are_one_line_before_anything_is_loaded(model, monkeypatch, options, says, refused):
    def loaded(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("birthmark.trainer.by_name.loaded_model.load_named", loaded)
    assert says in refused("intervene", model, "--seq_len=12", *options)
