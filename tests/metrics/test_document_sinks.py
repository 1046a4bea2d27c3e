import numpy as np
import pytest
import torch

from birthmark.data.packing import DocumentBorders
from birthmark.measure.measurement import measure
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.metrics.sinks import DocumentSinks
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.attention.document_mask import Documents
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig
from birthmark.models.observe import Attended

DOCUMENTS = np.array([[0] * 5 + [1] * 4 + [2] * 7, [0] * 10 + [1] * 6, [0] * 16])


def slow(weights_BHTT):
    """Query by query."""
    found, uniform = [], []
    for b, numbers in enumerate(DOCUMENTS):
        for t in range(16):
            first = int(np.flatnonzero(numbers == numbers[t])[0])
            if first and t > first:
                found.append(weights_BHTT[b, :, t, first])
                uniform.append(1 / (t - first + 1))
    return np.mean(found, axis=0), np.mean(uniform)


def test_first_positions():
    assert Documents.of(torch.from_numpy(DOCUMENTS)).first_positions()[0].tolist() == [0] * 5 + [5] * 4 + [9] * 7


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("normaliser", ["softmax", "sigmoid"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sinks_of_documents_are_those_of_all_weights(apart, normaliser, batch_size):
    attention = AttentionConfig(documents=apart, normaliser=normaliser)
    config = ModelConfig(d_model=24, n_layers=2, n_heads=2, vocab_size=31, max_seq_len=16, attention=attention)
    model = born(config, 0).eval()
    tokens = torch.randint(0, 31, (3, 16), generator=torch.Generator().manual_seed(0))
    seen = {}

    class Keeps:
        def residual(self, *place):
            pass

        neurons = residual

        def attention(self, layer: int, attended: Attended):
            seen[layer] = attended.weights.rows(0, 16).double().numpy()

    with torch.no_grad():
        model(tokens, observer=Keeps(), **({"documents_BT": torch.from_numpy(DOCUMENTS)} if apart else {}))
    found = measure(model, tokens.numpy(), batch_size=batch_size, documents_NT=DOCUMENTS)
    for layer in (1, 2):
        mass, uniform = slow(seen[layer])
        np.testing.assert_allclose(found.arrays["document_sink_mass"][layer - 1], mass, rtol=1e-5)
        if normaliser == "sigmoid":
            mass, _ = slow(seen[layer] / seen[layer].sum(-1, keepdims=True))
            np.testing.assert_allclose(found.arrays["document_sink_mass_normalised"][layer - 1], mass, rtol=1e-5)
    assert found.scalars["document_sink_uniform"] == pytest.approx(uniform)
    assert found.scalars["document_sink_documents"] == 3
    assert found.scalars["document_sink_mass"] == pytest.approx(found.arrays["document_sink_mass"].mean())
    # What has no documents has none of these, and all else as before.
    plain = measure(model, tokens.numpy(), batch_size=batch_size)
    assert not [name for name in plain.scalars if name.startswith("document_")]
    if not apart:
        assert {k: v for k, v in found.scalars.items() if k in plain.scalars} == plain.scalars


def test_without_a_document_that_begins_inside_there_is_nothing_to_say():
    sinks = DocumentSinks(1, 2)
    sinks.update(0, torch.ones(2, 1, 2, 4), torch.zeros(1, 4, dtype=torch.int64))
    assert sinks.compute() is None


def test_a_recorder_tells_documents_of_text_apart_alone(tmp_path):
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=31, max_seq_len=16)
    text = np.random.default_rng(0).integers(1, 31, (8, 16))
    text[:, 6] = 0
    recorder = SnapshotRecorder(tmp_path, probes={"text": text}, borders=DocumentBorders(0))
    snapshot = recorder.take(born(config, 0), 0)
    assert snapshot.summary["bias_text"]["document_sink_documents"] == 8
    assert "document_sink_mass" not in snapshot.bias
