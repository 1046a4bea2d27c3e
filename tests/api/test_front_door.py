"""Birthmark as a library: what one name gives, and what importing it costs."""

import builtins
import html
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import birthmark as bm
from birthmark.data.probes import passage_probe, random_probe
from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.measure.measurement import measure
from birthmark.measure.metrics_log import append_metrics, read_metrics
from birthmark.measure.records import RunDir, Snapshot
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.report.snapshot_page import find_snapshot
from birthmark.trainer.by_name.comparison import names_at_steps
from birthmark.trainer.checkpoints.folder_io import find_checkpoint
from birthmark.trainer.config_file import read_config
from birthmark.trainer.initial_model import find_initial_checkpoint
from birthmark.trainer.module import PretrainModule


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    """A tiny run from Python."""
    return bm.pretrain(tiny({"snapshot.probes": ["random", "text"]}), run_dir=tmp_path_factory.mktemp("api") / "run")


def test_importing_loads_nothing_heavy():
    code = "import birthmark, sys; dir(birthmark); print('\\n'.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "lightning", "numpy", "jsonargparse", "yaml", "rich", "pandas", "scipy", "transformers"}
    assert not heavy & set(loaded)
    assert {name for name in loaded if name.startswith("birthmark")} == {"birthmark"}


def test_every_name_is_there_and_no_other():
    for name in bm.__all__:
        assert callable(getattr(bm, name)), name
        assert name in dir(bm)
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        bm.frobnicate  # noqa: B018


@pytest.mark.parametrize("first", ["bm.measure", "birthmark.measure.records"])
def test_measure_is_the_function_and_the_package_whichever_is_used_first(first):
    code = f"""
import birthmark as bm
{"bm.measure" if first == "bm.measure" else "import birthmark.measure.records"}
import birthmark.measure.records as records
assert records.__name__ == "birthmark.measure.records"
assert callable(bm.measure) and bm.measure.records is records
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_config_may_be_an_object_fields_a_file_or_a_name(tiny, tmp_path, run):
    small = {"trainer.max_steps": 2, "snapshot": {"enabled": False}}
    file = tmp_path / "small.yaml"
    file.write_text(run.files.config.read_text())
    fields = {"model": {"d_model": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 24, "max_seq_len": 12}}
    fields |= {"data.path": "backcopy", "trainer.device": "cpu", "trainer.val_sequences": 4, "log.wandb": "off"}
    given = {"object": (tiny(), small), "fields": (fields, small), "file": (file, small)}
    for name, (config, overrides) in given.items():
        made = bm.pretrain(config, overrides, run_dir=tmp_path / name)
        assert made.config.trainer.max_steps == 2
        assert made.checkpoints == [2]
    named = bm.pretrain("sinks", small | {"log.wandb": "off"}, run_dir=tmp_path / "name")
    assert named.config.name == "sinks"
    assert named.config.model == read_config("sinks").model


def test_a_run_goes_on(tiny, tmp_path):
    first = bm.pretrain(tiny({"trainer.max_steps": 2, "snapshot.enabled": False}), run_dir=tmp_path / "run")
    assert first.checkpoints == [2]
    on = bm.pretrain(first.config, {"trainer.max_steps": 4}, resume=True)
    assert (on.path, on.checkpoints) == (first.path, [2, 4])


def test_a_run_leaves_the_process_as_it_was_and_needs_no_main_thread(tiny, tmp_path):
    """Python hands signals to the main thread alone."""

    def state():
        levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
        return levels, warnings.filters[:], [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    logging.getLogger("lightning.fabric").setLevel(logging.INFO)
    before, config = state(), tiny({"trainer.max_steps": 2, "snapshot.enabled": False})
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(bm.pretrain, config, run_dir=tmp_path / "run").result()
    assert made.checkpoints == [2]
    assert state() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_program_once_the_run_is_saved(tiny, tmp_path, monkeypatch, number):
    seen, step = [], PretrainModule.training_step

    def signalled(self, batch, index):
        os.kill(os.getpid(), number)
        return step(self, batch, index)

    def handle(number, frame):
        seen.append((number, RunDir(tmp_path / "run").checkpoint(1).is_dir()))

    monkeypatch.setattr(PretrainModule, "training_step", signalled)
    before = signal.signal(number, handle)
    try:
        bm.pretrain(tiny({"snapshot.enabled": False}), run_dir=tmp_path / "run")
    finally:
        signal.signal(number, before)
    assert seen == [(number, True)]


def test_a_run_without_strangers_has_a_page_and_prints_nothing(tiny, tmp_path, capfd):
    alone = bm.pretrain(tiny({"trainer.max_steps": 2, "snapshot.n_strangers": 0}), run_dir=tmp_path / "alone")
    assert capfd.readouterr().out == ""
    assert alone.snapshots["stranger_mean_prob"].values.size == 0
    assert alone.report(tmp_path / "page.html").is_file()


def test_metrics_are_the_lines_of_the_log(run):
    records = read_metrics(run.files.metrics)
    wanted = {r["step"]: r["train/loss"] for r in records if "train/loss" in r}
    loss = run.metrics["train/loss"]
    assert loss.dims == ("step",)
    assert dict(zip(loss.coords["step"].tolist(), loss.values.tolist(), strict=True)) == wanted
    frame = run.metrics.to_pandas()
    assert frame.index.name == "step"
    assert frame["train/loss"].dropna().to_dict() == wanted
    with pytest.raises(bm.UsageError, match=r"val_los: no such metric; did you mean val/loss\?"):
        run.metrics["val_los"]


def test_a_folder_of_snapshots_alone_has_no_training_log(run, tmp_path):
    shutil.copytree(run.path / "snapshots", tmp_path / "bias" / "snapshots")
    measured = bm.Run(tmp_path / "bias")
    assert measured.snapshots.steps == run.snapshots.steps
    assert measured.metrics.names == []
    with pytest.raises(bm.UsageError, match=r"^train/loss: \S+/bias has no training log; .*: see \.snapshots$"):
        measured.metrics["train/loss"]


def test_snapshots_are_named_arrays(run):
    records = run.files.snapshots()
    assert run.snapshots.steps == [record.step for record in records] == [0, 2, 4, 6]
    assert [s.step for s in run.snapshots[1:]] == [2, 4, 6]
    mass = run.snapshots["sink_mass"]
    assert mass.dims == ("step", "layer", "head")
    assert mass.coords["layer"].tolist() == [1, 2]
    assert float(mass.sel(step=4, layer=2, head=1)) == records[2].arrays["sink_mass"][1, 1]
    states = run.snapshots.at(6)["inter_mlp"]
    assert states.coords["layer"].tolist() == [0, 1, 2]
    assert run.snapshots[-1]["text.sink_mass"].dims == ("layer", "head")
    assert run.snapshots[-1].text_scalars == records[-1].summary["bias_text"]
    scalar = run.snapshots["preference_ratio"]
    assert scalar.values.tolist() == [record.bias["preference_ratio"] for record in records]
    with pytest.raises(bm.UsageError, match="no snapshot of step 3; there are 0, 2, 4, 6"):
        run.snapshots.at(3)
    with pytest.raises(bm.UsageError, match="no snapshot of step '2'; there are 0, 2, 4, 6"):
        run.snapshots.at("2")
    with pytest.raises(bm.UsageError, match="3: no such array"):
        run.snapshots[-1][3]
    assert bm.Run(run).path == run.path
    with pytest.raises(bm.UsageError, match=r"sink_mas: no such quantity; did you mean sink_mass\?"):
        run.snapshots["sink_mas"]


def test_a_step_among_many_is_one_short_line(run, tmp_path):
    trained, run = run.files, RunDir(tmp_path / "run")
    for step in range(0, 1001, 5):
        run.snapshot(step).mkdir(parents=True)
        run.checkpoint(step).mkdir(parents=True)
    for file in (trained.config, trained.birth):
        shutil.copy(file, run.path)
    near = "0 … 1000 (201), the nearest 5 and 10"
    for asked, said in (
        (lambda: bm.Run(run.path).snapshots.at(7), f"no snapshot of step 7; there are {near}"),
        (lambda: find_snapshot(run, 7, "run@7"), f"run@7: {run.path} has no snapshot of that step; there are: {near}"),
        (lambda: find_checkpoint(run, 7), f"--step 7: {run.path} has checkpoints of steps {near}"),
        (lambda: bm.load(f"{run.path}@7"), f"has no checkpoint of step 7; there are: {near}"),
        (lambda: names_at_steps([str(run.path)], "7"), f"has no checkpoint of step 7; there are: {near}"),
        (lambda: find_initial_checkpoint(f"{run.path}@7"), f"{run.path} has checkpoints of steps {near}"),
    ):
        with pytest.raises(bm.UsageError) as refusal:
            asked()
        assert str(refusal.value).endswith(said)
    assert bm.Run(run.path)._title() == f"Run({str(run.path)!r}): 201 snapshots, checkpoints [0, 5 … 1000 (201)]"
    assert bm.Run(run.path).snapshots._title() == "Snapshots of run: steps 0, 5 … 1000 (201)"


def test_a_run_is_read_once_and_again_when_it_has_grown(run, tmp_path, monkeypatch):
    live = bm.Run(shutil.copytree(run.path, tmp_path / "run"))
    read, reader = [], Snapshot.read
    monkeypatch.setattr(Snapshot, "read", lambda folder, **how: read.append(folder.name) or reader(folder, **how))
    assert [live.snapshots.at(step).step for step in live.snapshots.steps] == [0, 2, 4, 6]
    assert len(live.snapshots["sink_mass"].values) == len(live.snapshots["preference_ratio"].values) == 4
    assert len(read) == 4
    assert live.metrics is live.metrics
    append_metrics(live.files.metrics, 7, {"train/loss": 1.5})
    assert float(live.metrics["train/loss"].sel(step=7)) == 1.5
    before, last = live.snapshots, live.snapshots[-1].record
    longer = Snapshot({**last.summary, "step": 8}, last.arrays)
    live.files.write_snapshot(longer)
    assert live.snapshots.steps == [0, 2, 4, 6, 8]
    assert (live.snapshots["sink_mass"].values[3:] == last.arrays["sink_mass"]).all()
    # A run that was begun again writes a step anew.
    live.files.write_snapshot(Snapshot({**longer.summary, "bias": {"preference_ratio": 77.0}}, {"mine": np.ones(3)}))
    assert live.snapshots.at(8).scalars == {"preference_ratio": 77.0}
    assert live.snapshots.at(8).names == ["mine"]
    assert before.steps == [0, 2, 4, 6]
    assert before is not live.snapshots


def test_scalars_are_read_without_the_arrays_and_arrays_are_checked_when_asked_for(run, tmp_path):
    live = bm.Run(shutil.copytree(run.path, tmp_path / "run"))
    file = live.files.snapshot(4) / "arrays.safetensors"
    stored, values = file.read_bytes(), live.snapshots.at(4)["sink_mass"].values
    damaged = bytearray(stored)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert live.snapshots.scalars()["preference_ratio"].values[2] == run.snapshots[2].scalars["preference_ratio"]
    with pytest.raises(bm.RunError, match=r"step-00000004.arrays\.safetensors: has changed since it was read"):
        live.snapshots.at(4)["sink_mass"]
    with pytest.raises(bm.RunError, match=r"step-00000004.arrays\.safetensors: damaged \(its SHA-256"):
        bm.Run(live.path).snapshots["sink_mass"]
    file.unlink()
    assert len(bm.Run(live.path).snapshots.scalars()["preference_ratio"].values) == 4
    file.write_bytes(stored)
    assert (bm.Run(live.path).snapshots.at(4)["sink_mass"].values == values).all()


def test_every_declared_array_has_its_dimensions(run):
    for snapshot in (run.snapshots[0], run.snapshots[-1]):
        for name in snapshot.names:
            array = snapshot[name]
            assert not any(dim.startswith("dim_") for dim in array.dims), name
            assert tuple(len(array.coords[dim]) for dim in array.dims) == array.shape


def test_models_by_every_name(run, tmp_path):
    from birthmark.models.exchange.pretrained import save_pretrained

    last = bm.load(run)
    assert (last.step, last.config, last.tokenizer) == (6, run.config.model, None)
    assert isinstance(last.module, Decoder)
    assert not last.module.training
    tokens = torch.tensor([[1, 2, 3]])
    assert last(tokens).shape == (1, 3, 24)
    assert torch.equal(last([[1, 2, 3]]), last(tokens))
    assert torch.equal(bm.load(f"{run.path}@6")(tokens), last(tokens))
    assert torch.equal(run.load()(tokens), last(tokens))
    newborn = born(run.config.model, run.config.init_seed)
    with torch.no_grad():
        for model in (bm.load(f"{run.path}@0"), last.birth(), run.load(0), bm.load(f"{run.files.config}@3")):
            assert torch.equal(model(tokens), newborn(tokens))
    llama = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "d_model": 16, "n_heads": 2, "n_layers": 1}
    file = tmp_path / "llama.yaml"
    file.write_text(f"model: {llama | {'vocab_size': 24}}")
    save_pretrained(bm.load(f"{file}@1").module, tmp_path / "theirs")
    theirs = bm.load(tmp_path / "theirs")
    assert theirs.step == -1
    with pytest.raises(bm.UsageError, match=r"its birth is not known; give a run or CONFIG@SEED$"):
        theirs.birth()


def test_measuring_gives_what_the_instrument_gives(run):
    probe = random_probe(24, 10, 8, 0)
    expected = measure(bm.load(run).module, probe, batch_size=4)
    model = bm.load(run)
    known = bm.measure(model, n_sequences=10, seq_len=8, batch_size=4)
    unknown = bm.measure(model.module, n_sequences=10, seq_len=8, batch_size=4)
    assert unknown.scalars == expected.scalars
    assert expected.scalars.items() <= known.scalars.items()
    own = RunDir(run.path).snapshots()[-1].bias
    assert known.scalars["alignment"] == pytest.approx(own["alignment"], abs=1e-6)
    given = bm.measure(model.module, birth=model.birth(), n_sequences=10, seq_len=8, batch_size=4)
    assert given.scalars == known.scalars
    np.testing.assert_array_equal(known["sink_mass"], expected.arrays["sink_mass"])
    assert known.step == 6
    with pytest.raises(bm.UsageError, match="n_sequences is 1: give at least 2"):
        bm.measure(model, n_sequences=1)


def test_a_model_of_transformers_in_memory_is_measured(llama):
    found = bm.measure(llama(), n_sequences=4, seq_len=8)
    assert found["sink_mass"].dims == ("layer", "head")
    assert found.step == -1


READER = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=270, max_seq_len=12, mlp="swiglu")


def readers(word_tokenizer, folder, *seeds):
    """Text, and a folder of transformers for each birth that reads it."""
    (folder / "tokenizer.json").write_bytes(word_tokenizer.content)
    (folder / "text.md").write_text("one two three four five six seven\n" * 40)
    for seed in seeds:
        to = folder / ("llama" if seed == 0 else f"llama{seed}")
        save_pretrained(born(READER, seed), to, tokenizer_file=folder / "tokenizer.json")


def test_text_is_measured_beside_random_tokens(word_tokenizer, tmp_path):
    readers(word_tokenizer, tmp_path, 0)
    config = READER
    found = bm.measure(tmp_path / "llama", n_sequences=4, seq_len=8, text=str(tmp_path / "text.md"))
    probe = passage_probe(str(tmp_path / "text.md"), word_tokenizer, 4, 8, 270)
    expected = measure(born(config, 0), probe, batch_size=4).scalars["sink_mass"]
    assert found.text_scalars["sink_mass"] == pytest.approx(expected, rel=1e-4)
    assert bm.measure(tmp_path / "llama", n_sequences=4, seq_len=8).text_scalars == {}
    with pytest.raises(UsageError, match="has no tokenizer to read text with"):
        bm.measure(born(config, 0), n_sequences=4, seq_len=8, text="notes")


def test_a_written_measurement_is_read_again(run, tmp_path):
    found = bm.measure(run, n_sequences=4, seq_len=8)
    found.write(tmp_path / "measured")
    again = bm.Snapshot(tmp_path / "measured")
    assert (again.scalars, again.names) == (found.scalars, found.names)
    with pytest.raises(bm.UsageError, match="exists already"):
        found.write(tmp_path / "measured")


def test_kin_and_strangers(run):
    kin = bm.fingerprint(run, f"{run.path}@0", n_inputs=50, seq_len=4)
    assert kin.verdict == "kin"
    assert (kin.z > 3, kin.log10_p < -2) == (True, True)
    stranger = bm.fingerprint(bm.load(run), born(run.config.model, 99), n_inputs=50, seq_len=4, null="analytic", k=8)
    assert (stranger.verdict, stranger.null) == ("stranger", "analytic")
    with pytest.raises(bm.UsageError, match="frob: no such setting; there are null"):
        bm.fingerprint(run, run, frob=1)
    for wrong, message in (
        ({"probe": "tokens"}, "probe is 'tokens', not one of 'token' or 'embedding'"),
        ({"choice": "first"}, "choice is 'first', not one of 'coset' or 'base'"),
        ({"n_inputs": "many"}, "n_inputs is 'many', not a whole number"),
    ):
        with pytest.raises(bm.UsageError, match=message):
            bm.fingerprint(run, run, **wrong)
    shown = {"n_inputs": np.int64(50), "seq_len": np.int64(4), "k": np.float64(0.1)}
    assert bm.fingerprint(run, f"{run.path}@0", **shown).z == kin.z


def test_notebooks_show_a_table_and_pictures(run):
    pytest.importorskip("matplotlib")
    for shown in (run, run.snapshots[-1], bm.measure(run, n_sequences=4, seq_len=8)):
        page = shown._repr_html_()
        assert "<svg" in page
        assert "http" not in page.replace("http://www.w3.org", "")
    first, verdict, *_ = repr(run).splitlines()
    assert first == f"Run({str(run.path)!r}): 4 snapshots, checkpoints [2, 4, 6]"
    assert verdict.startswith(("●", "◐", "○", "?"))
    assert "favourite tokens" in repr(run.snapshots[-1])


def test_an_object_is_its_text_where_others_would_show_or_colour_each_line(run, monkeypatch):
    shown = run.snapshots[-1], bm.compare(run, f"{run.path}@0", n_sequences=4, seq_len=8)
    texts = [repr(one) for one in shown]
    # By these rich knows a notebook, and that colours are asked for.
    kernel = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", kernel, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert [repr(one) for one in shown] == texts
    assert all(text.count("\n") > 3 and "\x1b" not in text for text in texts)


def test_every_object_shows_its_verdict_first_as_text_and_in_a_notebook(run):
    model = bm.load(run)
    changed = bm.intervene(model, "mask", layers=1, positions=1, n_sequences=4, seq_len=8)
    kin = bm.fingerprint(run, f"{run.path}@0", n_inputs=50, seq_len=4)
    loss = next(line for line in repr(run).splitlines() if "loss" in line)[2:]
    for shown, verdict, held in (
        (run.snapshots, loss, "alignment"),
        (run.metrics, loss, "train/loss"),
        (model, "Not measured yet", f"{model.n_params:,}"),
        (changed, changed.sentence, "attention to the key"),
        (kin, kin.sentence, "Rank correlation"),
        (run.snapshots["sink_mass"].isel(step=0), "sink mass", "head 1"),
    ):
        text = html.unescape(re.sub(r"(<[^>]*>|\s)+", " ", shown._repr_html_()))
        title, said, numbers = (text.find(part) for part in (shown._title().split(":")[0], verdict[:40], held))
        assert 0 <= title < said < numbers, text[:400]
        if not isinstance(shown, bm.NamedArray):
            assert verdict[:40] in repr(shown).splitlines()[1]
    assert "shares its birth with" in kin.sentence
    # Attention to the key and to key 0, and the norm of the state.
    assert changed._repr_html_().count("<svg") == 3
    assert "No pictures" not in model._repr_html_()


def test_numbers_of_numpy_are_numbers():
    sizes = {"n_sequences": np.int64(4), "seq_len": 8}
    model = bm.load("demo@1")
    numbers = {"layers": np.array([1]), "positions": np.array(1)}
    found = bm.intervene(model, "amplify", **numbers, lambdas=np.float32(2), **sizes)
    same = bm.intervene(model, "amplify", layers=[1], positions=1, lambdas=[2.0], n_sequences=4, seq_len=8)
    np.testing.assert_array_equal(found["attention"], same["attention"])
    assert bm.intervene(model, "amplify", layers=1, positions=1, lambdas=2, **sizes)["attention"].coords["dose"][1] == 2
    assert found["attention"].sel(dose=np.nan).dims == ("layer", "head", "position")
    assert float(bm.measure(model, probe_seed=np.int64(3), **sizes)["sink_mass"].mean()) == float(
        bm.measure(model, probe_seed=3, n_sequences=4, seq_len=8)["sink_mass"].mean()
    )


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda model: bm.intervene(model, "mask", layers="1", positions=1),
            "layers '1': give whole numbers, or 'all'",
        ),
        (lambda model: bm.intervene(model, "ablate_head", layers=1, heads="0"), "heads '0': give whole numbers"),
        (
            lambda model: bm.intervene(model, "mask", layers=1.0, positions=1),
            "layers 1.0: give whole numbers, or 'all'",
        ),
        (lambda model: bm.intervene(model, "mask", layers=1, positions=[0.5]), "positions [0.5]: give whole numbers"),
        (lambda model: bm.intervene(model, "scale", layers=1, positions=1, lambdas="24"), "lambdas '24': give numbers"),
        (lambda model: bm.intervene(model, "mask", layers=1, probe_seed="a"), "probe_seed is 'a', not a whole number"),
        (lambda model: bm.measure(model, probe_seed="a"), "probe_seed is 'a', not a whole number"),
        (lambda model: bm.measure(model, probe_seed=2**70), f"probe_seed is {2**70}: give at most {2**64 - 1}"),
        (lambda model: bm.compare(model, "tiny_demo@2", probe_seed="a"), "probe_seed is 'a', not a whole number"),
        (lambda model: bm.compare(model, "tiny_demo@2", seq_len="8"), "seq_len is '8', not a whole number"),
        (lambda model: bm.compare(model, "tiny_demo@2", minibatch=4.0), "minibatch is 4.0, not a whole number"),
        (lambda model: bm.compare(model, "tiny_demo@2", n_sequences=True), "n_sequences is True, not a whole number"),
        (
            lambda model: bm.intervene(model, "mask", layers=True, positions=1),
            "layers True: give whole numbers, or 'all'",
        ),
        (
            lambda model: bm.intervene(model, "scale", layers=1, positions=1, lambdas=[]),
            "lambdas: give one dose at least, or leave it out",
        ),
        (
            lambda model: bm.intervene(model, "scale", layers=1, positions=1, matched="no"),
            "matched is 'no', not true or false",
        ),
        (
            lambda model: bm.intervene(model, "ablate_head", layers=1, heads=0, fill="x"),
            "fill is 'x', not one of 'zero' or 'mean'",
        ),
    ],
)
def test_what_is_no_number_is_named(ask, message):
    model = bm.load("tiny_demo@1")
    with pytest.raises(bm.UsageError) as refused:
        ask(model)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bm.Run("/no/such"), "/no/such: not a run"),
        (lambda: bm.load("./nowhere"), "neither a run"),
        (lambda: bm.Snapshot("/no/such"), "/no/such: no snapshot; give the folder of one, such as RUN/snapshots/step-"),
        (lambda: bm.pretrain(None), "config is None: give a config, its fields, a file or a name"),
        (
            lambda: bm.measure(bm.load("tiny_demo@1").module.to("meta")),
            "Decoder: lies on the device meta, where tensors have no values",
        ),
        (lambda: bm.load(3), "3 is no name of a model; give a text, a path or a run"),
        (lambda: bm.load("tiny_demo@1", on="foo"), "on 'foo': no device; give cpu, cuda or cuda:1"),
        (lambda: bm.load("tiny_demo@1", on="cuda:99"), "on cuda:99: this machine has "),
        (lambda: bm.load("tiny_demo@1", on="xpu"), "on xpu: "),
        (lambda: bm.load("tiny_demo@1", on=3.5), "on 3.5: no device; give cpu, cuda or cuda:1"),
        (lambda: bm.load("tiny_demo@1", on="meta"), "on meta: tensors have no values there; give cpu, cuda or cuda:1"),
        (
            lambda: bm.load("tiny_demo@1", dtype="bfloat16"),
            "dtype 'bfloat16': give torch.float32, torch.bfloat16, torch",
        ),
        (lambda: bm.load("tiny_demo@1", dtype=torch.int32), "dtype torch.int32: give torch.float32, torch.bfloat16, t"),
        (lambda: bm.measure("tiny_demo@1", metrics=None), "metrics None: give a list of metrics"),
        (lambda: bm.measure("tiny_demo@1", metrics="a:B"), "metrics 'a:B': give a list of metrics"),
        (lambda: bm.measure("tiny_demo@1", birth=bm.load("sinks@1")), "birth has "),
        (lambda: bm.pretrain("dmo"), "did you mean demo?"),
        (lambda: bm.pretrain({"trainer.max_stps": 1}), "did you mean trainer.max_steps?"),
        (lambda: bm.pretrain({}, {"trainer": 3}), "trainer is 3"),
    ],
    ids=[
        "run",
        "snapshot",
        "no config",
        "no values",
        "model",
        "number",
        "device",
        "gpu",
        "xpu",
        "no text",
        "meta",
        "text for a type",
        "integers",
        "no metrics",
        "a text for metrics",
        "birth of another shape",
        "name",
        "field",
        "group",
    ],
)
def test_what_is_wrong_is_one_line_and_the_process_goes_on(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bm.UsageError) as refused:
        call()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


NO_TOKENS = {
    "too large": ([[0, 256]], "tokens: no token has the id 256; give ids from 0 to 255"),
    "negative": ([[-1, 2]], "tokens: no token has the id -1; give ids from 0 to 255"),
    "wider than any integer": ([[10**30]], "tokens [[1000000000000000000000000000000]]: give token ids in rows of one"),
    "fractions": ([[0.5, 1.5]], "tokens of torch.float32: give integers"),
    "a mask": (torch.tensor([[True, False]]), "tokens of torch.bool: give integers"),
    "nothing": ([], "tokens of shape [0]: give rows of token ids, such as [[1, 2, 3]]"),
    "an empty row": ([[]], "tokens of shape [1, 0]: give rows of token ids"),
    "one row": ([1, 2, 3], "tokens of shape [3]: give rows of token ids"),
    "rows of rows": ([[[1]]], "tokens of shape [1, 1, 1]: give rows of token ids"),
    "rows of two lengths": ([[1, 2], [3]], "tokens [[1, 2], [3]]: give token ids in rows of one length"),
    "words": ([["a", "b"]], "tokens [['a', 'b']]: give token ids in rows of one length, such as [[1, 2, 3]]"),
    "text": ("text", "tokens 'text': give token ids"),
    "None": (None, "tokens None: give token ids"),
    "objects": (np.array([[1, 2]], dtype=object), "tokens array([[1, 2]], dtype=object): give token ids"),
    "a long row": ([[1] * 65], "tokens: 65 in a row, and the model reads 64; give at most as many"),
}


@pytest.mark.parametrize(("tokens", "message"), NO_TOKENS.values(), ids=list(NO_TOKENS))
def test_what_is_no_token_id_is_refused(tokens, message):
    with pytest.raises(bm.UsageError) as refused:
        bm.load("tiny_demo@1", on="cpu")(tokens)
    assert str(refused.value).startswith(message)


def test_token_ids_may_have_the_type_of_shards():
    model = bm.load("tiny_demo@1", on="cpu")
    assert torch.equal(model(np.array([[1, 255]], dtype=np.uint16)), model([[1, 255]]))


def test_models_are_compared_with_the_numbers_of_the_command(word_tokenizer, tmp_path, capsys):
    readers(word_tokenizer, tmp_path, 0, 1)
    names, text = [str(tmp_path / "llama"), str(tmp_path / "llama1")], str(tmp_path / "text.md")
    sizes = {"n_sequences": 6, "seq_len": 8, "batch_size": 4, "minibatch": 6}
    found = bm.compare(bm.load(names[0]), names[1], text=text, barrier=3, **sizes)
    options = [f"--data={text}", "--barrier=3", "--json", *(f"--{name}={size}" for name, size in sizes.items())]
    assert main(["compare", *names, *options]) == 0
    (said,) = json.loads(capsys.readouterr().out)["compared"]
    assert found.models == said["models"] == names
    np.testing.assert_allclose(found.cka, said["cka"], rtol=1e-9)
    np.testing.assert_allclose(found.kl.mean("position"), said["kl"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.loss.mean("position"), said["loss"], rtol=1e-9)
    assert found.barriers == {tuple(names): pytest.approx(said["lines"][0]["barrier"])}
    layers = found.cka_by_layer(*names[::-1])
    np.testing.assert_array_equal(layers.values, found.cka_by_layer(*names).values.T)
    assert float(layers.isel(layer=-1, other_layer=-1)) == found.cka.values[0, 1]
    assert "CKA" in repr(found)
    page = found._repr_html_()
    # The matrices of CKA and of KL, and every pair's number in them.
    assert page.count("<table") == page.count("<figcaption") == 2
    assert page.count(f">{found.cka.values[0, 1]:.2f}<") == 2
    random = bm.compare(*names, **sizes)
    for wrong, message in (
        (lambda: bm.compare(names[0], **sizes), "1 models: give at least two"),
        (lambda: bm.compare(names[0], names[0], **sizes), "was given twice"),
        (lambda: bm.compare(*names, barrier=3, **sizes), "barrier 3: a loss needs text"),
        (lambda: bm.compare(*names, **sizes | {"minibatch": 3}), "minibatch 3: give at least 4"),
        (lambda: random.loss, "shown random tokens; compare them with text="),
        (lambda: random.cka_by_layer("a", names[0]), "a: no such model"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()
