"""`birthmark data` shows what training reads."""

import json
from dataclasses import replace

import pytest
from quiet_runs import config_file
from rich.console import Console

from birthmark.data.batch_sizes import BatchRamp
from birthmark.data.config import DataConfig, SourceConfig, WeightChange
from birthmark.launch.cli import main
from birthmark.measure.records import RunDir
from birthmark.trainer.module import PretrainModule
from birthmark.trainer.run import pretrain


@pytest.fixture
def mixed(tiny, tmp_path):
    """A run over two corpora whose shares and batches change; its file."""
    for name, text in (("prose", "alpha beta "), ("code", "def f ( x ) : ")):
        (tmp_path / name).mkdir()
        for i in range(6):
            (tmp_path / name / f"{i}.txt").write_text(text * 30)
    sources = [SourceConfig(str(tmp_path / name), weight) for name, weight in (("prose", 3.0), ("code", 1.0))]
    schedule = [WeightChange(2, {"code": 1.0})]
    data = DataConfig(sources=sources, schedule=schedule, val_fraction=0.3, cache_dir=str(tmp_path / "cache"))
    config = tiny({"model.vocab_size": 280, "snapshot.enabled": False, "trainer.max_steps": 4})
    trainer = replace(config.trainer, batch_ramp=BatchRamp(2, 2, 4), checkpoint_every=4)
    config = replace(config, data=data, trainer=trainer)
    config_file(tmp_path / "mixed.yaml", config)
    return config, str(tmp_path / "mixed.yaml")


def shown(capsys, *arguments):
    assert main(["data", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_batch_of_a_step_is_what_the_module_gets(mixed, tmp_path, monkeypatch, capsys):
    config, file = mixed
    seen, train = {}, PretrainModule.training_step

    def look(module, batch_BT, batch_idx):
        seen.setdefault(module.global_step + 1, []).extend(batch_BT.tolist())
        return train(module, batch_BT, batch_idx)

    monkeypatch.setattr(PretrainModule, "training_step", look)
    pretrain(config, RunDir(tmp_path / "run"), console=Console(quiet=True))
    sources = []
    for step in (1, 2, 3, 4):
        samples = shown(capsys, file, "--step", str(step))["samples"]
        assert [sample["tokens"] for sample in samples] == seen[step]
        sources += [sample["source"] for sample in samples]
    assert [len(seen[step]) for step in (1, 2, 3, 4)] == [2, 2, 4, 4]
    assert sources[:4].count("prose") == 3
    assert sources[4:] == ["code"] * 8


def test_a_mixture_in_figures_and_words(mixed, capsys):
    _, file = mixed
    record = shown(capsys, file)
    prose, code = record["sources"]
    assert (prose["share"], code["share"]) == (0.75, 0.25)
    assert record["changes"] == [{"step": 2, "shares": {"prose": 0.0, "code": 1.0}}]
    assert prose["tokens_read"] + code["tokens_read"] == record["tokens"] == 12 * 12
    n_windows = (prose["tokens"] - 1) // 12
    assert prose["epochs"] == prose["tokens_read"] / 12 / n_windows
    assert len(record["samples"]) == 10
    for sample in record["samples"]:
        assert sample["text"].count("‖") == len(sample["borders"])
        assert (sample["source"] == "code") == any(word in sample["text"] for word in ("def", "x", ":"))
        for border in sample["borders"]:
            assert sample["tokens"][border] == 0  # the first token of a tokenizer that is trained here ends a text
    assert main(["data", file, "--set", "data.sources=[]", "data.schedule=[]", "data.path=backcopy"]) == 0
    assert "backcopy" in capsys.readouterr().out


@pytest.mark.parametrize("bos", ["none", "sequence", "document"])
@pytest.mark.parametrize("packing", ["concat", "documents", "best_fit"])
def test_every_border_of_a_document_is_shown(mixed, tmp_path, capsys, packing, bos):
    texts = {f"{'abcd'[: i % 5]}{i}" for i in range(60)}
    for i, text in enumerate(sorted(texts)):
        (tmp_path / "prose" / f"{i}.txt").write_text(text)
    changes = [f"data.packing={packing}", f"data.bos={bos}", "data.sources=[]", "data.schedule=[]"]
    arguments = [mixed[1], "--set", *changes, f"data.path={tmp_path / 'prose'}"]
    samples = shown(capsys, *arguments)["samples"]
    assert all(sample["source"] == str(tmp_path / "prose") for sample in samples)
    whole = 0
    for sample in samples:
        *closed, behind = sample["text"].split("‖")
        assert all(sample["tokens"][border] == 0 for border in sample["borders"])
        assert len(closed) == len(sample["borders"])
        if bos == "sequence":
            assert sample["text"][0] == "⊢"
        for text in closed[1:]:
            assert text.count("⊢") == (bos == "document")
            assert text.lstrip("⊢") in texts
            whole += 1
        assert any(text.startswith(behind.lstrip("⊢")) for text in texts)
    assert whole > 3
    assert main(["data", *arguments]) == 0
    assert samples[0]["text"] in capsys.readouterr().out


def test_a_page_for_people(mixed, capsys):
    _, file = mixed
    # Steps count from 1: the batch of step 2 is the last with the old shares.
    assert [{sample["source"] for sample in shown(capsys, file, "--step", step)["samples"]} for step in "23"] == [
        {"prose", "code"},
        {"code"},
    ]
    assert main(["data", file, "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "after step 2: code 100.0%" in printed
    assert "the 4 samples of step 3" in printed
    assert printed.count("epoch 1") == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "0"], "--step 0: give 1 to trainer.max_steps (4)"),
        (["--step", "5"], "--step 5: give 1 to trainer.max_steps (4)"),
        (["--set", "data.schedule=[]", "data.epochs=x"], "data.epochs: 'x' is not a number or null"),
    ],
)
def test_a_wrong_request_is_one_line(mixed, arguments, message, refused):
    assert refused("data", mixed[1], *arguments) == f"birthmark: error: {message}\n"


@pytest.mark.parametrize("words", [("--data.sources", "{}"), ("--data.sources={}",)])
def test_a_misspelt_key_of_a_source_is_named_with_its_place(tmp_path, words, refused):
    listed = "[{path: stdlib}, {path: readmes, wieght: 1}]"
    arguments = [word.format(listed) for word in words]
    said = refused("pretrain", "--run_dir", tmp_path / "run", *arguments)
    assert said.startswith("birthmark: error: data.sources[1].wieght: no such field; there are path, weight")
    nothing = refused("pretrain", "--run_dir", tmp_path / "run", *(word.format("null") for word in words))
    assert nothing == "birthmark: error: data.sources is null: give a list, [] for none\n"
    for entry, field in (("weights: {a: 1}", "step"), ("step: 3", "weights")):
        assert (
            refused("pretrain", "--data.schedule", f"[{{{entry}}}]")
            == f"birthmark: error: data.schedule[0].{field}: missing; write {{step: …, weights: …}}\n"
        )
    assert "data.schedule: not YAML" in refused("pretrain", "--data.schedule", "[{step: x}")
