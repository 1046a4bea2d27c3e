"""Latent attention against DeepSeek's of transformers, and its arms against explicit matrices in float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import assert_gradients, in_pieces

from birthmark.measure.hf.hf_model import HFModel
from birthmark.measure.measurement import measure
from birthmark.metrics.quantity import LEVELS
from birthmark.models.adapter_config import AdapterConfig
from birthmark.models.attention.attention import LatentAttention
from birthmark.models.attention.kv_cache import KeyValueCache
from birthmark.models.attention.positions import RotaryPositions
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, LatentConfig, ModelConfig
from birthmark.plan.describe import describe
from birthmark.trainer.throughput import flops_per_token

B, T, D, H, R, P, N, V = 2, 9, 24, 4, 16, 4, 6, 5
SIZES = {"d_model": D, "n_layers": 2, "n_heads": H, "d_ff": 40, "vocab_size": 61, "max_seq_len": 24}
LATENT = LatentConfig(R, None, P, N, V)


def config_of(latent=LATENT, **attention):
    return ModelConfig(**SIZES, mlp="swiglu", norm_eps=1e-6, attention=AttentionConfig(latent=latent, **attention))


def theirs_of(model):
    """The same weights in DeepSeek-V3's class, all its blocks dense."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM  # it takes seconds

    latent = model.config.attention.latent
    theirs = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=61, hidden_size=D, intermediate_size=40, num_hidden_layers=2, num_attention_heads=H,
            num_key_value_heads=H, kv_lora_rank=R, q_lora_rank=latent.q_rank, qk_rope_head_dim=P, qk_nope_head_dim=N,
            v_head_dim=V, first_k_dense_replace=2, rope_interleave=False, max_position_embeddings=24, rms_norm_eps=1e-6,
        )
    ).eval()  # fmt: skip
    ours = {name: tensor.detach() for name, tensor in model.named_parameters()}
    named = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    of_block = {
        "norm_attn": "input_layernorm", "norm_mlp": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
        "attn.q_down": "self_attn.q_a_proj", "attn.q_norm": "self_attn.q_a_layernorm",
        "attn.q_up": "self_attn.q_b_proj", "attn.kv_down": "self_attn.kv_a_proj_with_mqa",
        "attn.kv_norm": "self_attn.kv_a_layernorm", "attn.kv_up": "self_attn.kv_b_proj", "attn.o": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
    }  # fmt: skip
    named |= {f"blocks.{i}.{x}": f"model.layers.{i}.{y}" for i in range(2) for x, y in of_block.items()}
    state = {}
    for name, tensor in ours.items():
        owner = name.rpartition(".")[0]
        if owner.endswith((".attn.q", ".attn.q_up")):  # of a head, theirs has the channels that turn last
            tensor = tensor.unflatten(0, (H, P + N)).roll(-P, 1).flatten(0, 1)
        state[f"{named[owner]}.weight"] = tensor
    theirs.load_state_dict(state)
    return theirs


@pytest.fixture(scope="module", params=[None, 12], ids=["queries at once", "latent queries"])
def ours(request):
    model = born(config_of(replace(LATENT, q_rank=request.param)), 3).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


TOKENS_BT = torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_it_is_deepseeks_whole_and_in_pieces(ours):
    expected = theirs_of(ours)(TOKENS_BT).logits
    torch.testing.assert_close(ours(TOKENS_BT), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_pieces(ours, TOKENS_BT), expected, atol=1e-5, rtol=1e-5)
    cache = KeyValueCache(ours.config, 20)
    ours(TOKENS_BT, cache=cache)
    assert [tuple(x.shape) for x in cache.layers[0]._held] == [(3, 1, 20, R), (3, 1, 20, P)]


def test_it_is_measured_as_deepseeks_is(ours):
    tokens = TOKENS_BT.numpy()
    found, expected = measure(ours, tokens), measure(HFModel(theirs_of(ours)), tokens)
    assert found.scalars.keys() == expected.scalars.keys()
    for name, value in expected.scalars.items():
        assert found.scalars[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
    assert {"sink_mass", "key_norm_first", "value_norm_first"} <= found.scalars.keys()
    for name, value in expected.arrays.items():
        np.testing.assert_allclose(found.arrays[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def slow(p, x, config):
    """Token by token and head by head, of arms that stand beside latent attention."""
    kind, rotation = config.attention, RotaryPositions(config).place(T, torch.device("cpu")).rotation.double()
    turning = torch.complex(rotation[0, :, P // 2 :], rotation[1, :, P // 2 :])

    def rms(y):
        return y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()

    def turned(y):  # pairs (i, i + P/2) are complex numbers
        z = torch.complex(y[..., : P // 2], y[..., P // 2 :]) * turning
        return torch.cat([z.real, z.imag], -1)

    down = x @ p["kv_down.weight"].T
    latent, shared = rms(down[..., :R]) * p["kv_norm.gain"], turned(down[..., R:])
    behind = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (behind < 0) | (behind >= (kind.window or T))
    out = []
    for head in range(H):
        q_rows = p["q.weight"][head * (P + N) : (head + 1) * (P + N)]
        rows = p["kv_up.weight"][head * (N + V) : (head + 1) * (N + V)]
        q = torch.cat([turned(x @ q_rows[:P].T), x @ q_rows[P:].T], -1)
        k = torch.cat([shared, latent @ rows[:N].T], -1)
        v = latent @ rows[N:].T
        scores = (q @ k.transpose(1, 2) / (P + N) ** 0.5).masked_fill(hidden, -torch.inf)
        if kind.kv_bias == "key_value":
            scores = torch.cat([scores, (q @ p["bias.key"][head] / (P + N) ** 0.5)[..., None]], -1)
            v = torch.cat([v, p["bias.value"][head].expand(B, 1, V)], 1)
        if kind.normaliser == "softmax_sink":
            a = scores.exp() / (p["normaliser.logit"][head].exp() + scores.exp().sum(-1, keepdim=True))
        else:
            a = scores.sigmoid() if kind.normaliser == "sigmoid" else scores.softmax(-1)
        o = a @ v
        if kind.aggregation == "headnorm":
            o = rms(o) * p["aggregate.gain"]
        if kind.aggregation == "calibrated":
            o = o / a.square().sum(-1, keepdim=True).sqrt()
        out.append(o)
    out = torch.cat(out, -1)
    if kind.gate == "channel":
        out = out / (1 + torch.exp(-(x @ p["gate.map.weight"].T)))
    return out @ p["o.weight"].T


ARMS = {
    "alone": {},
    "window and sink": {"window": 4, "normaliser": "softmax_sink"},
    "learned keys, head norm": {"kv_bias": "key_value", "aggregation": "headnorm"},
    "sigmoid": {"normaliser": "sigmoid"},
    "gate": {"gate": "channel"},
    "calibrated": {"aggregation": "calibrated", "calibration": CalibrationConfig(n_eff="exact")},
}


def held(config):
    module = LatentAttention(config, 0).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    p = dict(module.named_parameters())
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64).requires_grad_()
    out, expected = module(x, RotaryPositions(config).place(T, x.device)), slow(p, x, config)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    upstream = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    assert_gradients(out, expected, {"x": x, **p}, upstream, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ARMS)
def test_other_arms_stand_beside_it(name):
    held(config_of(**ARMS[name]))


@pytest.mark.parametrize("name", ["alone", "window and sink", "calibrated"])
def test_values_narrower_than_keys_run_on_every_kernel(name, cuda_operators):
    held(config_of(**ARMS[name]))


def test_widths_follow_the_head_and_figures_follow_the_widths():
    attention = AttentionConfig(latent=LatentConfig(24))
    config = ModelConfig(d_model=64, n_layers=2, n_heads=4, vocab_size=32, attention=attention)
    assert (config.d_rope, config.d_key, config.d_value) == (8, 24, 16)
    found = describe(config)
    assert found["n_params"] == sum(parameter.numel() for parameter in born(config, 0).parameters())
    assert found["kv_cache"] == 2 * 2 * (24 + 8)
    # Scores of 24 channels and values of 16, forward and twice backward, a multiplication and an addition each.
    assert flops_per_token(config, 0, 10) - flops_per_token(config, 0, 0) == 2 * 4 * 10 * (24 + 16) * 6
    summary = {"model": {"d_model": 64, "n_heads": 4, "attention": {"latent": {"kv_rank": 24, "rope_width": None}}}}
    assert LEVELS["1/sqrt(d_head)"](summary) == pytest.approx(24**-0.5)


def test_a_birth_shares_what_it_has_in_common():
    ours = born(config_of(replace(LATENT, q_rank=12, value_width=6)), 0).state_dict()
    theirs = born(ModelConfig(**SIZES, mlp="swiglu"), 0).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    assert {name.split(".", 2)[2] for name in theirs.keys() - ours.keys()} == {f"attn.{x}.weight" for x in "qkv"}
    for name, fan_in in {"q_down": D, "q_up": 12, "kv_down": D, "kv_up": R}.items():
        assert ours[f"blocks.1.attn.{name}.weight"].std().item() == pytest.approx(fan_in**-0.5, rel=0.15), name
    assert all((ours[f"blocks.0.attn.{name}_norm.gain"] == 1).all() for name in ("q", "kv"))


def test_adapters_that_need_its_maps_are_refused():
    config = config_of()
    assert "adapter.kind prefix reads and brings" in AdapterConfig("prefix", length=2).misfits(config)[0]
    assert "adapter.maps names attn.q, which latent attention maps" in AdapterConfig("lora", rank=2).misfits(config)[0]
    assert AdapterConfig("lora", rank=2, maps=["attn.o", "mlp.up"]).misfits(config) == []
