"""Attention sinks against the explicit matrix of weights (definitions §5)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import Rows, Seen

from birthmark.data.packing import DocumentBorders
from birthmark.measure.measurement import measure
from birthmark.measure.recorder import SnapshotRecorder
from birthmark.metrics import sinks
from birthmark.metrics.sinks import AttentionSinks, DocumentSinks, KeySummer, key_sums
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.attention.document_mask import Documents
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig


def make(shape, seed=0, dtype=torch.float64, pull=2.0):
    """Queries and keys ``[B, H, T, K]`` with a key in each head that many queries like."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, *shape)) + rng.normal(size=shape[-1]) * 0.5
    for b, h in np.ndindex(*shape[:2]):
        k[b, h, rng.integers(0, min(3, shape[2]))] += pull * rng.random() * q[b, h].mean(0)
    return torch.from_numpy(q).to(dtype), torch.from_numpy(k).to(dtype)


def weights(q, k, scale):
    """The matrix ``[B, H, T, T]`` and its log-sum-exps, in float64, a row at a time."""
    q, k = q.double().numpy(), k.double().numpy()
    n_batch, n_heads, length, _ = q.shape
    a, lse = np.zeros((n_batch, n_heads, length, length)), np.zeros((n_batch, n_heads, length))
    for t in range(length):
        scores = np.einsum("bhk,bhjk->bhj", q[:, :, t], k[:, :, : t + 1]) * scale
        top = scores.max(-1, keepdims=True)
        e = np.exp(scores - top)
        a[:, :, t, : t + 1] = e / e.sum(-1, keepdims=True)
        lse[:, :, t] = top[..., 0] + np.log(e.sum(-1))
    return a, torch.from_numpy(lse)


def explicit_importance(a):
    """Mean over the queries that see the key."""
    return np.stack([a[:, :, j:, j].mean(-1) for j in range(a.shape[-1])], axis=-1)


def measured(layers, seq_len, scale, splits=(), epsilon=0.3):
    metric = AttentionSinks(len(layers), layers[0][0].shape[1], seq_len, epsilon)
    for layer, (q, k) in enumerate(layers):
        for part in torch.tensor_split(torch.from_numpy(weights(q, k, scale)[0]), list(splits)):
            metric.update(layer, Rows(part))
    return metric.compute()


def explicit(layers, scale, epsilon=0.3):
    mass, importance, rate = [], [], []
    for q, k in layers:
        a, _ = weights(q, k, scale)
        each = explicit_importance(a)
        mass.append(a[:, :, 1:, 0].mean((0, 2)))
        importance.append(each.mean(0))
        rate.append(100 * (each > epsilon).mean(0))
    return np.stack(mass), np.stack(importance), np.stack(rate)


@pytest.mark.parametrize("block", [None, 1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 9, 31, 32, 33, 64, 65, 129])
def test_importance_of_every_key_does_not_depend_on_the_block(monkeypatch, block, length):
    monkeypatch.setattr(sinks, "_QUERY_BLOCK", block or sinks._QUERY_BLOCK)
    a, _ = weights(*make((1, 2, length, 8), seed=length), 0.4)
    sums = key_sums(Rows(a), length)
    assert sums.importance_2BHT.dtype == torch.float64
    np.testing.assert_allclose(sums.importance_2BHT, np.stack([explicit_importance(a)] * 2), rtol=1e-11)


@pytest.mark.parametrize(("rows_sum_to_one", "causal"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("n_together", [1, 2, 3])
def test_sums_do_not_depend_on_the_parts_that_weights_are_read_in(n_together, rows_sum_to_one, causal):
    a = torch.from_numpy(weights(*make((3, 4, 20, 8)), 0.4)[0])
    if not causal:
        a[..., :7, :7] = 1 / 7
    # The first position of each position's document, another one in each sequence.
    first = torch.where(torch.arange(20) < (begin := torch.tensor([[5], [11], [18]])), 0, begin)
    summer = KeySummer((3, 4, 20), rows_sum_to_one, causal, first)
    for b, h in np.ndindex(3, 4):
        part = slice(b, b + 1), slice(h, h + n_together)
        for start in range(0, 20, 6) if h % n_together == 0 else ():
            summer.read(part, start, a[part][:, :, start : start + 6, : max(start + 6, 7)].clone())
    sums = summer.sums()
    assert sums.importance_2BHT.shape == sums.squares_2BHT.shape == (2, 3, 4, 20)
    for kind in range(2):
        np.testing.assert_allclose(sums.importance_2BHT[kind], explicit_importance(a.numpy()), rtol=1e-11)
        np.testing.assert_allclose(sums.mass_2BH[kind], a[:, :, 1:, 0].mean(-1), rtol=1e-11)
        np.testing.assert_allclose(sums.squares_2BHT[kind], a.square().sum(-1), rtol=1e-11)
        for b, t in np.ndindex(3, 20):
            np.testing.assert_allclose(sums.on_first_2BHT[kind, b, :, t], a[b, :, t, first[b, t]], rtol=1e-11)


def test_weights_whose_rows_sum_to_one_are_kept_once():
    a = torch.from_numpy(weights(*make((3, 2, 9, 8)), 0.4)[0])
    once, twice = AttentionSinks(1, 2, 9, 0.2, (0.1,), rows_sum_to_one=True), AttentionSinks(1, 2, 9, 0.2, (0.1,))
    for metric in (once, twice):
        metric.update(0, Rows(a, sums=True))
    assert 2 * once.sink_count.numel() == twice.sink_count.numel()
    for name, value in twice.compute()._asdict().items():
        np.testing.assert_allclose(getattr(once.compute(), name), value, rtol=1e-11, err_msg=name)


@pytest.mark.parametrize("block", [3, 100])
def test_rows_that_do_not_sum_to_one_are_given_raw_and_normalised(monkeypatch, block):
    """Signed weights too: then shares are of absolute weight, and a row without any weight has none to share."""
    monkeypatch.setattr(sinks, "_QUERY_BLOCK", block)
    a = np.tril(np.random.default_rng(0).normal(size=(5, 2, 9, 9)))
    a[0, 0, 4] = 0
    metric = AttentionSinks(1, 2, 9, 0.2)
    metric.update(0, Rows(a, sums=True))
    result = metric.compute()
    total = np.abs(a).sum(-1, keepdims=True)
    shares = np.divide(np.abs(a), total, out=np.zeros_like(a), where=total > 0)
    for raw, suffix in ((a, ""), (shares, "_normalised")):
        each = explicit_importance(raw)
        np.testing.assert_allclose(getattr(result, f"mass{suffix}")[0], raw[:, :, 1:, 0].mean((0, 2)))
        np.testing.assert_allclose(getattr(result, f"importance{suffix}")[0], each.mean(0))
        np.testing.assert_allclose(getattr(result, f"rate{suffix}")[0], 100 * (each > 0.2).mean(0))
        assert np.array_equal(getattr(result, f"position{suffix}")[0], each.mean(0).argmax(-1))


def test_queries_before_the_key_do_not_count_where_a_prefix_sees_both_ways():
    a = np.tril(np.random.default_rng(0).random((2, 1, 40, 40)))
    a[..., :35, :35] = np.random.default_rng(1).random((2, 1, 35, 35))
    np.testing.assert_allclose(key_sums(Rows(a), 40).importance_2BHT[0], explicit_importance(a))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(2, 20), st.integers(0, 99),
    st.sampled_from([0.05, 0.3, 0.6]),
)  # fmt: skip
def test_every_quantity_is_that_of_the_explicit_matrix(n_layers, n, n_heads, length, seed, epsilon):
    layers = [make((n, n_heads, length, 4), seed=seed + 100 * i) for i in range(n_layers)]
    result = measured(layers, length, 0.7, epsilon=epsilon)
    mass, importance, rate = explicit(layers, 0.7, epsilon)
    assert result.mass.shape == result.position.shape == (n_layers, n_heads)
    assert result.importance.shape == result.rate.shape == (n_layers, n_heads, length)
    assert result.position.dtype == np.int64
    assert {result.mass.dtype, result.importance.dtype, result.rate.dtype} == {np.dtype(np.float64)}
    np.testing.assert_allclose(result.mass, mass, rtol=1e-11)
    np.testing.assert_allclose(result.importance, importance, rtol=1e-11)
    np.testing.assert_allclose(result.rate, rate, rtol=1e-11)
    assert np.array_equal(result.position, importance.argmax(-1))
    assert result.uniform == pytest.approx(sum(1 / (t + 1) for t in range(1, length)) / (length - 1))


def test_rates_at_further_epsilons_are_those_of_metrics_with_that_epsilon():
    a = np.tril(np.random.default_rng(0).random((5, 2, 9, 9)))
    grid = (0.05, 0.2, 0.4)
    metric = AttentionSinks(1, 2, 9, 0.3, grid)
    metric.update(0, key_sums(Rows(a, sums=True), 9))
    result = metric.compute()
    assert result.rate_grid.shape == result.rate_grid_normalised.shape == (3, 1, 2, 9)
    for i, epsilon in enumerate((0.3, *grid)):
        alone = AttentionSinks(1, 2, 9, epsilon)
        alone.update(0, Rows(a, sums=True))
        for suffix in ("", "_normalised"):
            found = getattr(result, f"rate_grid{suffix}")[i - 1] if i else getattr(result, f"rate{suffix}")
            assert np.array_equal(found, getattr(alone.compute(), f"rate{suffix}"))
    assert len(np.unique(result.rate_grid)) > 2


def test_a_key_whose_importance_is_epsilon_is_no_sink_yet():
    uniform = np.tril(np.ones((1, 1, 4, 4))) / np.arange(1, 5)[:, None]
    metric = AttentionSinks(1, 1, 4, 0.25, (0.2499,))
    metric.update(0, Rows(uniform))
    result = metric.compute()
    assert (result.importance[0, 0, 3], result.rate[0, 0, 3], result.rate_grid[0, 0, 0, 3]) == (0.25, 0, 100)


@pytest.mark.parametrize("block", [3, 100])
def test_squares_are_of_all_that_a_query_sees(monkeypatch, block):
    monkeypatch.setattr(sinks, "_QUERY_BLOCK", block)
    a = np.tril(np.random.default_rng(0).normal(size=(2, 2, 9, 9)))
    a[..., :5, :5] = np.random.default_rng(1).random((2, 2, 5, 5))  # a prefix that sees both ways

    class Prefix(Rows):
        def rows(self, start, stop):
            return self.weights[:, :, start:stop, : max(stop, 5)].clone()

    raw, shares = key_sums(Prefix(a, sums=True), 9).squares_2BHT
    np.testing.assert_allclose(raw, (a**2).sum(-1))
    np.testing.assert_allclose(shares, (a**2).sum(-1) / np.abs(a).sum(-1) ** 2)


# ----------------------------------------------------------------

#: The second sequence has a document of one token, in which no query is behind the first, and one of two.
DOCUMENTS = np.array([[0] * 5 + [1] * 4 + [2] * 7, [0] * 9 + [1] + [2] * 2 + [3] * 4, [0] * 16])


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
    with torch.no_grad():
        model(tokens, observer=(shown := Seen()), **({"documents_BT": torch.from_numpy(DOCUMENTS)} if apart else {}))
    seen = {layer: attended.weights.rows(0, 16).double().numpy() for layer, attended in shown.attended.items()}
    found = measure(model, tokens.numpy(), batch_size=batch_size, documents_NT=DOCUMENTS)
    for layer in (1, 2):
        mass, uniform = slow(seen[layer])
        np.testing.assert_allclose(found.arrays["document_sink_mass"][layer - 1], mass, rtol=1e-5)
        if normaliser == "sigmoid":
            mass, _ = slow(seen[layer] / seen[layer].sum(-1, keepdims=True))
            np.testing.assert_allclose(found.arrays["document_sink_mass_normalised"][layer - 1], mass, rtol=1e-5)
    assert found.scalars["document_sink_uniform"] == pytest.approx(uniform)
    assert found.scalars["document_sink_documents"] == 4
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
