"""Snapshots in a training loop written out by hand, around a model of transformers."""

import copy
import dataclasses
import gc
import hashlib
import json
import pickle
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from lightning.fabric import Fabric
from tokenizers import Tokenizer
from torchmetrics import Metric
from transformers import PreTrainedTokenizerFast

import birthmark
from birthmark.data.probes import passage_probe, random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.hf import HFModel
from birthmark.measure.measurement import BirthReference, birth_reference, measure
from birthmark.measure.recorder import SnapshotRecorder, top_tokens
from birthmark.measure.records import RunDir, Snapshot
from birthmark.metrics.quantity import Quantity
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.report.run_page import build_pages, build_report

transformers.logging.set_verbosity_error()

COMPARED = {"alignment", "drift", "energy_share", "energy_share_chance", "rank_persistence", "kendall_tau", "rbo"}


def train(model, batches, each=lambda step: None):
    """Losses of a plain loop; ``each`` is called at step 0 and after every step."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.train().parameters(), lr=0.01), []
    each(0)
    for step, batch in enumerate(batches, start=1):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        each(step)
    return losses


def test_the_training_is_the_same_bit_for_bit_with_and_without(llama, token_batches, small_probe, tmp_path):
    settings = dataclasses.replace(small_probe, gradients=True)
    recorder, (measured, left) = SnapshotRecorder(tmp_path, settings), (llama(), llama())
    losses = train(measured, token_batches, lambda step: recorder.take(measured, step))
    state = torch.get_rng_state()
    assert losses == train(left, token_batches)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(measured.parameters(), left.parameters(), strict=True))
    assert [m.training for m in measured.modules()] == [m.training for m in left.modules()]
    assert [sorted(vars(m)) for m in measured.modules()] == [sorted(vars(m)) for m in left.modules()]


@pytest.mark.parametrize("compiled", [pytest.param("the model", marks=pytest.mark.heavy), "its blocks"])
def test_a_model_compiled_in_place_trains_on_and_is_measured_as_it_is(compiled, llama, token_batches, tmp_path):
    """Backend eager: graphs as they are compiled, without a compiler. The figures are those of the same weights, not
    compiled."""

    def compile_in_place(model):
        torch._dynamo.reset()
        if compiled == "the model":
            model.compile(backend="eager")
        else:
            first, second = model.model.layers
            first.compile(backend="eager")
            model.model.layers[1] = torch.compile(second, backend="eager")
        return model

    settings, found = SnapshotConfig(n_sequences=4, seq_len=8), []
    recorder, measured, left = SnapshotRecorder(tmp_path / "in", settings), llama(), llama()

    def each(step):
        if step < 2:
            found.append(recorder.take_if_possible(measured, step))

    losses = train(compile_in_place(measured), token_batches[:2], each)
    assert losses == train(compile_in_place(left), token_batches[:2])
    assert all(torch.equal(a, b) for a, b in zip(measured.parameters(), left.parameters(), strict=True))
    assert "not_measured" not in found[1].summary
    assert found[0].bias == SnapshotRecorder(tmp_path / "plain", settings).take(llama(), 0).bias


def test_wrappers_of_training_are_measured_as_the_model_within_and_stay(llama, small_probe, tmp_path):
    """Fabric's module opens autocast anew around each pass."""
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = llama()
    expected = SnapshotRecorder(tmp_path / "raw", small_probe).take(model, 0)
    for name, wrapper in (("fabric", fabric.setup_module(model)), ("parallel", torch.nn.DataParallel(model))):
        before = [(id(m), m.training, sorted(vars(m))) for m in wrapper.modules()]
        found = SnapshotRecorder(tmp_path / name, small_probe).take(wrapper, 0)
        assert (found.bias, found.summary["probe"]) == (expected.bias, expected.summary["probe"])
        assert found.arrays.keys() == expected.arrays.keys()
        assert all(np.array_equal(array, expected.arrays[key], equal_nan=True) for key, array in found.arrays.items())
        assert [(id(m), m.training, sorted(vars(m))) for m in wrapper.modules()] == before


def test_a_snapshot_gives_rwkv_its_weights_back(small_probe, tmp_path):
    """Behind block 6 it divides weights by 2 as it evaluates, and multiplies them as it trains again."""
    config = transformers.RwkvConfig(vocab_size=61, hidden_size=16, attention_hidden_size=16, num_hidden_layers=8)
    for mode in (True, False):
        model = transformers.RwkvForCausalLM(config).train(mode)
        before = copy.deepcopy(model.state_dict())
        SnapshotRecorder(tmp_path / str(mode), small_probe).take(model, 0)
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        assert {m.training for m in model.modules()} == {mode}


def test_a_longer_probe_leaves_buffers_and_what_rotary_embeddings_have_grown(their_config, token_batches, tmp_path):
    """Dynamic rotary embeddings compute their frequencies anew for the longest sequence that they have seen."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    config = their_config("llama", max_position_embeddings=8, rope_parameters=rope)
    recorder = SnapshotRecorder(tmp_path, SnapshotConfig(n_sequences=2, seq_len=16))

    def trained(take):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.register_buffer("n_passes", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, args: module.n_passes.add_(1) and None)
        losses = train(model, token_batches[:2], lambda step: take(model, step))
        return losses, *(x.detach().numpy() for x in (*model.parameters(), *model.buffers()))

    for measured, left in zip(trained(recorder.take), trained(lambda model, step: None), strict=True):
        np.testing.assert_array_equal(measured, left)


@pytest.mark.filterwarnings("ignore:.*(snapshots of an earlier training|it is shortened to|has token 60)")
def test_in_a_second_training_a_recorder_measures_as_a_new_one_does(their_config, their_model, small_probe, tmp_path):
    settings = dataclasses.replace(small_probe, seq_len=30)
    text = np.arange(60).reshape(4, 15) + 1

    def of_vocabulary(n):
        return transformers.LlamaForCausalLM(their_config("llama", vocab_size=n))

    def facts(snapshot):
        return snapshot.bias, snapshot.summary["probe"], snapshot.summary.get("not_measured")

    recorder, resized = SnapshotRecorder(tmp_path / "again", settings, probes={"text": text}), of_vocabulary(61)
    for number, model in enumerate((their_model("gpt2"), of_vocabulary(40), resized, resized)):
        new = SnapshotRecorder(tmp_path / str(number), settings, probes={"text": text})
        assert facts(recorder.take_if_possible(model, 0)) == facts(new.take_if_possible(model, 0))
        resized.resize_token_embeddings(61 + number * 8, mean_resizing=False)
    with pytest.raises(UsageError, match=r"step-00000000: is of another model or another probe"):
        recorder.take(resized, 1)


def test_texts_may_be_given_between_snapshots_and_probes_may_not(llama, small_probe, tmp_path):
    recorder, model = SnapshotRecorder(tmp_path, small_probe), llama()
    recorder.take(model, 0)
    with pytest.raises(TypeError):
        recorder.probes["mine"] = np.full((2, 6), 3)
    recorder.token_texts = lambda ids: [f"t{token}" for token in ids]
    texts = [row["text"] for row in recorder.take(model, 1).summary["top_tokens"]]
    assert all(text.startswith("t") for text in texts)


def test_copies_of_one_model_are_compared_with_the_birth_that_was_not_written(llama, small_probe, tmp_path):
    recorder, model = SnapshotRecorder(tmp_path / "copies", small_probe), llama()
    reference = SnapshotRecorder(tmp_path / "one", small_probe)
    reference.take(model, 0)
    recorder.take_if_possible(model, 0, writes=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    found = recorder.take_if_possible(copy.deepcopy(model), 1)
    assert found.bias == reference.take(model, 1).bias
    assert "rank_persistence" in found.bias


def test_a_recorder_neither_keeps_its_model_alive_nor_pickles_it(llama, small_probe, tmp_path):
    recorder, model = SnapshotRecorder(tmp_path, small_probe), llama()
    birth = recorder.take(model, 0)
    again = pickle.loads(pickle.dumps(recorder))
    assert len(pickle.dumps(again)) < sum(p.nbytes for p in model.parameters()) + len(pickle.dumps(birth))
    assert again.take(model, 1).bias["drift"] == recorder.take(model, 1).bias["drift"]
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_a_snapshot_is_what_measure_gives_compared_with_step_0(llama, token_batches, small_probe, tmp_path):
    recorder, model, copies = SnapshotRecorder(tmp_path, small_probe), llama(), {}

    def each(step):
        copies[step] = copy.deepcopy(model)
        if step % 2 == 0:
            recorder.take(model, step)

    train(model, token_batches, each)
    probe = random_probe(61, 10, 8, 0)
    birth = birth_reference(HFModel(copies[0]), probe, 4)
    snapshots = RunDir(tmp_path).snapshots()
    assert [snapshot.step for snapshot in snapshots] == [0, 2, 4]
    for snapshot in snapshots:
        found = measure(HFModel(copies[snapshot.step]), probe, birth, batch_size=4)
        assert snapshot.bias == found.scalars
        assert snapshot.arrays.keys() == found.arrays.keys()
        for name, array in found.arrays.items():
            np.testing.assert_array_equal(snapshot.arrays[name], array, err_msg=name)
    first, _, last = snapshots
    assert first.bias["drift"] == pytest.approx(1)
    assert last.bias["drift"] < 0.999
    assert last.summary["model"]["model_type"] == "llama"
    facts = {"kind": "random", "n_sequences": 10, "seq_len": 8, "probe_seed": 0, "dtype": "float32"}
    assert last.summary["probe"] == facts | {"digest": hashlib.sha256(probe.tobytes()).hexdigest()[:16]}
    assert not {"tokens", "init_seed", "alignment_stranger"} & {*last.summary, *last.bias}
    order = np.argsort(-first.arrays["mean_prob"], kind="stable").tolist()
    for token in last.summary["top_tokens"]:
        assert token["rank_at_birth"] == order.index(token["id"]) + 1
        assert token["text"] == f"[{token['id']}]"
    assert len(last.summary["top_tokens"]) == 5


def test_a_later_recorder_compares_with_the_step_0_that_stands_there(llama, token_batches, small_probe, tmp_path):
    model, one = llama(), SnapshotRecorder(tmp_path, small_probe)
    one.take(model, 0)
    train(model, token_batches)
    again = SnapshotRecorder(tmp_path, small_probe).take(model, 5)
    assert again.bias == one.take(model, 5).bias


def test_attached_late_it_leaves_out_what_compares_with_birth(llama, small_probe, tmp_path):
    model, newborn = llama(1), llama(0)
    late = SnapshotRecorder(tmp_path / "late", small_probe).take(model, 7)
    birth = birth_reference(HFModel(newborn), random_probe(61, 10, 8, 0), 4)
    given = SnapshotRecorder(tmp_path / "given", small_probe, birth=birth).take(model, 7)
    assert given.bias.keys() - late.bias.keys() == COMPARED | {"overlap_10"}
    assert all(given.bias[name] == value for name, value in late.bias.items())
    assert "rank_at_birth" not in late.summary["top_tokens"][0]
    # A birth that is given holds at step 0 too.
    assert SnapshotRecorder(tmp_path / "first", small_probe, birth=birth).take(model, 0).bias == given.bias


def test_births_that_can_be_made_again_give_references_and_strangers(llama, small_probe, tmp_path):
    """As our own runs have them, for models of transformers."""
    model = llama(9)
    recorder = SnapshotRecorder(tmp_path / "seeds", small_probe, newborn=llama, init_seed=3, tokens_per_step=48)
    found, probe = recorder.take(model, 2), random_probe(61, 10, 8, 0)
    births = [birth_reference(HFModel(llama(seed)), probe, 4) for seed in (3, 4, 5)]
    assert found.bias == measure(HFModel(model), probe, births[0], births[1:], batch_size=4).scalars
    assert (found.summary["init_seed"], found.summary["tokens"]) == (3, 96)
    first = recorder.take(model, 0)
    np.testing.assert_array_equal(first.arrays["stranger_mean_prob"], [b.mean_prob for b in births[1:]])
    resumed = SnapshotRecorder(tmp_path / "seeds", small_probe, newborn=llama, init_seed=3)
    assert len(resumed.take(model, 4).arrays["rank_persistence_stranger"]) == 2


@pytest.mark.heavy
def test_wrapped_models_are_the_same_model(llama, small_probe, tmp_path):
    model, recorder = llama(), SnapshotRecorder(tmp_path, small_probe)
    plain = recorder.take(model, 0)
    assert recorder.take(torch.compile(model), 1).bias == plain.bias
    assert recorder.take(HFModel(model), 2).bias == plain.bias
    ours = torch.compile(born(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=24), 0))
    assert SnapshotRecorder(tmp_path / "ours", small_probe).take(ours, 0).bias["drift"] == pytest.approx(1)


def test_a_text_probe_stands_beside_the_random_one(llama, small_probe, tmp_path):
    text = np.arange(24).reshape(3, 8)
    model = llama()
    found = SnapshotRecorder(tmp_path, small_probe, probes={"text": text}).take(model, 0)
    alone = measure(HFModel(model), text, batch_size=4).scalars
    assert {name: found.summary["bias_text"][name] for name in alone} == alone
    stored = Snapshot.read(RunDir(tmp_path).snapshot(0)).arrays["text.sink_mass"]
    np.testing.assert_array_equal(found.arrays["text.sink_mass"], stored)
    assert found.scalars()["bias_text/sink_mass"] == alone["sink_mass"]


def test_text_is_read_by_the_models_own_tokenizer(small_probe, word_tokenizer, tmp_path):
    (tmp_path / "text.md").write_text("one two three four five six seven\n" * 30)
    (tmp_path / "tokenizer.json").write_bytes(word_tokenizer.content)
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(word_tokenizer.content.decode()))
    model = born(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=300), 0)
    n, length = small_probe.n_sequences, small_probe.seq_len
    expected = passage_probe(str(tmp_path / "text.md"), word_tokenizer, n, length, 300)
    alone = measure(model, expected, batch_size=4).scalars
    for i, tokenizer in enumerate((word_tokenizer, theirs, tmp_path / "tokenizer.json")):
        recorder = SnapshotRecorder(tmp_path / str(i), small_probe, text=str(tmp_path / "text.md"), tokenizer=tokenizer)
        found = recorder.take(model, 0)
        assert found.summary["bias_text"]["sink_mass"] == alone["sink_mass"]
        assert found.summary["top_tokens"][0]["text"] != f"[{found.summary['top_tokens'][0]['id']}]"
        # Random tokens are ids that a text may have, and the snapshot says how many there are.
        ids = sorted(Tokenizer.from_str(word_tokenizer.content.decode()).get_vocab().values())
        assert len(ids) < 300
        assert set(recorder.probes["random"].ravel().tolist()) <= set(ids)
        assert found.summary["probe"]["n_tokens"] == len(ids)


def test_births_and_trainings_measured_on_the_whole_table_keep_their_probe(small_probe, word_tokenizer, tmp_path):
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=300)
    model, whole = born(config, 0), random_probe(300, small_probe.n_sequences, small_probe.seq_len, 0)

    def recorded(folder, step, **arguments):
        recorder = SnapshotRecorder(tmp_path / folder, small_probe, **arguments)
        found = recorder.take(model, step)
        return recorder.probes["random"], "n_tokens" in found.summary["probe"]

    drawn = {"newborn": lambda seed: born(config, seed), "init_seed": 0, "tokenizer": word_tokenizer}
    probe, is_said = recorded("birth", 0, **drawn)
    assert (probe == whole).all()
    assert not is_said
    recorded("before", 0)
    probe, is_said = recorded("before", 2, tokenizer=word_tokenizer)
    assert (probe == whole).all()
    assert not is_said
    first, _ = recorded("now", 0, tokenizer=word_tokenizer)
    probe, is_said = recorded("now", 2, tokenizer=word_tokenizer)
    assert (probe == first).all()
    assert is_said


def test_text_without_its_tokenizer_is_refused(small_probe, tmp_path):
    model = born(ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=24), 0)
    with pytest.raises(UsageError, match="give tokenizer="):
        SnapshotRecorder(tmp_path, small_probe, text="notes").take(model, 0)
    with pytest.raises(UsageError, match="object is no fast tokenizer"):
        SnapshotRecorder(tmp_path, small_probe, text="notes", tokenizer=object()).take(model, 0)
    with pytest.raises(UsageError, match="give one of them"):
        SnapshotRecorder(tmp_path, small_probe, text="notes", probes={"text": np.zeros((2, 4))})


def test_an_earlier_training_is_put_aside_whole(llama, small_probe, tmp_path):
    recorder = SnapshotRecorder(tmp_path, small_probe)
    for step in (0, 3):
        recorder.take(llama(1), step)
    with pytest.warns(UserWarning, match=r"snapshots of an earlier training; they are in .*snapshots\.1 now"):
        recorder.take(llama(2), 0)
    now, before = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("snapshots", "snapshots.1"))
    assert (now, before) == (["step-00000000"], ["step-00000000", "step-00000003"])
    # The second model is compared with itself.
    assert recorder.take(llama(2), 1).bias["drift"] == pytest.approx(1)
    with pytest.warns(UserWarning, match=r"snapshots\.2"):
        SnapshotRecorder(tmp_path, small_probe).take(llama(2), 0)


def test_what_cannot_be_is_refused_in_one_line(llama, small_probe, tiny, tmp_path):
    def refused(match, act):
        with pytest.raises(UsageError, match=match) as caught:
            act()
        assert "\n" not in str(caught.value)

    SnapshotRecorder(tmp_path, small_probe).take(llama(), 0)
    for step in (-1, 1.5, True, "1", None, torch.tensor([1, 2])):
        refused("step is .*: give a whole number", lambda step=step: SnapshotRecorder(tmp_path).take(llama(), step))
    refused("config is .*: give a SnapshotConfig", lambda: SnapshotRecorder(tmp_path, {"seq_len": 8}))
    refused("n_sequences is '3', not a whole", lambda: SnapshotRecorder(tmp_path, SnapshotConfig(n_sequences="3")))
    refused("birth is .*: give a BirthReference", lambda: SnapshotRecorder(tmp_path, birth=llama()))
    refused("tokens_per_step is '5': give a whole", lambda: SnapshotRecorder(tmp_path, tokens_per_step="5"))
    other = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama().config.to_dict() | {"vocab_size": 60}))
    refused("step-00000000: is of another model", lambda: SnapshotRecorder(tmp_path, small_probe).take(other, 1))
    wider = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama().config.to_dict() | {"hidden_size": 64}))
    refused("step-00000000: is of another model", lambda: SnapshotRecorder(tmp_path, small_probe).take(wider, 1))
    longer = tiny({"snapshot.seq_len": 9, "snapshot.batch_size": 4}).snapshot
    refused("or another probe", lambda: SnapshotRecorder(tmp_path, longer).take(llama(), 1))
    ids = {"random": np.ones((10, 8), np.int64)}
    refused("or another probe", lambda: SnapshotRecorder(tmp_path, small_probe, probes=ids).take(llama(), 1))
    refused("n_sequences is 1", lambda: SnapshotRecorder(tmp_path, tiny({"snapshot.n_sequences": 1}).snapshot))
    text = tiny({"snapshot.probes": ["random", "text"]}).snapshot
    refused("snapshot.probes has 'text': give its token ids", lambda: SnapshotRecorder(tmp_path, text))
    refused("newborn and init_seed go together", lambda: SnapshotRecorder(tmp_path, init_seed=0))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/birth.json").write_text("{}")
    refused("holds a run of its own", lambda: SnapshotRecorder(tmp_path / "run"))
    linear = torch.nn.Linear(2, 2)
    refused("Linear is no language model of transformers", lambda: SnapshotRecorder(tmp_path).take(linear, 0))
    broken = llama()
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match=r"step 4, random probe: the model gives NaN or inf, .* first in the logits"):
        SnapshotRecorder(tmp_path, small_probe).take(broken, 4)
    assert not RunDir(tmp_path).snapshot(4).exists()


def test_top_tokens_are_the_ranking_with_texts_and_ranks_at_birth():
    arrays = {"mean_prob": np.array([0.1, 0.4, 0.2, 0.3]), "argmax_share": np.array([0.0, 0.5, 0.0, 0.5])}
    plain = top_tokens(arrays, None, 2, None)
    assert plain == [
        {"rank": 1, "id": 1, "text": "[1]", "p": 0.4, "argmax_share": 0.5},
        {"rank": 2, "id": 3, "text": "[3]", "p": 0.3, "argmax_share": 0.5},
    ]
    assert json.loads(json.dumps(plain)) == plain
    texts = top_tokens(arrays, None, 9, lambda ids: [f"t{i}" for i in ids])
    assert [token["text"] for token in texts] == ["t1", "t3", "t2", "t0"]
    birth = BirthReference(np.zeros((2, 3)), np.array([0.1, 0.2, 0.3, 0.4]))
    assert [token["rank_at_birth"] for token in top_tokens(arrays, birth, 9, None)] == [3, 1, 2, 4]


@pytest.mark.heavy
def test_the_loop_in_the_docs_runs(llama, token_batches, tmp_path, monkeypatch, capsys):
    page = (Path(birthmark.__file__).parent / "docs/python.md").read_text()
    section = page.split("## A plain loop")[1].split("\n## ")[0]
    (code,) = [block.split("```")[0] for block in section.split("```python\n")[1:] if "recorder.take" in block]
    monkeypatch.chdir(tmp_path)
    model = llama()
    scope = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batches": token_batches}
    assert "% 500 == 0" in code
    exec(code.replace("500", "5"), scope)
    snapshots = RunDir(tmp_path / "bias").snapshots()
    assert [snapshot.step for snapshot in snapshots] == [0, 5]
    assert float(capsys.readouterr().out) == snapshots[-1].bias["sink_mass"]


@pytest.mark.parametrize(
    ("probe", "match"),
    [
        (np.full((8, 16), 40), "probes 'text' has token 40: this model has 0 to 39"),
        (np.arange(128).reshape(8, 16) % 9 - 1, "probes 'text' has token -1: this model has 0 to 39"),
        (np.zeros(16, dtype=np.int64), r"probes 'text' has shape \[16\]: give \[N, T\]"),
        (np.zeros((8, 16)), "probes 'text' has float64 numbers: give token ids"),
        (np.zeros((8, 1), dtype=np.int64), "probes 'text' has 1 positions: give at least 2"),
        (np.zeros((1, 16), dtype=np.int64), "probes 'text' has 1 sequences: give at least 2"),
    ],
)
def test_a_probe_that_the_model_cannot_read_is_named(probe, match, small_probe, tmp_path):
    with pytest.raises(UsageError, match=match) as caught:
        SnapshotRecorder(tmp_path, small_probe, probes={"text": probe}).take(learned_positions(), 0)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def learned_positions():
    config = ModelConfig(vocab_size=40, d_model=16, n_layers=1, n_heads=2, max_seq_len=16, positions="learned")
    return born(config, 0)


def test_probes_are_shortened_to_the_positions_of_the_model_with_a_word(tmp_path, their_model):
    model, text = learned_positions(), np.arange(34).reshape(2, 17)
    with pytest.warns(UserWarning, match="it is shortened to 16") as said:
        found = SnapshotRecorder(tmp_path / "ours", probes={"text": text}).take(model, 0)
    assert [str(warning.message) for warning in said] == [
        "probes 'text' has 17 positions, and this model 16: it is shortened to 16",
        "the random probe has 64 positions, and this model 16: it is shortened to 16",
    ]
    assert found.summary["probe"]["seq_len"] == found.summary["probe_text"]["seq_len"] == 16
    alone = SnapshotRecorder(tmp_path / "cut", SnapshotConfig(seq_len=16), probes={"text": text[:, :16]}).take(model, 0)
    assert (found.bias, found.summary["bias_text"]) == (alone.bias, alone.summary["bias_text"])
    with pytest.warns(UserWarning, match="the random probe has 64 positions, and this model 24"):
        found = SnapshotRecorder(tmp_path / "gpt2").take(their_model("gpt2"), 0)
    assert found.summary["probe"]["seq_len"] == 24


# ---------------------------------------------------------------- what cannot be measured


class Fails(Metric):
    """A user's metric that cannot be computed."""

    quantities = (Quantity("fails", definition="Nothing."),)

    def __init__(self, sizes):
        super().__init__()

    def update(self):
        """Nothing is added up."""

    def residual(self, site, layer, h):
        raise ValueError("no number here")

    def compute(self):
        return {}


def test_what_cannot_be_measured_is_absent_and_the_rest_is_measured(llama, small_probe, tmp_path):
    """A metric that fails and a probe of other tokens: the random probe's figures stay as they are."""
    whole = SnapshotRecorder(tmp_path / "whole", small_probe).take(llama(), 0)
    probes = {"text": np.full((4, 8), 99)}
    recorder = SnapshotRecorder(tmp_path / "part", small_probe, probes=probes, metrics=[Fails])
    with pytest.warns(UserWarning, match="not measured at step 0: ") as said:
        found = recorder.take_if_possible(llama(), 0)
    reasons = [str(warning.message).partition("at step 0: ")[2] for warning in said]
    assert reasons[0] == "probes 'text' has token 99: this model has 0 to 60; give its own tokens"
    assert "Fails: residual raised ValueError" in reasons[1]
    assert found.bias == whole.bias
    assert RunDir(tmp_path / "part").snapshots()[0].summary["not_measured"] == reasons
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # each is said once
        assert recorder.take_if_possible(llama(1), 1).summary["not_measured"] == reasons
    part = RunDir.open_measured(tmp_path / "part")
    build_pages([part], part.report)
    page = (tmp_path / "part/snapshots/step-00000001/report.html").read_text()
    assert "Not measured: probes &#39;text&#39; has token 99" in page


def failing(llama, error, place):
    """A Llama that raises the error: as its parts are asked for, in a pass at first sight, or in a later one."""

    class Llama(type(llama())):
        def get_decoder(self):
            if place == "parts":
                raise error
            return super().get_decoder()

        def forward(self, input_ids, **more):
            if place == "look" or (place == "pass" and len(input_ids) > 1):
                raise error
            return super().forward(input_ids, **more)

    model = llama()
    model.__class__ = Llama
    return model


@pytest.mark.parametrize("place", ["parts", "look", "pass"])
@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_an_error_of_the_users_model_ends_no_training(place, kind, llama, small_probe, tmp_path):
    """It is named once, at birth and later, and noted for each step. The model is left as it was."""
    error = kind("not\nso")
    recorder, model = SnapshotRecorder(tmp_path, small_probe), failing(llama, error, place).train()
    model.model.layers[0].eval()
    before = [(m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()]
    with pytest.warns(UserWarning, match=rf"not measured at step \d: .*{kind.__name__}: not so$") as said:
        assert [recorder.take_if_possible(model, step) for step in range(3)] == [None] * 3
    assert len(said) == (2 if place == "pass" else 1)
    assert RunDir(tmp_path).read_not_measured().keys() == {0, 1, 2}
    assert [(m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()] == before
    raises = SnapshotRecorder(tmp_path, dataclasses.replace(small_probe, on_error="raise"))
    is_refused = place != "pass" and kind is ValueError
    with pytest.raises(UsageError if is_refused else kind) as caught:
        raises.take_if_possible(model, 0)
    assert error is (caught.value.__cause__ if is_refused else caught.value)


def test_an_error_of_birthmark_itself_is_no_error_of_the_users_model(llama, small_probe, tmp_path, monkeypatch):
    """Also where the model's own pass calls what fails."""

    def residual(*shown):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr("birthmark.measure.passes.MetricObserver.residual", residual)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        SnapshotRecorder(tmp_path, small_probe).take_if_possible(llama(), 0)


def test_a_model_of_another_interface_ends_no_training(llama, small_probe, tmp_path):
    """Tuples in place of outputs, and a config with names of its own."""
    tuples, named = llama(), torch.nn.Linear(2, 2)
    tuples.forward = lambda input_ids, **more: (torch.zeros(*input_ids.shape, 61),)
    named.config = transformers.PreTrainedConfig(n_layer=2)
    named.config.model_type = "mine"
    for model, words in (
        (tuples, "LlamaForCausalLM cannot be measured: AttributeError"),
        (named, "this Linear cannot"),
    ):
        with pytest.warns(UserWarning, match=words):
            assert SnapshotRecorder(tmp_path, small_probe).take_if_possible(model, 0) is None


def test_a_step_without_a_snapshot_is_noted_in_the_folder_and_on_the_page(llama, small_probe, tmp_path):
    recorder, broken = SnapshotRecorder(tmp_path, small_probe), llama()
    recorder.take_if_possible(llama(), 0)
    with torch.no_grad():
        broken.lm_head.weight[0, 0] = torch.nan
    reason = "random probe: the model gives NaN or inf, or states too large for a norm, first in the logits"
    with pytest.warns(UserWarning, match=f"not measured at step 4: {reason}"):
        assert recorder.take_if_possible(broken, 4) is None
    run = RunDir(tmp_path)
    assert run.read_not_measured() == {4: reason}
    build_report([run], run.report)
    assert f"not measured: step 4 ({reason})" in run.report.read_text()
    recorder.take_if_possible(llama(), 4)
    assert run.read_not_measured() == {}
    raises = dataclasses.replace(small_probe, on_error="raise")
    with pytest.raises(RunError, match="the model gives NaN or inf"):
        SnapshotRecorder(tmp_path, raises).take_if_possible(broken, 5)


def test_states_too_large_for_a_norm_are_not_measured_and_end_no_training(llama, small_probe, tmp_path):
    """They and the logits are finite."""
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1e25
    with pytest.warns(UserWarning, match="too large for a norm, first in the embeddings"):
        assert SnapshotRecorder(tmp_path, small_probe).take_if_possible(model, 0) is None


def test_a_training_of_which_nothing_can_be_measured_says_why(small_probe, tmp_path):
    with pytest.warns(UserWarning, match="Linear is no language model of transformers"):
        assert SnapshotRecorder(tmp_path, small_probe).take_if_possible(torch.nn.Linear(2, 2), 0) is None
    with pytest.raises(UsageError, match="no step of this training could be measured: Linear is no language model"):
        RunDir.open_measured(tmp_path)
    (tmp_path / "not_measured.json").write_text('{"first": "x"}')
    with pytest.raises(RunError, match=r"not_measured\.json: 'first' is no step"):
        RunDir.open_measured(tmp_path)


def test_a_disk_that_takes_no_snapshot_ends_no_training(llama, small_probe, tmp_path):
    recorder = SnapshotRecorder(tmp_path / "bias", small_probe)
    (tmp_path / "bias").write_text("a file in the place of the folder")
    with pytest.warns(UserWarning, match="bias"):
        assert recorder.take_if_possible(llama(), 0) is None


def test_float16_that_overflows_names_the_dtypes_that_do_not(llama, small_probe, tmp_path):
    model = llama().to(torch.float16)
    with torch.no_grad():
        for name in ("gate_proj", "up_proj", "down_proj"):
            model.model.layers[0].mlp.get_submodule(name).weight.mul_(1_000)
    mend = r"first in .*block 1; float16 ends at 65504: measure it in bfloat16 or float32; no snapshot"
    with pytest.raises(RunError, match=mend):
        SnapshotRecorder(tmp_path, small_probe).take(model, 0)


def test_ids_of_any_integer_dtype_are_the_same_probe_and_each_probe_keeps_its_length(small_probe, tmp_path):
    model, text = learned_positions(), np.arange(15).reshape(3, 5)
    taken = []
    for dtype in ("int64", "int32", "uint16"):
        probes = {"text": text.astype(dtype)}
        taken.append(SnapshotRecorder(tmp_path / dtype, small_probe, probes=probes).take(model, 0))
    assert taken[0].summary["bias_text"] == taken[1].summary["bias_text"] == taken[2].summary["bias_text"]
    assert taken[0].summary["probe_text"] == {"kind": "text", "n_sequences": 3, "seq_len": 5}
    assert taken[0].summary["probe"]["seq_len"] == small_probe.seq_len
