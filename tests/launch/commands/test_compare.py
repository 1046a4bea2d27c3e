"""`birthmark compare`: models by any name beside one another."""

import csv
import dataclasses
import inspect
import json
import shutil

import numpy as np
import pytest
import yaml

from birthmark.api.comparing import compare
from birthmark.launch.cli import main
from birthmark.launch.commands.compare import add_options
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.quantised.cost import quantisation_costs
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.trainer.by_name import comparison
from birthmark.trainer.by_name.loaded_model import LoadedModel, TextProbe, load_named
from birthmark.trainer.config_parser import Parser

PROBE = ["--n_sequences=6", "--seq_len=8", "--batch_size=4", "--minibatch=6"]


@pytest.fixture
def run(run_of_two_checkpoints):
    return run_of_two_checkpoints


def printed(capsys, *arguments):
    capsys.readouterr()
    assert main(["compare", *map(str, arguments), *PROBE, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_model_of_transformers_is_beside_ours_as_itself(run, capsys, tmp_path):
    loaded = load_named(str(run.path))
    save_pretrained(loaded.model, tmp_path / "theirs")
    (found,) = printed(capsys, run.path, tmp_path / "theirs", f"{run.config}@7")["compared"]
    assert found["models"][1] == str(tmp_path / "theirs")
    assert np.array(found["kl"])[0, 1] == pytest.approx(0, abs=1e-9)
    assert np.array(found["kl"])[0, 2] > 0.001
    assert found["cka"][0][1] == pytest.approx(1, abs=1e-4)
    assert "loss" not in found
    assert found["lines"] == []


def test_two_runs_after_each_step_with_the_line_between_them(run, capsys, tmp_path, monkeypatch):
    # Drawn, and not painted: that takes seconds.
    monkeypatch.setattr("birthmark.report.compared_models.save_png", lambda figure, path: path.touch())
    other = shutil.copytree(run.path, tmp_path / "other")
    arguments = ["--step=all", "--barrier=3", f"--out={tmp_path / 'out'}"]
    found = printed(capsys, run.path, other, *arguments)
    assert found["probe"]["kind"] == "text"
    assert [one["step"] for one in found["compared"]] == [0, 2, 4]
    for one in found["compared"]:
        (line,) = one["lines"]
        assert line["alpha"] == [0, 0.5, 1]
        assert line["barrier"] == pytest.approx(0, abs=1e-6)
        assert line["loss"][0] == pytest.approx(one["loss"][0], abs=1e-6)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "compare.json", "compare.csv", "models.png", "layers.png", "positions.png", "kl_over_steps.png",
        "cka_over_steps.png", "lines.png",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "compare.json").read_text()) == found
    rows = list(csv.DictReader((tmp_path / "out" / "compare.csv").open()))
    (row,) = (
        r for r in rows
        if (r["quantity"], r["step"], r["layer"], r["other_layer"]) == ("cka", "4", "2", "1")
        and (r["run"], r["other"]) == (f"{run.path}@4", f"{other}@4")
    )  # fmt: skip
    values = next(p["values"] for p in found["compared"][2]["cka_by_layer"] if p["a"] != p["b"])
    assert float(row["value"]) == pytest.approx(values[2][1])


def test_checkpoints_of_one_run_are_compared_with_one_another(run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", str(run.path), "--step=0,4", *PROBE, "--out=compare.png"]) == 0
    table, told = capsys.readouterr()
    # KL says that probabilities differ, not that the likeliest tokens do.
    assert "tiny@4 does not predict as tiny@0 does: KL(A ‖ B) " in table
    assert "picture: compare.png" in told
    assert "numbers: compare.csv" in told
    assert "tiny@0" in table
    assert "± " in table
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "compare.csv").read_text().startswith("run,other,layer,other_layer,position,quantity,value\n")


def test_a_model_is_no_better_than_itself(run, capsys):
    assert main(["compare", str(run.path), str(run.path), *PROBE, "--probe=text"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "; its loss is the same to 0.001 nats. Equal models have KL 0 and CKA 1." in said
    assert "lower" not in said


def test_the_command_and_python_leave_out_the_same():
    parser = Parser()
    add_options(parser)
    python = {name: given.default for name, given in inspect.signature(compare).parameters.items()}
    said = vars(parser.get_defaults())
    shared = python.keys() & said.keys() - {"models"}
    assert shared >= {"n_sequences", "seq_len", "probe_seed", "batch_size", "minibatch", "barrier"}
    assert {name: python[name] for name in shared} == {name: said[name] for name in shared}


def test_what_cannot_be_compared_is_told_in_a_line(run, tmp_path, refused):
    assert "give at least two models" in refused("compare", run.path)
    assert "is no run, and has no steps" in refused("compare", run.path, f"{run.config}@7", "--step=2")
    assert "has no checkpoint of step 3; there are: 0, 2, 4" in refused("compare", run.path, "--step=2,3")
    assert "give numbers with commas between" in refused("compare", run.path, "--step=two")
    assert "--barrier 2: give 3 to 1001" in refused("compare", run.path, run.path, "--barrier=2")
    assert "a loss needs text" in refused("compare", run.path, run.path, "--barrier=5", "--probe=random")
    assert "--minibatch 3: give at least 4" in refused("compare", run.path, run.path, "--minibatch=3")
    few = refused("compare", run.path, run.path, "--n_sequences=3")
    assert "--minibatch 256: of 3 sequences a minibatch would have 3 examples, and needs 4" in few
    assert "exists already" in refused("compare", run.path, run.path, f"--out={tmp_path}")
    wider = yaml.safe_load(run.config.read_text())
    wider["model"]["vocab_size"] = 30
    (tmp_path / "wider.yaml").write_text(yaml.safe_dump(wider))
    told = refused("compare", run.path, f"{tmp_path / 'wider.yaml'}@0", *PROBE)
    assert "tiny has 24 tokens, " in told
    assert "wider.yaml@0 30: they cannot read the same ids" in told


def test_the_borders_of_a_runs_own_text_reach_the_models(monkeypatch, enliven):
    """Read as one document, and as three: both losses are those of `birthmark quantise`."""
    shape = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=12)
    shape = dataclasses.replace(shape, attention=AttentionConfig(documents=True))
    model = enliven(born(shape, 0)).eval()
    tokens = np.random.default_rng(0).integers(0, 40, (6, 8))
    losses = []
    for documents in (np.zeros_like(tokens), np.arange(8) // 3 + 0 * tokens):
        monkeypatch.setattr(comparison, "text_for", lambda *given, shown=documents: TextProbe(tokens, shown))
        comparer = comparison.Comparer(
            SnapshotConfig(n_sequences=6, batch_size=4), 8, 6, text=True,
            open_model=lambda name: LoadedModel(name, model, None, 0, None),
        )  # fmt: skip
        found = comparer.compared(["a", "b"], n_points=3)
        loss = quantisation_costs(model, [], tokens, tokens, documents_NT=documents)[0].loss
        assert [*found.pairs.mean_loss(), *found.lines[0].losses] == pytest.approx(5 * [loss], rel=1e-4)
        losses.append(loss)
    assert abs(losses[0] - losses[1]) > 1e-3
