"""Hidden states of a model over a probe, their cache, and the lineage test at every checkpoint."""

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from scipy import stats

from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.measure import hidden_states as hidden
from birthmark.measure.config import FingerprintConfig
from birthmark.measure.hf import HFModel
from birthmark.measure.hidden_states import FingerprintProbe, cached_hidden_states, hidden_states, weights_digest
from birthmark.measure.records import RunDir
from birthmark.metrics.seedprint import HiddenStates, compare
from birthmark.models.birth import born, digest
from birthmark.models.config import ModelConfig
from birthmark.models.exchange.pretrained import save_pretrained
from birthmark.trainer.run import pretrain

SMALL = ModelConfig(d_model=32, n_layers=2, n_heads=2, vocab_size=50, max_seq_len=16, mlp="swiglu")
PROBE = FingerprintProbe(n_inputs=30, seq_len=8)


@pytest.fixture
def model():
    return born(SMALL, 0)


def test_hidden_states_are_those_of_transformers(model, tmp_path):
    save_pretrained(model, tmp_path / "theirs")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    tokens = torch.from_numpy(random_probe(50, 30, 8, 0))
    with torch.no_grad():
        expected = theirs(tokens, output_hidden_states=True).hidden_states[-1][:, -1]
        vectors = torch.from_numpy(replace(PROBE, kind="embedding").like(model).vectors(0, 30, 32))
        by_vectors = theirs(inputs_embeds=vectors, output_hidden_states=True).hidden_states[-1][:, -1]
    np.testing.assert_allclose(hidden_states(model, PROBE), expected, rtol=1e-4, atol=1e-5)
    found = hidden_states(model, replace(PROBE, kind="embedding").like(model))
    np.testing.assert_allclose(found, by_vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["token", "embedding"])
def test_they_do_not_depend_on_how_the_probe_is_split_and_leave_no_trace(model, kind):
    probe = replace(PROBE, kind=kind).like(model)
    model.train()
    before, random = digest(model), torch.get_rng_state()
    parts = []
    whole = hidden_states(model, probe)
    np.testing.assert_allclose(hidden_states(model, probe, 7, parts.append), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(hidden_states(model, replace(probe, n_inputs=12)), whole[:12], rtol=1e-4, atol=1e-5)
    assert parts == [7, 7, 7, 7, 2]
    assert whole.shape == (30, 32)
    assert whole.dtype == np.float32
    assert model.training
    assert digest(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert not model.norm._forward_hooks
    assert not model.embed._forward_hooks
    assert all(p.grad is None for p in model.parameters())
    assert not np.allclose(hidden_states(model, replace(probe, probe_seed=1)), whole)


def test_hooks_go_even_when_a_pass_fails(model, monkeypatch):
    monkeypatch.setattr(model.blocks[0].mlp, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hidden_states(model, replace(PROBE, kind="embedding"))
    assert not model.norm._forward_hooks
    assert not model.embed._forward_hooks


def test_the_embedding_probe_has_the_tables_moments(model):
    probe = replace(PROBE, kind="embedding", n_inputs=400).like(model)
    table = model.embed.weight.detach().numpy()
    vectors = probe.vectors(0, 400, 32)
    assert vectors.shape == (400, 8, 32)
    assert vectors.std() == pytest.approx(table.std(), rel=0.02)
    assert vectors.mean() == pytest.approx(table.mean(), abs=4 * table.std() / np.sqrt(vectors.size))
    assert (probe.vectors(5, 7, 32) == vectors[5:7]).all()
    assert PROBE.like(model) == PROBE


def test_too_long_a_probe_is_refused(model):
    with pytest.raises(UsageError, match="reads at most 16"):
        hidden_states(model, replace(PROBE, seq_len=17))


def test_the_cache_knows_weights_config_and_probe(model, tmp_path, monkeypatch):
    first = cached_hidden_states(model, PROBE, tmp_path)
    np.testing.assert_array_equal(first, hidden_states(model, PROBE))
    passes = []
    monkeypatch.setattr(hidden, "hidden_states", lambda *a, **k: passes.append(a) or first)
    np.testing.assert_array_equal(cached_hidden_states(born(SMALL, 0), PROBE, tmp_path), first)
    assert not passes
    cached_hidden_states(model, replace(PROBE, probe_seed=1), tmp_path)
    cached_hidden_states(born(SMALL, 1), PROBE, tmp_path)
    cached_hidden_states(born(replace(SMALL, rope_base=5000.0), 0), PROBE, tmp_path)
    assert len(passes) == 3
    assert weights_digest(model) == digest(model)


def test_the_cache_knows_what_a_config_of_transformers_says_beyond_its_sizes(their_model, tmp_path):
    model, other = their_model("llama"), their_model("llama", hidden_act="gelu")
    other.load_state_dict(model.state_dict())
    found = [cached_hidden_states(HFModel(each.eval()), PROBE, tmp_path) for each in (model, other)]
    np.testing.assert_array_equal(found[1], hidden_states(HFModel(other), PROBE))
    assert not np.allclose(*found, atol=0.1)
    # What no pass reads is no other model.
    model.config.update({"use_cache": False, "attention_dropout": 0.3, "eos_token_id": 7, "unsloth_version": "1"})
    model.config.update({"id2label": {0: "a"}, "task_specific_params": {"text-generation": {"max_length": 50}}})
    cached_hidden_states(HFModel(model), PROBE, tmp_path)
    assert sum(path.is_dir() for path in tmp_path.iterdir()) == 2


def test_a_run_logs_its_lineage_beside_strangers(tiny, tmp_path):
    fingerprint = FingerprintConfig(enabled=True, n_inputs=100, seq_len=6, n_strangers=2)
    config = tiny({"snapshot.fingerprint": fingerprint, "model.d_model": 32, "optim.lr": 1e-3})
    run = RunDir(tmp_path / "run")
    pretrain(config, run)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    found = {line["step"]: line for line in lines if "seedprint/z" in line}
    assert list(found) == [0, 2, 4, 6]
    for line in found.values():
        assert line["seedprint/z"] > 5 > line["seedprint/z_stranger"]
        assert line["seedprint/log10_p"] < -5
    # Weights of the last checkpoint beside those of births, all values of every matrix.
    with safe_open(run.checkpoint(6) / "tensors.safetensors", "np") as file:
        trained = {
            name: file.get_tensor(f"state_dict/model.{name}") for name, _ in born(config.model, 3).named_parameters()
        }
    cosines = [
        np.mean([np.corrcoef(p.detach().flatten(), trained[name].flatten())[0, 1]
                 for name, p in born(config.model, seed).named_parameters() if p.ndim > 1])
        for seed in (3, 4, 5)
    ]  # fmt: skip
    assert found[0]["seedprint/weights"] == pytest.approx(1)
    assert found[6]["seedprint/weights"] == pytest.approx(cosines[0], rel=1e-5)
    assert found[6]["seedprint/weights_stranger"] == pytest.approx(max(cosines[1:], key=abs), abs=1e-6)
    # The last is what the hidden states of births and of the last checkpoint say.
    births = [hidden_states(born(config.model, 3 + i), FingerprintProbe(n_inputs=100, seq_len=6)) for i in range(3)]
    assert found[0]["seedprint/z"] == pytest.approx(compare(births[0], births[0]).z, rel=1e-3)
    strange = max(compare(birth, births[0]).z for birth in births[1:])
    assert found[0]["seedprint/z_stranger"] == pytest.approx(strange, abs=0.02)

    # It goes on after a stop, without anything of the births having been kept.
    longer = replace(config, trainer=replace(config.trainer, max_steps=8))
    pretrain(longer, run, resume=True)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    last = [line for line in lines if "seedprint/z" in line][-1]
    assert last["step"] == 8
    assert last["seedprint/z"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128, 256])
def test_newborn_strangers_are_called_kin_as_often_as_the_level_says(width):
    """All pairs of births: under this null they are pairwise independent, whatever the births."""
    config = ModelConfig(d_model=width, n_layers=2, n_heads=4, vocab_size=1024)
    probe = FingerprintProbe(n_inputs=500, seq_len=8)
    births = [HiddenStates(hidden_states(born(config, seed), probe)) for seed in range(60)]
    found = [compare(a, b) for a, b in combinations(births, 2)]
    assert np.std([f.z for f in found]) == pytest.approx(1, abs=0.08)
    interval = stats.binomtest(sum(f.verdict == "kin" for f in found), len(found)).proportion_ci(0.99)
    assert interval.low < 0.01 < interval.high


def test_measuring_lineage_does_not_change_training(tiny, tmp_path):
    def weights(name, **fields):
        run = RunDir(tmp_path / name)
        pretrain(tiny({"snapshot.fingerprint": FingerprintConfig(n_inputs=20, seq_len=6, **fields)}), run)
        return (run.checkpoint(6) / "tensors.safetensors").read_bytes()

    assert weights("with", enabled=True, n_strangers=0) == weights("without")


def test_what_cannot_be_measured_is_named_by_field(tiny):
    with pytest.raises(UsageError, match=r"snapshot\.fingerprint\.n_inputs is 3: give at least 10"):
        tiny({"snapshot.fingerprint": FingerprintConfig(n_inputs=3)})
    with pytest.raises(UsageError, match=r"snapshot\.fingerprint\.seq_len 13 is longer than model\.max_seq_len 12"):
        tiny({"snapshot.fingerprint": FingerprintConfig(enabled=True, seq_len=13)})
    # Where it is off, nothing is longer than anything.
    assert tiny({"snapshot.fingerprint": FingerprintConfig(seq_len=13)}).snapshot.fingerprint.seq_len == 13
