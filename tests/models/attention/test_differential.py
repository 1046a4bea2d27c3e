"""Differential attention against explicit matrices in float64, and what is observed of it."""

import math

import pytest
import torch
from oracles import Seen, assert_gradients, in_pieces

from birthmark.measure.measurement import measure
from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.attention import differential
from birthmark.models.attention.attention import Attention
from birthmark.models.attention.differential import Difference
from birthmark.models.attention.positions import Placement
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, DropoutConfig, ModelConfig
from birthmark.models.dropout import Dropout

B, T, D, H, K = 2, 9, 24, 4, 6
SIZES = {"d_model": D, "n_layers": 2, "n_heads": H, "vocab_size": 61, "max_seq_len": 24}
ARMS = {
    "as published": AttentionConfig("differential_norm", normaliser="differential"),
    "without its norm": AttentionConfig(normaliser="differential"),
    "window and gate": AttentionConfig("differential_norm", normaliser="differential", window=4, gate="channel"),
}


def slow(p, x, kind, block):
    """A pair of heads at a time, by the paper's equations; also each head's weights ``[B, H, T, T]``."""
    start = 0.8 - 0.6 * math.exp(-0.3 * block)
    share = math.e ** (p["normaliser.q1"] @ p["normaliser.k1"]) - math.e ** (p["normaliser.q2"] @ p["normaliser.k2"])
    share = share + start
    q, k = ((x @ p[f"{name}.weight"].T).view(B, T, H, K) for name in "qk")
    v = (x @ p["v.weight"].T).view(B, T, H // 2, 2 * K)
    behind = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (behind < 0) | (behind >= (kind.window or T))

    def weights(head):
        scores = q[:, :, head] @ k[:, :, head].transpose(1, 2) / K**0.5
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    pairs, seen = [], []
    for i in range(H // 2):
        a = weights(2 * i) - share * weights(2 * i + 1)
        o = a @ v[:, :, i]
        if kind.aggregation == "differential_norm":
            o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["aggregate.gain"] * (1 - start)
        pairs.append(o)
        seen += [a, a]
    out = torch.cat(pairs, -1)
    if kind.gate == "channel":
        out = out / (1 + torch.exp(-(x @ p["gate.map.weight"].T)))
    return out @ p["o.weight"].T, torch.stack(seen, 1)


@pytest.fixture(params=[True, False], ids=["values side by side", "one after the other"])
def at_once(request, monkeypatch):
    """Both ways to sum the values of a pair."""
    monkeypatch.setattr(differential, "wide_values_pay", lambda *_: request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("name", ARMS)
def test_it_is_the_difference_of_the_formula(name):
    kind = ARMS[name]
    for block in (0, 3):
        module = Attention(ModelConfig(**SIZES | {"n_layers": 4}, attention=kind), block).double()
        generator = torch.Generator().manual_seed(block)
        for parameter in module.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        p = dict(module.named_parameters())
        x = torch.randn(B, T, D, generator=generator, dtype=torch.float64).requires_grad_()
        upstream = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
        out, (expected, rows) = module(x, Placement()), slow(p, x, kind, block)
        torch.testing.assert_close(out, expected)
        assert_gradients(out, expected, {"x": x, **p}, upstream)
        seen = Seen()
        with torch.no_grad():
            torch.testing.assert_close(module(x, Placement(), seen), expected)
        (attended,) = seen.attended.values()
        assert type(attended.weights) is Difference
        torch.testing.assert_close(attended.weights.rows(0, T), rows)
        torch.testing.assert_close(rows @ attended.v_BHTK, attended.o_BHTK)
        torch.testing.assert_close(attended.weights.row_sum(), rows.abs().sum(-1))
        torch.testing.assert_close(attended.weights.sum_squares(), rows.square().sum(-1))


@torch.no_grad()
@pytest.mark.parametrize("positions", ["rope", "alibi", "t5"])
def test_heads_of_a_pair_share_their_weights_whatever_is_added_to_scores(positions):
    model = born(ModelConfig(**SIZES, positions=positions, attention=ARMS["as published"]), 0).eval()
    tokens_BT, seen = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0)), Seen()
    whole, attended = model(tokens_BT, observer=seen), seen.attended[2]
    rows = attended.weights.rows(0, 20)
    assert torch.equal(rows[:, 0::2], rows[:, 1::2])
    torch.testing.assert_close(rows @ attended.v_BHTK, attended.o_BHTK, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(in_pieces(model, tokens_BT), whole, atol=2e-5, rtol=1e-4)


def test_a_dropped_weight_is_dropped_for_both_heads_of_a_pair():
    config = ModelConfig(**SIZES, attention=ARMS["without its norm"], dropout=DropoutConfig(attention=0.5))
    module = Attention(config, 0).double()
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # Both heads of a pair have the same values: their outputs differ by nothing but their weights.
    first = module.v.weight.data.view(H // 2, 2, K, D)[:, :1]
    module.v.weight.data = first.expand(-1, 2, -1, -1).reshape(D, D).contiguous()
    module.o.weight.data = torch.eye(D, dtype=torch.float64)
    x = torch.randn(B, T, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    masks = Dropout(config.dropout, torch.arange(B, dtype=torch.int32)).in_block(1)
    out, whole = (module(x, Placement(dropout=given)).view(B, T, H // 2, 2, K) for given in (masks, None))
    torch.testing.assert_close(out[..., 0, :], out[..., 1, :])
    assert (out - whole).abs().max() > 0.1


def test_bf16_rounds_and_no_more():
    model = born(ModelConfig(**SIZES, attention=ARMS["as published"]), 0)
    tokens_BT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    wide = model(tokens_BT)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(tokens_BT)
    assert (narrow - wide).norm() < 0.02 * wide.norm()


def test_it_is_born_as_plain_and_measured_as_any_other():
    model, plain = born(ModelConfig(**SIZES, attention=ARMS["as published"]), 0), born(ModelConfig(**SIZES), 0)
    ours, theirs = model.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())
    more = {key.split(".", 3)[3] for key in ours if key not in theirs}
    assert more == {"normaliser.q1", "normaliser.k1", "normaliser.q2", "normaliser.k2", "aggregate.gain"}
    vectors = torch.cat([tensor for key, tensor in ours.items() if ".normaliser." in key])
    assert 0.06 < vectors.std() < 0.14
    assert [block.attn.normaliser.lambda_init for block in model.blocks] == pytest.approx([0.2, 0.355509], abs=1e-6)
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1)).numpy()
    scalars = measure(model, tokens).scalars
    assert all(math.isfinite(scalars[name]) for name in ("sink_mass", "variance_discrepancy"))


def test_a_prefix_of_keys_does_not_go_with_it():
    config = ModelConfig(**SIZES, attention=ARMS["as published"])
    assert AdapterConfig(kind="prefix", length=2).misfits(config) == [
        "adapter.kind prefix brings keys, and model.attention.normaliser differential takes none"
    ]
    assert AdapterConfig(kind="lora", rank=2).misfits(config) == []
