"""Sink anatomy against slow formulas on whole matrices of attention, and sinks that were planted."""

import numpy as np
import pytest
import torch
from oracles import Rows, Seen

from birthmark.measure.measurement import measure
from birthmark.measure.summary import secondary_sinks
from birthmark.metrics.declarations.sinks import n_judged_keys
from birthmark.metrics.heads import HeadEntropy, SequenceSinks
from birthmark.metrics.quantity import Sizes
from birthmark.metrics.sinks import KeySummer, entropy_queries, key_sums
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

N, T, V = 7, 48, 40  # more positions than a block of queries has on a CPU: its buffer is used twice
TOKENS = torch.randint(0, V, (N, T), generator=torch.Generator().manual_seed(1))
ARMS = {name: AttentionConfig(normaliser=name) for name in ("softmax_off_by_one", "sigmoid", "differential")}
ARMS["window"] = AttentionConfig(window=6)


def sizes(n_layers=1, n_heads=2, seq_len=T):
    return Sizes(n_layers, n_heads, 16, 8, 32, V, seq_len)


@pytest.fixture(scope="module", params=ARMS)
def arm(request):
    """A model whose heads differ, and all its keys, values, scores and weights."""
    attention = ARMS[request.param]
    model = born(ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=V, max_seq_len=T, attention=attention), 0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        model.eval()(TOKENS, observer=(shown := Seen()))
    seen = {}
    for layer, attended in shown.attended.items():
        q, k, v = (x.double().numpy() for x in (attended.q_BHTK, attended.k_BHTK, attended.v_BHTK))
        seen[layer] = k, v, q @ k.swapaxes(-1, -2) * 8**-0.5, attended.weights.rows(0, T).double().numpy()
    return attention, model, seen


@pytest.mark.parametrize("batch_size", [2])
def test_norms_entropy_logits_and_sinks_are_those_of_whole_matrices(arm, batch_size):
    attention, model, seen = arm
    found = measure(model, TOKENS.numpy(), batch_size=batch_size, sink_epsilon=0.2)
    a = found.arrays
    causal = np.tril(np.ones((T, T), dtype=bool))
    if attention.window:
        causal &= ~np.tril(np.ones((T, T), dtype=bool), -attention.window)
    queries, judged, hidden = np.arange(T, 0, -1), T - T // 4 + 1, []
    for layer, (k, v, scores, weights) in seen.items():
        at = layer - 1
        share = abs(weights) / abs(weights).sum(-1, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(share > 0, share * np.log(share), 0).sum(-1)
        np.testing.assert_allclose(a["attention_entropy"][at], entropy.mean((0, 2)), rtol=1e-5)
        largest_seen = np.where(causal, scores, -9e9).max((0, 2, 3))
        np.testing.assert_allclose(a["largest_logit"][at], largest_seen, rtol=1e-5)
        hidden.append(scores.max((0, 2, 3)) > 1.001 * largest_seen)
        importance = share.sum(2) / queries
        for kind, suffix in ((weights, ""), (share, "_normalised")):
            if suffix and attention.rows_sum_to_one:
                assert not [name for name in (*a, *found.scalars) if "normalised" in name]
                continue
            mass = kind[..., 1:, 0].mean((0, 2))
            np.testing.assert_allclose(a[f"sink_mass{suffix}"][at], mass, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(a[f"importance{suffix}"][at], kind.sum(2).mean(0) / queries, rtol=1e-5)
            mean = a[f"sink_mass{suffix}"].mean()
            assert found.scalars[f"sink_mass{suffix}"] == pytest.approx(mean)
        for name, x in (("key", k), ("value", v)):
            norm = np.linalg.norm(x, axis=-1)
            np.testing.assert_allclose(a[f"{name}_norms"][at], norm.mean((0, 1)), rtol=1e-5)
            first = norm[..., 0].mean(0) / norm[..., 1:].mean((0, 2))
            np.testing.assert_allclose(a[f"{name}_norm_first"][at], first, rtol=1e-5)
            sink = importance[..., :judged].argmax(-1)[..., None]
            others = norm.copy()
            np.put_along_axis(others, sink, np.nan, -1)
            ratio = np.take_along_axis(norm, sink, -1)[..., 0].mean(0) / np.nanmean(others, (0, 2))
            np.testing.assert_allclose(a[f"{name}_norm_sink"][at], ratio, rtol=1e-5)
        is_sink = (importance > 0.2) & (np.arange(T) < judged)
        np.testing.assert_allclose(a["sink_share"][at], is_sink.any(1).mean(0))
        np.testing.assert_allclose(a["sinks_per_sequence"][at], is_sink.any(1).sum(-1).mean())
        np.testing.assert_allclose(a["secondary_sinks"][at], is_sink.any(1)[:, 1:].sum(-1).mean())
        largest = importance.max(1)[:, 1:judged]
        order = np.argsort(-largest.max(0))[:10]
        np.testing.assert_array_equal(a["secondary_sink_position"][at], order + 1)
        np.testing.assert_allclose(a["secondary_sink_importance"][at], largest.max(0)[order], rtol=1e-5)
        sequence = largest.argmax(0)[order]
        np.testing.assert_array_equal(a["secondary_sink_token"][at], TOKENS.numpy()[sequence, order + 1])
        np.testing.assert_array_equal(a["secondary_sink_heads"][at], is_sink[sequence, :, order + 1].sum(-1))
    assert np.any(hidden)  # else a largest score over unseen keys would be none's
    assert found.scalars["attention_entropy_uniform"] == pytest.approx(np.log(np.arange(1, T + 1)).mean())
    assert found.scalars["largest_logit"] == a["largest_logit"].max()
    assert found.scalars["secondary_sinks"] == a["secondary_sinks"].max()


@pytest.mark.parametrize(("length", "n_rows"), [(48, 37), (64, 32), (100, 37), (500, 37), (500, 8)])
def test_entropy_of_some_queries_from_blocks_of_lent_memory(length, n_rows):
    queries = entropy_queries(length)
    assert len(queries) <= 64
    assert queries[-1] == length - 1
    assert len(queries) * queries.step >= length - queries.step
    weights = torch.rand(1, 2, length, length, generator=torch.Generator().manual_seed(0)).tril().double()
    weights /= weights.sum(-1, keepdim=True)
    summer = KeySummer((1, 2, length), rows_sum_to_one=True, causal=True)
    for start in range(0, length, n_rows):
        lent = weights[:, :, start : start + n_rows].clone()
        summer.read((slice(None), slice(None)), start, lent)
        lent.fill_(torch.nan)
    expected = torch.special.entr(weights[:, :, list(queries)]).sum(-1).mean(-1)
    torch.testing.assert_close(summer.sums().entropy_BH, expected, rtol=1e-9, atol=0)
    assert summer.sums().largest_BH is None  # nobody has shown scores
    metric = HeadEntropy(sizes(n_layers=2, seq_len=length))
    metric.update(1, summer.sums())
    result = metric.compute()
    np.testing.assert_allclose(result["attention_entropy"][1], expected[0], rtol=1e-9)
    assert np.isnan(result["attention_entropy"][0]).all()
    assert np.isnan(result["largest_logit"]).all()


def test_a_planted_secondary_sink_is_found_every_time():
    """One head of one sequence gives most of its weight to a key in the middle; the first key is a sink of all."""
    rng, length, judged = np.random.default_rng(0), 40, n_judged_keys(40)
    found = 0
    for case in range(100):
        generator = torch.Generator().manual_seed(case)
        weights = torch.randn(4, 2, length, length, generator=generator).double().exp()
        weights[..., 0] += 3 * length
        sequence, head, position = int(rng.integers(4)), int(rng.integers(2)), int(rng.integers(1, judged))
        weights[sequence, head, position:, position] = 4 * length
        weights = weights.tril()
        weights /= weights.sum(-1, keepdim=True)
        tokens = torch.randint(0, V, (4, length), generator=generator)
        metric = SequenceSinks(sizes(seq_len=length))
        for part in (slice(0, 1), slice(1, 4)):
            metric.update(0, key_sums(Rows(weights[part]), length).importance_2BHT[1], tokens[part])
        result = metric.compute()
        first = {name: result[f"secondary_sink_{name}"][0, 0] for name in ("position", "token", "heads")}
        found += first == {"position": position, "token": int(tokens[sequence, position]), "heads": 1}
        assert result["secondary_sinks"] == [1 / 4]
        assert result["sink_share"][0, [0, position]].tolist() == [1, 1 / 4]
    assert found == 100


def test_a_token_that_every_query_looks_at_is_found_with_its_text():
    """All queries are one vector, and the keys of one token point along it."""
    config = ModelConfig(
        d_model=16, n_layers=1, n_heads=2, vocab_size=V, max_seq_len=T, positions="none",
        attention=AttentionConfig(qkv_bias=True),
    )  # fmt: skip
    model, odd = born(config, 0), 39
    with torch.no_grad():
        model.embed.weight[:, 0] = 0
        model.embed.weight[odd] = 5 * torch.eye(16)[0]
        attention = model.blocks[0].attn
        for p in (attention.q.weight, attention.q.bias, attention.k.weight, attention.k.bias):
            p.zero_()
        attention.q.bias[0], attention.k.weight[0, 0] = 3, 3  # of the first head
    tokens = TOKENS % odd
    tokens[4, 11] = odd
    found = measure(model, tokens.numpy(), batch_size=3)
    assert found.arrays["secondary_sink_position"][0, 0] == 11
    listed = secondary_sinks("text", found.arrays, 0.3, lambda ids: [f"<{i}>" for i in ids])
    importance = listed[0].pop("importance")
    assert importance > 0.9
    assert listed == [{"probe": "text", "position": 11, "id": odd, "text": f"<{odd}>", "blocks": 1, "heads": 1}]
    assert found.arrays["key_norm_sink"][0, 0] > 2
    assert found.arrays["largest_logit"][0, 0] == pytest.approx(3 * 3 * 4 * 8**-0.5, rel=1e-3)
    assert secondary_sinks("text", found.arrays, 0.3, None)[0]["text"] == f"[{odd}]"


def test_lists_do_not_depend_on_the_order_of_what_they_merge():
    generator = torch.Generator().manual_seed(0)
    importance = torch.rand(12, 2, T, generator=generator).mul(8).round().div(8)  # many are equal
    tokens = torch.randint(0, 4, (12, T), generator=generator)
    results = []
    for parts in ([range(12)], [range(6, 12), range(6)], [[i] for i in reversed(range(12))]):
        metric = SequenceSinks(sizes())
        for part in parts:
            metric.update(0, importance[list(part)], tokens[list(part)])
        results.append(metric.compute())
    for other in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_array_equal(value, other[name], err_msg=name)
