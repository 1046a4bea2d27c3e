"""Several learned keys beside the tokens', and norms of values."""

from __future__ import annotations

import pytest
import torch

from birthmark.errors import UsageError
from birthmark.models.attention.kv_cache import KeyValueCache
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig

B, T, D, H, G, K, N = 2, 7, 24, 4, 2, 6, 3
SIZES = {"d_model": D, "n_layers": 2, "n_heads": H, "n_kv_heads": G, "vocab_size": 61, "max_seq_len": 24}
ARMS = [
    AttentionConfig(kv_bias=kind, kv_bias_tokens=N, kv_bias_shared=shared, v_norm=norm)
    for kind, shared, norm in (
        ("key", False, "none"),
        ("key_value", False, "head"),
        ("key_value", True, "width"),
    )
] + [
    AttentionConfig(normaliser="sigmoid", kv_bias="key_value", kv_bias_tokens=N),
    AttentionConfig(normaliser="softmax_sink", kv_bias="key_value", kv_bias_tokens=N),
]


def slow(p, x, kind):
    """Rows of weights over learned keys and tokens, a head at a time."""
    q, k, v = ((x @ p[f"{name}.weight"].T).unflatten(-1, (-1, K)) for name in "qkv")
    if kind.v_norm == "head":
        v = v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["v.norm.gain"]
    if kind.v_norm == "width":
        v = v / (v.square().mean((-1, -2), keepdim=True) + 1e-5).sqrt() * p["v.norm.gain"].view(G, K)
    heads = []
    for h in range(H):
        g = h // (H // G)
        of_group = torch.arange(N) if kind.kv_bias_shared else torch.arange(N) * G + g
        keys = torch.cat([p["bias.key"][of_group].expand(B, N, K), k[:, :, g]], 1)
        learned = p["bias.value"][of_group] if "bias.value" in p else torch.zeros(N, K, dtype=x.dtype)
        values = torch.cat([learned.expand(B, N, K), v[:, :, g]], 1)
        scores = q[:, :, h] @ keys.transpose(1, 2) / K**0.5
        hidden = torch.cat([torch.zeros(T, N), torch.ones(T, T).triu(1)], 1).bool()
        weights = 1 / (1 + torch.exp(-scores)) if kind.normaliser == "sigmoid" else scores.exp()
        weights = weights.masked_fill(hidden, 0)
        if kind.normaliser != "sigmoid":
            sink = p["normaliser.logit"][h].exp() if "normaliser.logit" in p else 0
            weights = weights / (weights.sum(-1, keepdim=True) + sink)
        heads.append(weights @ values)
    return torch.cat(heads, -1) @ p["o.weight"].T


def test_learned_keys_stand_beside_those_of_tokens(holds_to):
    for kind in ARMS:
        holds_to(SIZES, kind, slow, B, T)


@torch.no_grad()
def test_births_are_paired_and_writing_is_reading():
    plain = born(ModelConfig(**SIZES), 0).state_dict()
    one = born(ModelConfig(**SIZES, attention=AttentionConfig(kv_bias="key_value")), 0).state_dict()
    tokens_BT = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    for kind in ARMS:
        config = ModelConfig(**SIZES, attention=kind)
        model = born(config, 0).eval()
        ours = model.state_dict()
        assert all(torch.equal(ours[key], tensor) for key, tensor in plain.items())
        rows = 1 if kind.kv_bias_shared else G
        assert ours["blocks.1.attn.bias.key"].shape == (N * rows, K)
        # The first of them is the only one of a model that has one.
        assert torch.equal(ours["blocks.1.attn.bias.key"][:rows], one["blocks.1.attn.bias.key"][:rows])
        cache = KeyValueCache(config, 20)
        parts = [model(part, cache=cache) for part in tokens_BT.split([9, 1, 8, 1, 1], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens_BT), atol=2e-5, rtol=1e-5, msg=f"{kind}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_bias": "key", "kv_bias_tokens": 0}, "model.attention.kv_bias_tokens is 0: give 1 to 1024"),
        ({"kv_bias": "value", "kv_bias_tokens": 2}, "but only model.attention.kv_bias key_value or key reads it"),
    ],
)
def test_numbers_of_keys_that_cannot_be_are_one_line(fields, message):
    with pytest.raises(UsageError, match=message) as raised:
        ModelConfig(attention=AttentionConfig(**fields))
    assert "; " not in str(raised.value)
