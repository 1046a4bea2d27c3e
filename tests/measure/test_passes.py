"""A decoder of which one block at a time is in memory gives what the same decoder gives as a whole."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import Seen
from torchmetrics import Metric

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure import passes
from birthmark.measure.hidden_states import FingerprintProbe, cached_hidden_states, hidden_states
from birthmark.measure.measurement import birth_reference, measure
from birthmark.metrics.quantity import Quantity
from birthmark.models import by_block as decoder_by_block
from birthmark.models.birth import born
from birthmark.models.by_block import DecoderByBlock, DrawnWeights, HeldWeights, Streaming
from birthmark.models.config import AttentionConfig, CalibrationConfig, ExpertsConfig, ModelConfig

PLAIN = ModelConfig(d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=12)
CONFIGS = {
    "plain": PLAIN,
    "calibrated": replace(
        PLAIN,
        attention=AttentionConfig(aggregation="calibrated", calibration=CalibrationConfig(correlation="estimated")),
    ),
    "sink logit, tied, capped": replace(
        PLAIN, tie_embeddings=True, logit_softcap=5.0, attention=AttentionConfig(normaliser="softmax_sink")
    ),
    "learned positions, parallel, biased": replace(
        PLAIN, positions="learned", norm="layernorm", mlp="gelu", bias=True, parallel_residual=True
    ),
    "sigmoid, gated, distances": replace(
        PLAIN,
        positions="t5",
        t5_buckets=8,
        t5_max_distance=16,
        attention=AttentionConfig(normaliser="sigmoid", gate="head"),
    ),
}
CONFIGS["experts"] = replace(PLAIN, experts=ExpertsConfig(n_experts=3, d_ff=8, n_dense=1))
PROBE = random_probe(64, 9, 12, 0)


class LastNorm(Metric):
    """Mean norm of the last position after each block: a user's metric."""

    quantities = (Quantity("last_norm", ("layer",), definition="Norm of the last position."),)

    def __init__(self, sizes):
        super().__init__()
        self.add_state("total", torch.zeros(sizes.n_layers), dist_reduce_fx="sum")

    def update(self):
        pass

    def residual(self, site, layer, h_BTD):
        if site == "mlp":
            self.total[layer - 1] += h_BTD[:, -1].norm(dim=-1).sum()

    def compute(self):
        return {"last_norm": self.total}


def assert_same(one, other, tolerance=1e-5):
    """Every scalar and every array of two measurements."""
    assert list(one.scalars) == list(other.scalars)
    assert set(one.arrays) == set(other.arrays)
    for name, value in one.scalars.items():
        assert other.scalars[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), name
    for name, array in one.arrays.items():
        np.testing.assert_allclose(other.arrays[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def strangers():
    """References of two other births."""
    return [birth_reference(born(PLAIN, seed), PROBE, 4) for seed in (8, 9)]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_birth_is_measured_as_the_whole_one(name, strangers):
    config = CONFIGS[name]
    whole, drawn = born(config, 7), DecoderByBlock(config, DrawnWeights(config, 7))
    more = {"batch_size": 4, "metrics": [LastNorm]}
    reference = birth_reference(whole, PROBE, 4)
    expected = measure(whole, PROBE, reference, strangers, **more)
    assert_same(expected, measure(drawn, PROBE, None, strangers, is_newborn=True, **more))
    # A reference found by block, and another split.
    by_block = birth_reference(drawn, PROBE, 2)
    np.testing.assert_allclose(by_block.direction, reference.direction, atol=1e-6)
    assert_same(expected, measure(drawn, PROBE, by_block, strangers, batch_size=9, metrics=[LastNorm]))
    assert all(p.is_meta for p in drawn.blocks.parameters())


def test_a_trained_model_in_half_precision_and_its_documents(enliven):
    config = replace(PLAIN, attention=AttentionConfig(documents=True))
    model = enliven(born(config, 7))
    numbers = np.sort(np.random.default_rng(0).integers(0, 3, PROBE.shape), axis=1)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-5)):
        whole = model.to(dtype)
        by_block = DecoderByBlock(config, HeldWeights(whole), dtype)
        for documents in (None, numbers):
            expected = measure(whole, PROBE, batch_size=4, documents_NT=documents)
            assert_same(expected, measure(by_block, PROBE, batch_size=4, documents_NT=documents), tolerance)


def test_tables_in_parts_hidden_states_in_a_file_and_few_logits_at_once(monkeypatch, tmp_path, enliven):
    model = enliven(born(PLAIN, 7))
    expected = measure(model, PROBE, batch_size=4)
    monkeypatch.setattr(decoder_by_block, "CHUNK", 5 * 16)
    monkeypatch.setattr(decoder_by_block, "_NEAR", 2 * 16)
    monkeypatch.setattr(decoder_by_block, "_LOGIT_BYTES", 2 * 64 * 4)
    monkeypatch.setattr(passes, "IN_MEMORY", 0)
    by_block = DecoderByBlock(PLAIN, HeldWeights(model), streaming=Streaming(tmp_path))
    assert_same(expected, measure(by_block, PROBE, batch_size=4))
    assert not list(tmp_path.iterdir())
    mean, sd = by_block.table_moments()
    table = model.embed.weight.detach().double()
    assert (mean, sd) == (pytest.approx(table.mean().item()), pytest.approx(table.std(correction=0).item()))

    by_block.streaming = Streaming()
    with pytest.raises(UsageError, match=r"9 sequences of 12 tokens take .* give --scratch DIR"):
        measure(by_block, PROBE)
    by_block.streaming = Streaming(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"nowhere: No such file"):
        measure(by_block, PROBE)


def test_no_two_blocks_are_held_at_once():
    config = replace(PLAIN, n_layers=4)
    model, held, most = born(config, 0), [], [0]

    class Counted(HeldWeights):
        """Gives tensors of its own, and counts the elements of those that somebody still holds."""

        def read(self, names):
            for name, tensor in super().read(names):
                given = tensor.clone()
                held.append((weakref.ref(given.untyped_storage()), given.numel()))
                most[0] = max(most[0], sum(n for storage, n in held if storage() is not None))
                yield name, given

    by_block = DecoderByBlock(config, Counted(model))
    seen = []

    def look(module, inputs, output):
        real = {name.split(".")[1] for name, p in by_block.blocks.named_parameters(prefix="b") if not p.is_meta}
        seen.append(real)

    for block in by_block.blocks:
        block.register_forward_hook(look)
    measure(by_block, PROBE, batch_size=9)
    assert seen == [{str(i)} for i in range(4)]
    one_block = sum(p.numel() for p in model.blocks[0].parameters())
    assert one_block < most[0] <= one_block + config.d_model


def test_moments_of_values_stay_float32_in_a_model_in_bf16():
    model = born(CONFIGS["calibrated"], 0).train()
    with torch.no_grad():
        model(torch.from_numpy(PROBE))
    moments = [moment.clone() for moment in model.blocks[1].buffers()]
    by_block = DecoderByBlock(model.config, HeldWeights(model), torch.bfloat16)
    with by_block.block(1) as block:
        assert block.attn.q.weight.dtype == torch.bfloat16
        assert all(torch.equal(*pair) for pair in zip(block.buffers(), moments, strict=True))


@pytest.mark.parametrize("kind", ["token", "embedding"])
def test_hidden_states_are_those_of_the_whole(kind, tmp_path):
    whole, drawn = born(PLAIN, 7), DecoderByBlock(PLAIN, DrawnWeights(PLAIN, 7))
    probe = FingerprintProbe(kind, n_inputs=10, seq_len=8).like(whole)
    assert probe.sd == pytest.approx(FingerprintProbe(kind, n_inputs=10, seq_len=8).like(drawn).sd)
    expected = hidden_states(whole, probe, 4)
    np.testing.assert_allclose(hidden_states(drawn, probe, 4), expected, atol=1e-6)
    np.testing.assert_allclose(cached_hidden_states(drawn, probe, tmp_path), expected, atol=1e-6)
    assert not list(tmp_path.iterdir())


def test_what_is_not_finite_ends_the_pass_where_it_is():
    model = born(PLAIN, 0)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[0, 0] = torch.nan
    read = []

    class Told(HeldWeights):
        def read(self, names):
            read.extend(names)
            return super().read(names)

    with pytest.raises(RunError, match="for a norm, first in the hidden activations of the MLP of block 2"):
        measure(DecoderByBlock(PLAIN, Told(model)), PROBE)
    assert "blocks.1.mlp.up.weight" in read
    assert not any(name.startswith("blocks.2.") for name in read)
    with pytest.raises(RunError, match="has shape"):
        birth_reference(DecoderByBlock(replace(PLAIN, d_ff=24), Told(model)), PROBE, 4)


def test_few_vectors_have_the_singular_values_of_the_matrix(enliven):
    """Fewer positions than half the width: the eigenvalues come from inner products, and the rest are zeros."""
    config = replace(PLAIN, d_model=64, n_layers=1)
    model = enliven(born(config, 0))
    probe = random_probe(64, 2, 8, 0)
    with torch.no_grad():
        model(torch.from_numpy(probe), observer=(seen := Seen()))
    found = measure(DecoderByBlock(config, HeldWeights(model)), probe, batch_size=1).arrays["singular_values"]
    for place, site in enumerate((("embedding", 0), ("mlp", 1))):
        expected = torch.linalg.svdvals(seen.residuals[site].flatten(0, 1).double()) / 16**0.5
        np.testing.assert_allclose(found[place, :16], expected, rtol=1e-5, atol=1e-7)
        assert (found[place, 16:] == 0).all()
