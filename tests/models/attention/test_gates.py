"""Gates at each of their places, against explicit formulas in float64, forward and backward."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from birthmark.errors import UsageError
from birthmark.models.attention.kv_cache import KeyValueCache
from birthmark.models.birth import born
from birthmark.models.changes.coordinates import check_channels, check_gate_kind
from birthmark.models.config import AttentionConfig, ModelConfig

B, T, D, H, G, K = 2, 7, 24, 4, 2, 6
SIZES = {"d_model": D, "n_layers": 2, "n_heads": H, "n_kv_heads": G, "vocab_size": 61, "max_seq_len": 24}
GATES = [
    AttentionConfig(gate=gate, gate_at=at, gate_input=read, gate_activation=activation)
    for gate, at, read, activation in product(
        ("head", "channel"),
        ("output", "value", "key", "query", "projection"),
        ("input", "value"),
        ("sigmoid", "silu"),
    )
    if not (gate == "head" and at == "projection")
]


def slow(p, x, kind):
    """The definition with whole matrices of weights, a gate as a plain factor where it stands."""
    read = x @ p["v.weight"].T if kind.gate_input == "value" else x
    raw = read @ p["gate.map.weight"].T
    opening = 1 / (1 + torch.exp(-raw))
    if kind.gate_activation == "silu":
        opening = raw * opening

    def at(where, y):
        """``y [B, T, heads · K]``."""
        if where != kind.gate_at:
            return y
        return y * (opening if kind.gate == "channel" else opening.repeat_interleave(K, dim=-1))

    q, k, v = (at(name, x @ p[f"{name[0]}.weight"].T).unflatten(-1, (-1, K)) for name in ("query", "key", "value"))
    heads = []
    for h in range(H):
        g = h // (H // G)
        scores = torch.einsum("btk,bsk->bts", q[:, :, h], k[:, :, g]) / K**0.5
        a = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        heads.append(a @ v[:, :, g])
    return at("projection", at("output", torch.cat(heads, -1)) @ p["o.weight"].T)


def test_every_gate_is_its_formula(holds_to):
    for kind in GATES:
        holds_to(SIZES, kind, slow, B, T)


@torch.no_grad()
def test_a_gated_model_is_born_as_plain_and_writes_as_it_reads():
    plain = born(ModelConfig(**SIZES), 0).state_dict()
    tokens_BT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    found = []
    for kind in GATES:
        if kind.gate_activation == "silu":
            continue
        config = ModelConfig(**SIZES, attention=kind)
        model = born(config, 0).eval()
        ours = model.state_dict()
        assert all(torch.equal(ours[key], tensor) for key, tensor in plain.items())
        assert {key for key in ours if key not in plain} == {f"blocks.{i}.attn.gate.map.weight" for i in range(2)}
        cache = KeyValueCache(config, 20)
        parts = [model(part, cache=cache) for part in tokens_BT.split([9, 1, 8, 1, 1], dim=1)]
        found.append(model(tokens_BT))
        torch.testing.assert_close(torch.cat(parts, 1), found[-1], atol=2e-5, rtol=1e-5, msg=f"{kind}")
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(found) for b in found[:i])


def test_what_a_gate_cannot_be_is_one_line():
    with pytest.raises(UsageError, match=r"gate head with model.attention.gate_at projection: .* give gate channel"):
        ModelConfig(attention=AttentionConfig(gate="head", gate_at="projection"))
    with pytest.raises(UsageError, match=r"gate_at is set, but only model.attention.gate channel or head reads it"):
        ModelConfig(attention=AttentionConfig(gate_at="value"))
    turned = ModelConfig(attention=AttentionConfig(gate="channel", gate_at="projection"))
    with pytest.raises(UsageError, match=r"rotate: model.attention.gate_at projection multiplies channels"):
        check_channels(turned, "rotate")
    by_value = ModelConfig(attention=AttentionConfig(gate="head", gate_input="value"))
    with pytest.raises(UsageError, match=r"the gate of model.attention.gate_input value does not read"):
        check_gate_kind(by_value, "scale_channels")
