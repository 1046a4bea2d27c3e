"""`birthmark snapshot`: every kind of model, measured by one command."""

import json
import re
import shutil
import socket
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import quiet_runs
import torch
import transformers
from safetensors.torch import load_file, save_file

import birthmark
from birthmark.data.config import SourceConfig
from birthmark.data.probes import passage_probe, random_probe
from birthmark.errors import UsageError
from birthmark.launch.cli import main
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.measurement import measure
from birthmark.measure.records import RunDir, Snapshot
from birthmark.models.birth import born
from birthmark.models.by_block import Streaming
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import load_pretrained, save_pretrained
from birthmark.trainer.by_name.loaded_model import UNKNOWN_STEP, load_named, measure_loaded, open_by_block
from birthmark.trainer.by_name.texts_of_runs import data_of_run
from birthmark.trainer.config_file import read_config
from birthmark.trainer.saved_config import write_config

transformers.logging.disable_progress_bar()

PROBE = ["--n_sequences=6", "--seq_len=8", "--batch_size=4"]
SHAPE = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """A tiny run with a checkpoint after 2 and after 4 steps, on the task without text."""
    snapshot = SnapshotConfig(n_sequences=6, seq_len=8, n_strangers=1)
    config = tiny({"trainer.max_steps": 4, "snapshot": snapshot})
    return quiet_runs.run(config, tmp_path_factory.mktemp("runs") / "tiny")


def printed(capsys, *arguments):
    """The JSON that the command prints."""
    capsys.readouterr()  # saving a model of transformers imports DeepSpeed, which prints
    assert main(["snapshot", *arguments, *PROBE, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def llama():
    """A birth that transformers has the shape of."""
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=24, max_seq_len=12, mlp="swiglu")
    return born(config, 5)


def test_a_run_gives_what_its_own_snapshots_say(run, capsys, tmp_path):
    own = run.snapshots()[-1]
    found = printed(capsys, str(run.path), f"--out={tmp_path / 'out'}")
    assert found["step"] == own.step == 4
    same = [name for name in own.bias if not name.endswith("_stranger")]
    assert set(same) == set(found["scalars"])
    for name in same:
        assert found["scalars"][name] == pytest.approx(own.bias[name], rel=1e-5, abs=1e-6), name
    assert [t["id"] for t in found["top_tokens"]] == [t["id"] for t in own.summary["top_tokens"]]
    assert [t["rank_at_birth"] for t in found["top_tokens"]] == [t["rank_at_birth"] for t in own.summary["top_tokens"]]
    written = Snapshot.read(tmp_path / "out")
    assert written.bias == found["scalars"]
    np.testing.assert_allclose(written.arrays["importance"], own.arrays["importance"], atol=1e-6)
    assert [row["layer"] for row in found["layers"]] == [0, 1, 2]
    assert found["layers"][2]["alignment"] == pytest.approx(found["scalars"]["alignment"])
    assert "sink_mass" not in found["layers"][0]


def test_steps_checkpoints_and_births_are_found(run, capsys):
    by_option = printed(capsys, str(run.path), "--step=2")
    for name in (f"{run.path}@2", str(run.checkpoint(2))):
        found = printed(capsys, name)
        assert (found["step"], found["scalars"]) == (2, by_option["scalars"])
    newborn = printed(capsys, str(run.path), "--step=0")
    assert (newborn["step"], newborn["scalars"]["drift"]) == (0, pytest.approx(1, abs=1e-9))
    assert newborn["scalars"]["rank_persistence"] == pytest.approx(1)
    assert printed(capsys, f"{run.config}@3")["scalars"] == newborn["scalars"]


def test_a_folder_of_transformers_is_measured_without_a_birth(capsys, tmp_path):
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=40, max_seq_len=12, mlp="swiglu")
    save_pretrained(born(config, 0), tmp_path / "llama")
    found = printed(capsys, str(tmp_path / "llama"), f"--out={tmp_path / 'out'}")
    probe = random_probe(40, 6, 8, 0)
    native = measure(load_pretrained(tmp_path / "llama"), probe, batch_size=4)
    assert found["scalars"].keys() == native.scalars.keys()
    for name, value in native.scalars.items():
        assert found["scalars"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert "alignment" not in found["layers"][1]
    assert "rank_at_birth" not in found["top_tokens"][0]
    assert (found["step"], found["model"]["model_type"]) == (UNKNOWN_STEP, "llama")
    assert Snapshot.read(tmp_path / "out").arrays.keys() == native.arrays.keys()


def assert_same_snapshot(one, other):
    """Of two folders, everything that is measured."""
    one, other = Snapshot.read(one), Snapshot.read(other)
    assert one.bias == pytest.approx(other.bias, rel=1e-5, abs=1e-5)
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_allclose(other.arrays[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_streamed_models_are_measured_as_whole_ones(run, capsys, tmp_path):
    save_pretrained(llama(), tmp_path / "hf", max_shard_bytes=3000)
    names = {
        "last": str(run.path),
        "birth": f"{run.config}@3",
        "first": f"{run.path}@2",
        "theirs": str(tmp_path / "hf"),
    }
    for name, model in names.items():
        more = [] if name == "theirs" else ["--strangers=1"]
        whole = printed(capsys, model, f"--out={tmp_path / name}", *more)
        streamed = printed(capsys, model, "--stream", f"--out={tmp_path / name}-streamed", *more)
        assert_same_snapshot(tmp_path / name, tmp_path / f"{name}-streamed")
        assert streamed["step"] == whole["step"]
        assert [token["id"] for token in streamed["top_tokens"]] == [token["id"] for token in whole["top_tokens"]]
    # Strangers are those of the run's own snapshots.
    own = run.snapshots()[-1].bias
    found = printed(capsys, str(run.path), "--strangers=1")["scalars"]
    assert found["alignment_stranger"] == pytest.approx(own["alignment_stranger"], rel=1e-5)


def test_what_cannot_be_streamed_is_refused_in_one_line(run, tmp_path, refused):
    save_pretrained(llama(), tmp_path / "hf", max_shard_bytes=3000)
    hf, birth = tmp_path / "hf", f"{run.config}@3"
    for n in (-1, 10**18):
        assert f"--strangers {n}: give 0 to 1000" in refused("snapshot", birth, f"--strangers={n}")
    assert "only --stream keeps anything there" in refused("snapshot", birth, "--scratch=/tmp")
    assert "is not known; leave it out" in refused("snapshot", str(hf), "--stream", "--strangers=2", *PROBE)
    transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE, head_dim=8)).save_pretrained(tmp_path / "gemma")
    assert "model_type 'gemma' is none of gpt2" in refused("snapshot", str(tmp_path / "gemma"), "--stream")
    config = hf / "config.json"
    before = config.read_text()
    config.write_text(before.replace('"float32"', '"bfloat16"'))
    failing = ("snapshot", hf, "--stream", *PROBE)
    assert "embed_tokens.weight is F32, config.json says bfloat16" in refused(*failing, status=1)
    config.write_text(before)
    shard = sorted(hf.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard}: missing" in refused(*failing, status=1)


def test_text_stands_beside_random_tokens(run, word_tokenizer, capsys, tmp_path, refused):
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=270, max_seq_len=12, mlp="swiglu")
    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    save_pretrained(born(config, 0), tmp_path / "llama", tokenizer_file=tmp_path / "tokenizer.json")
    (tmp_path / "text.md").write_text("one two three four five six seven\n" * 20)
    name, data = str(tmp_path / "llama"), f"--data={tmp_path / 'text.md'}"
    found = printed(capsys, name, data)
    text = measure(born(config, 0), passage_probe(str(tmp_path / "text.md"), word_tokenizer, 6, 8, 270), batch_size=4)
    assert found["bias_text"]["sink_mass"] == pytest.approx(text.scalars["sink_mass"], rel=1e-4)
    mean = text.arrays["sink_mass"].mean(1)
    assert [row["text_sink_mass"] for row in found["layers"][1:]] == pytest.approx(mean.tolist(), rel=1e-4)
    assert main(["snapshot", name, data, *PROBE]) == 0
    assert " on text: the first position gets" in " ".join(capsys.readouterr().out.split())
    # A run reads its own validation text; alone, random tokens are called what they are.
    (last,) = (snapshot for snapshot in run.snapshots() if snapshot.step == 4)
    own = printed(capsys, str(run.path), "--probe=text")
    assert set(own["bias_text"]) == set(own["scalars"])
    assert own["scalars"]["sink_mass"] == pytest.approx(last.bias["sink_mass"], rel=1e-5)
    assert main(["snapshot", str(run.path), *PROBE]) == 0
    assert "Text was not measured, where it may be larger." in " ".join(capsys.readouterr().out.split())
    assert "has no tokenizer" in refused("snapshot", str(run.path), data)
    assert "--data PATH" in refused("snapshot", name, "--probe=text")
    assert f"--data: '{tmp_path}/none' does not exist" in refused("snapshot", name, f"--data={tmp_path}/none")
    # Every command that reads text calls it so.
    for command in (["compare", name, name], ["quantise", name], ["length", name, "--to=12"]):
        assert main([*command, f"--data={tmp_path}/none"]) == 2
        assert capsys.readouterr().err.startswith(f"birthmark: error: --data: '{tmp_path}/none' does not exist")
    assert "has no text to read" in refused("snapshot", name, "--data=backcopy")
    assert "only --probe text reads it" in refused("snapshot", name, data, "--probe=random")


def test_a_run_of_others_decides_neither_where_is_written_nor_which_host_is_called(
    tiny, write_documents, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(write_documents(tmp_path / "text").parent)  # its path is relative
    fields = {"data.path": "text", "data.cache_dir": str(tmp_path / "first"), "data.val_fraction": 0.3}
    fields |= {"model.vocab_size": 280, "trainer.max_steps": 1, "snapshot.enabled": False}
    run = quiet_runs.run(tiny(fields), tmp_path / "run")
    before = printed(capsys, str(run.path), "--probe=text")
    config = read_config(run.config)

    def sent(**changes):
        write_config(replace(config, data=replace(config.data, **changes)), run.config)

    sent(cache_dir=str(tmp_path / "theirs"), stage_to=str(tmp_path / "staged"))
    assert {**printed(capsys, str(run.path), "--probe=text"), "seconds": 0} == {**before, "seconds": 0}
    assert {path.name for path in tmp_path.iterdir()} == {"text", "first", "home", "run"}
    assert any((tmp_path / "home/.cache/birthmark").glob("shards-*"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/notes.txt"
        for changes in (
            {"path": url}, {"path": ["text", url]}, {"decontaminate": url}, {"path": "hf:a/b"},
            {"path": "stdlib", "sources": [SourceConfig("text"), SourceConfig(url)]},
            {"val_path": url},
        ):  # fmt: skip
            sent(**changes)
            with pytest.raises(UsageError, match=r"^run: its text is (http://127|hf:a/b).*; give text, --data PATH$"):
                data_of_run("run", run.path)
        assert main(["snapshot", str(run.path), *PROBE]) == 0
        assert "random tokens alone, not text" in capsys.readouterr().err
        sent(tokenizer=url)  # the run keeps its own copy
        assert data_of_run("run", run.path).record["tokenizer_hash"] == run.read_birth()["data"]["tokenizer_hash"]
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture
def padded(word_tokenizer, tmp_path):
    """A model of 300 rows whose tokenizer, which begins texts with BOS, has 270 tokens; the folder's name."""
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=300, max_seq_len=12, mlp="swiglu")
    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    save_pretrained(born(config, 0), tmp_path / "padded", tokenizer_file=tmp_path / "tokenizer.json")
    (tmp_path / "text.md").write_text("one two three four five six seven\n" * 20)
    return str(tmp_path / "padded")


def test_random_tokens_are_tokens_and_bos_is_told_from_its_position(padded, word_tokenizer, capsys, tmp_path):
    found = printed(capsys, padded, f"--data={tmp_path / 'text.md'}")
    assert found["probe"]["n_tokens"] == 270
    model = load_named(padded).model
    random_NT = random_probe(270, 6, 8, 0)
    text_NT = passage_probe(str(tmp_path / "text.md"), word_tokenizer, 6, 8, 300)
    assert (text_NT[:, 0] == 269).all()
    probes = {
        "scalars": random_NT,
        "bias_bos": np.concatenate([np.full((6, 1), 269), random_NT[:, :-1]], 1),
        "bias_text": text_NT,
        "bias_text_without_bos": text_NT[:, 1:],
    }
    for group, tokens_NT in probes.items():
        wanted = measure(model, tokens_NT, batch_size=4).scalars
        assert {name: found[group][name] for name in wanted} == pytest.approx(wanted, rel=1e-5, nan_ok=True), group
    assert found["probe_bos"] == {
        "kind": "bos", "n_sequences": 6, "seq_len": 8, "token": 269, "text": "<s>", "is_added": True
    }  # fmt: skip
    assert "bias_bos" not in printed(capsys, padded, "--controls=false")
    assert "bias_bos" not in printed(capsys, padded, "--stream")
    streamed = printed(capsys, padded, "--stream", "--controls=true")
    assert streamed["bias_bos"] == pytest.approx(found["bias_bos"], rel=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_every_block_of_every_pass_moves_the_bar(run, stream):
    settings, totals, moved = SnapshotConfig(n_sequences=6, seq_len=8, batch_size=4), [], []

    @contextmanager
    def bar(total):
        totals.append(total)
        yield moved.append

    loaded = open_by_block(str(run.path), torch.float32, Streaming()) if stream else load_named(str(run.path))
    measure_loaded(loaded, settings, n_strangers=1, progress=bar)
    # Two blocks of birth, stranger and model; in two batches where a batch passes all blocks.
    assert totals == [sum(moved)] == [2 * 3 if stream else 2 * 2 * 3]


def test_what_is_written_can_be_reported(run, capsys, tmp_path):
    """Also without a birth: what compares with it is missing in the page, and nothing else."""
    shutil.copytree(run.path, tmp_path / "run")
    copy = RunDir(tmp_path / "run")
    transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE, head_dim=8)).save_pretrained(tmp_path / "gemma")
    for model, step in ((run.path, 4), (tmp_path / "gemma", 2)):
        folder = copy.snapshot(step)
        shutil.rmtree(folder)
        printed(capsys, str(model), f"--step={step}", f"--out={folder}")
    assert main(["report", str(copy.path)]) == 0
    assert copy.report.is_file()


def test_a_family_that_our_decoder_cannot_be_is_measured_too(capsys, tmp_path):
    transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE, head_dim=8)).save_pretrained(tmp_path / "gemma")
    found = printed(capsys, str(tmp_path / "gemma"), "--dtype=bfloat16")
    assert found["probe"] | {"dtype": "bfloat16", "seq_len": 8} == found["probe"]
    assert 0 < found["scalars"]["sink_mass"] < 1
    assert main(["snapshot", str(tmp_path / "gemma"), *PROBE]) == 0
    page = capsys.readouterr().out
    assert printed(capsys, str(tmp_path / "gemma"), "--step=1000")["step"] == 1000
    assert "favourite tokens: [" in page
    assert "6 sequences of 8 random tokens, float32" in page
    assert "sink_mass_max" in page
    assert "nan" not in page.split()


def test_what_cannot_be_measured_is_refused_in_one_line(run, capsys, tmp_path, refused, monkeypatch):
    assert "neither a run" in refused("snapshot", "./nowhere")
    assert "neither a run" in refused("snapshot", str(tmp_path))
    assert "not from the hub either" in refused("snapshot", "someone/nothing")
    assert "says its step itself" in refused("snapshot", f"{run.path}@2", "--step=3")
    assert "give 0 or more" in refused("snapshot", str(run.path), "--step=-3")
    assert "no checkpoint of step 3" in refused("snapshot", str(run.path), "--step=3")
    assert "'x' is no step" in refused("snapshot", f"{run.path}@x")
    assert "--n_sequences is 1: give at least 2" in refused("snapshot", str(run.path), "--n_sequences=1")
    assert "exists already" in refused("snapshot", str(run.path), f"--out={tmp_path}")
    t5 = transformers.T5Config(vocab_size=9, d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "t5: transformers cannot load it (" in refused("snapshot", str(tmp_path / "t5"))
    gpt2 = transformers.GPT2Config(vocab_size=40, n_embd=8, n_head=1, n_layer=1, n_positions=12)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    assert "--seq_len is 13: this model has 12 positions; give at most 12" in refused(
        "snapshot", str(tmp_path / "gpt2"), "--seq_len=13"
    )
    assert printed(capsys, str(tmp_path / "gpt2"))["n_heads"] == 1
    monkeypatch.setattr("birthmark.measure.hf.observed_pass._LEAST", (99, 56))
    older = f"needs transformers 99.56 or later, and this is {transformers.__version__}: pip install -U transformers"
    assert older in refused("snapshot", str(tmp_path / "t5"))


def test_a_folder_that_lacks_a_tensor_is_not_measured(capsys, tmp_path):
    config = transformers.LlamaConfig(**SHAPE)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["snapshot", str(tmp_path / "hf"), *PROBE]) == 1
    assert re.search(r"layers\.0\.mlp\.up_proj\.weight is missing", capsys.readouterr().err)


def test_the_example_in_the_docs_runs(monkeypatch):
    page = (Path(birthmark.__file__).parent / "docs/measuring.md").read_text()
    section = page.split("## Any transformers model")[1]
    code = section.split("```python\n")[1].split("```")[0]
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE, head_dim=8))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: model)
    scope = {}
    exec(code, scope)
    assert 0 < scope["found"].scalars["sink_mass"] < 1
