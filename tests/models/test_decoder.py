"""The whole decoder: equal to the field's own models, causal, observed without a trace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.decoder import Decoder

SMALL = {"d_model": 32, "n_layers": 3, "n_heads": 4, "d_ff": 48, "vocab_size": 61, "max_seq_len": 24}
KINDS = {
    "plain": AttentionConfig(),
    "headnorm": AttentionConfig("headnorm"),
    "analytic amplify": AttentionConfig("calibrated", calibration=CalibrationConfig("analytic", "amplify")),
    "analytic attenuate": AttentionConfig("calibrated", calibration=CalibrationConfig("analytic", "attenuate")),
    "exact amplify": AttentionConfig("calibrated", calibration=CalibrationConfig("exact", "amplify")),
    "exact attenuate": AttentionConfig("calibrated", calibration=CalibrationConfig("exact", "attenuate")),
    "gated, normed queries and keys": AttentionConfig("headnorm", gate="channel", qk_norm="head"),
}


def lively(config: ModelConfig, seed: int = 0) -> Decoder:
    """A newborn whose gains and biases are random too: at 1 and 0 they would hide where they enter."""
    model = born(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def random_tokens(config: ModelConfig, n: int = 3, length: int | None = None, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (n, length or config.max_seq_len), generator=generator)


def to_llama(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters, or their gradients, under the names of ``LlamaForCausalLM``."""
    parts = {
        "norm_attn.gain": "input_layernorm.weight",
        "norm_mlp.gain": "post_attention_layernorm.weight",
        **{f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
        **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    names = {"embed.weight": "model.embed_tokens.weight", "norm.gain": "model.norm.weight"}
    names |= {"head.weight": "lm_head.weight"}
    for i in range(SMALL["n_layers"]):
        names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for a, b in parts.items()}
    assert names.keys() == ours.keys()
    return {names[name]: value for name, value in ours.items()}


def to_gpt2(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same for ``GPT2LMHeadModel``, whose matrices are transposed and whose q, k and v are one matrix."""
    theirs = {
        "transformer.wte.weight": ours["embed.weight"],
        "transformer.wpe.weight": ours["positions.table.weight"],
        "transformer.ln_f.weight": ours["norm.gain"],
        "transformer.ln_f.bias": ours["norm.bias"],
    }
    for i in range(SMALL["n_layers"]):
        block = {name.removeprefix(f"blocks.{i}."): v for name, v in ours.items() if name.startswith(f"blocks.{i}.")}
        theirs |= {
            f"transformer.h.{i}.{name}": value
            for name, value in {
                "ln_1.weight": block["norm_attn.gain"],
                "ln_1.bias": block["norm_attn.bias"],
                "ln_2.weight": block["norm_mlp.gain"],
                "ln_2.bias": block["norm_mlp.bias"],
                "attn.c_attn.weight": torch.cat([block[f"attn.{x}.weight"].T for x in "qkv"], dim=1),
                "attn.c_attn.bias": torch.cat([block[f"attn.{x}.bias"] for x in "qkv"]),
                "attn.c_proj.weight": block["attn.o.weight"].T,
                "attn.c_proj.bias": block["attn.o.bias"],
                "mlp.c_fc.weight": block["mlp.up.weight"].T,
                "mlp.c_fc.bias": block["mlp.up.bias"],
                "mlp.c_proj.weight": block["mlp.down.weight"].T,
                "mlp.c_proj.bias": block["mlp.down.bias"],
            }.items()
        }
    assert sum(v.numel() for v in theirs.values()) == sum(v.numel() for v in ours.values())
    return theirs


def llama_pair():
    config = ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", rope_base=500.0, norm_eps=1e-4)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=24,
            rms_norm_eps=1e-4,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )
    return lively(config), theirs, to_llama


def gpt2_pair():
    config = ModelConfig(
        **SMALL, mlp="gelu", norm="layernorm", norm_eps=1e-4, positions="learned", tie_embeddings=True, bias=True
    )
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=61,
            n_embd=32,
            n_inner=48,
            n_layer=3,
            n_head=4,
            n_positions=24,
            layer_norm_epsilon=1e-4,
            activation_function="gelu",
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation="eager",
        )
    )
    return lively(config), theirs, to_gpt2


def rotary_shape(**more):
    """What the configs of the rotary families have in common."""
    return {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        "eos_token_id": 0,
        "pad_token_id": None,
        **more,
    }


def qwen3_pair():
    """Each head's queries and keys are normalised."""
    config = ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", norm_eps=1e-4, attention=AttentionConfig(qk_norm="head"))
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    shape = rotary_shape(num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-4, rope_parameters=rope)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))

    def rename(ours):
        norms = {f"attn.{x}.norm.gain": f"self_attn.{x}_norm.weight" for x in "qk"}
        inner = {n: v for n, v in ours.items() if not n.endswith(tuple(norms))}
        blocks = {(i, a): b for i in range(3) for a, b in norms.items()}
        return to_llama(inner) | {f"model.layers.{i}.{b}": ours[f"blocks.{i}.{a}"] for (i, a), b in blocks.items()}

    return lively(config), theirs, rename


def olmo2_pair():
    """All queries and keys are normalised together; blocks normalise their outputs, not their inputs."""
    attention = AttentionConfig(qk_norm="width")
    config = ModelConfig(**SMALL, n_kv_heads=2, mlp="swiglu", norm_eps=1e-4, norm_placement="post", attention=attention)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    shape = rotary_shape(num_key_value_heads=2, rms_norm_eps=1e-4, rope_parameters=rope)
    theirs = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**shape))
    parts = {
        "norm_attn_out.gain": "post_attention_layernorm.weight",
        "norm_mlp_out.gain": "post_feedforward_layernorm.weight",
        **{f"attn.{x}.norm.gain": f"self_attn.{x}_norm.weight" for x in "qk"},
        **{f"attn.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
        **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    names = {"embed.weight": "model.embed_tokens.weight", "norm.gain": "model.norm.weight"}
    names |= {"head.weight": "lm_head.weight"}
    names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for i in range(3) for a, b in parts.items()}
    return lively(config), theirs, lambda ours: {names[name]: value for name, value in ours.items()}


def neox_pair():
    """Attention and MLP side by side; half of each head's channels turn."""
    config = ModelConfig(**SMALL, norm="layernorm", norm_eps=1e-4, bias=True, parallel_residual=True, rope_fraction=0.5)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    shape = rotary_shape(layer_norm_eps=1e-4, rope_parameters=rope, hidden_act="gelu", use_parallel_residual=True)
    theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**shape))
    parts = {
        "norm_attn": "input_layernorm",
        "norm_mlp": "post_attention_layernorm",
        "attn.o": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    }

    def rename(ours):
        names = {"embed.weight": "gpt_neox.embed_in.weight", "head.weight": "lm_head.weight"}
        names |= {f"norm.{a}": f"gpt_neox.final_layer_norm.{b}" for a, b in (("gain", "weight"), ("bias", "bias"))}
        theirs = {b: ours[a] for a, b in names.items()}
        for i in range(3):
            for a, b in parts.items():
                for ours_end, their_end in (("weight", "weight"), ("gain", "weight"), ("bias", "bias")):
                    if f"blocks.{i}.{a}.{ours_end}" in ours:
                        theirs[f"gpt_neox.layers.{i}.{b}.{their_end}"] = ours[f"blocks.{i}.{a}.{ours_end}"]
            for end in ("weight", "bias"):
                # Theirs lie head by head: a head's queries, its keys, its values.
                heads = [ours[f"blocks.{i}.attn.{x}.{end}"].unflatten(0, (4, 8)) for x in "qkv"]
                theirs[f"gpt_neox.layers.{i}.attention.query_key_value.{end}"] = torch.stack(heads, 1).flatten(0, 2)
        return theirs

    return lively(config), theirs, rename


@pytest.mark.parametrize("pair", [llama_pair, gpt2_pair, qwen3_pair, olmo2_pair, neox_pair])
def test_logits_and_gradients_equal_those_of_transformers(pair):
    ours, theirs, rename = pair()
    state = rename({name: p.detach() for name, p in ours.named_parameters()})
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied to a table that is there

    tokens = random_tokens(ours.config, length=20)
    logits, expected = ours(tokens), theirs.eval()(tokens).logits
    assert expected.std() > 0.5  # nothing to compare in a model that says nothing
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) / logits.shape[1]
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = rename({name: p.grad for name, p in ours.named_parameters()})
    their_parameters = dict(theirs.named_parameters())
    assert gradients.keys() == their_parameters.keys()
    for name, gradient in gradients.items():
        reference = their_parameters[name].grad
        assert reference.abs().max() > 1e-3 or name.endswith(
            ("c_attn.bias", "value.bias")
        )  # the key's bias has none: shift of a row
        torch.testing.assert_close(gradient, reference, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("mlp", "reference"),
    [
        ("relu", lambda u, g: np.maximum(u, 0)),
        ("silu", lambda u, g: u / (1 + np.exp(-u))),
        ("tanh", lambda u, g: np.tanh(u)),
        ("identity", lambda u, g: u),
        ("swiglu", lambda u, g: g / (1 + np.exp(-g)) * u),
        ("reglu", lambda u, g: np.maximum(g, 0) * u),
        ("gelu", lambda u, g: u * gaussian_cdf(u)),
        ("geglu", lambda u, g: g * gaussian_cdf(g) * u),
        ("relu2", lambda u, g: np.maximum(u, 0) ** 2),
        ("gelu_tanh", lambda u, g: 0.5 * u * (1 + np.tanh((2 / np.pi) ** 0.5 * (u + 0.044715 * u**3)))),
        ("relu2glu", lambda u, g: np.maximum(g, 0) ** 2 * u),
        ("tanhglu", lambda u, g: np.tanh(g) * u),
        ("bilinear", lambda u, g: g * u),
    ],
)
def test_every_mlp_is_the_formula_of_its_name(mlp, reference):
    block = lively(ModelConfig(**SMALL, mlp=mlp, bias=True)).blocks[1].mlp.double()
    x = np.random.default_rng(0).normal(size=(2, 5, 32))
    weights = {name: p.detach().numpy() for name, p in block.named_parameters()}

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    gate = linear("gate", x) if "gate.weight" in weights else None
    expected = linear("down", reference(linear("up", x), gate))
    np.testing.assert_allclose(block(torch.from_numpy(x)).detach().numpy(), expected, rtol=1e-12, atol=1e-12)


def gaussian_cdf(x):
    from scipy.stats import norm

    return norm.cdf(x)


@pytest.mark.parametrize("config", [{}, {"positions": "learned", "tie_embeddings": True, "norm": "layernorm"}])
def test_last_only_is_the_last_row_of_all_logits(config):
    model = lively(ModelConfig(**SMALL, **config))
    tokens = random_tokens(model.config)
    last = model(tokens, last_only=True)
    assert last.shape == (3, 61)
    torch.testing.assert_close(last, model(tokens)[:, -1], atol=1e-6, rtol=1e-6)


class Recorder:
    """An observer that keeps everything."""

    def __init__(self):
        self.calls = []

    def residual(self, site, layer, h_BTD):
        self.calls.append((site, layer, (h_BTD,)))

    def attention(self, layer, q, k, o, lse, scale):
        self.calls.append(("scores", layer, (q, k, o, lse, scale)))


@pytest.mark.parametrize("n_kv_heads", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_sees_the_documented_places_in_order(kind, n_kv_heads):
    config = ModelConfig(**SMALL, n_kv_heads=n_kv_heads, attention=KINDS[kind])
    model, recorder = lively(config), Recorder()
    tokens = random_tokens(config)
    with torch.no_grad():
        model(tokens, observer=recorder)
    expected = [("embedding", 0, [(3, 24, 32)])]
    for layer in (1, 2, 3):
        heads = (3, 4, 24, 8)
        expected += [("scores", layer, [heads, heads, heads, (3, 4, 24)])]
        expected += [("attention", layer, [(3, 24, 32)]), ("mlp", layer, [(3, 24, 32)])]
    seen = [
        (site, layer, [tuple(v.shape) for v in values if isinstance(v, Tensor)])
        for site, layer, values in recorder.calls
    ]
    assert seen == expected
    assert {values[-1] for site, _, values in recorder.calls if site == "scores"} == {8**-0.5}


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_observer_sees_is_what_its_name_says(kind):
    config = ModelConfig(**SMALL, n_kv_heads=2, attention=KINDS[kind])
    model, recorder = lively(config), Recorder()
    tokens = random_tokens(config)
    with torch.no_grad():
        logits = model(tokens, observer=recorder)
        seen = {(site, layer): values for site, layer, values in recorder.calls}
        assert torch.equal(seen["embedding", 0][0], model.embed.weight[tokens])
        before = seen["embedding", 0][0]
        for layer, block in enumerate(model.blocks, start=1):
            q, k, o, lse, scale = (v.double() if isinstance(v, Tensor) else v for v in seen["scores", layer])
            scores = (q @ k.mT * scale).masked_fill(torch.ones(24, 24).triu(1) > 0, -torch.inf)
            # The values' own heads, each shared by two query heads.
            v = F.linear(block.norm_attn(before), block.attn.v.weight).double().view(3, 24, 2, 8).transpose(1, 2)
            v = torch.stack([v[:, 0], v[:, 0], v[:, 1], v[:, 1]], dim=1)
            torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(o, scores.softmax(-1) @ v, atol=1e-5, rtol=1e-5)
            after_attention, after = seen["attention", layer][0], seen["mlp", layer][0]
            attended = block.attn(block.norm_attn(before), model.positions.rotation(24, tokens.device), layer)
            torch.testing.assert_close(after_attention, before + attended)
            torch.testing.assert_close(after, after_attention + block.mlp(block.norm_mlp(after_attention)))
            before = after
        torch.testing.assert_close(F.linear(model.norm(before), model.head.weight), logits)


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_changes_no_bit_of_the_logits(kind, positions):
    config = ModelConfig(**SMALL, positions=positions, attention=KINDS[kind])
    model, tokens = lively(config), random_tokens(config)
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens, observer=Recorder()))
        assert torch.equal(model(tokens, last_only=True), model(tokens, last_only=True, observer=Recorder()))


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_logit_depends_on_a_later_token(kind, positions):
    config = ModelConfig(**SMALL, positions=positions, attention=KINDS[kind])
    model, tokens = lively(config), random_tokens(config)
    with torch.no_grad():
        logits = model(tokens)
        for t in (1, 11, 23):
            changed = tokens.clone()
            changed[:, t] = (tokens[:, t] + 1) % 61
            again = model(changed)
            assert torch.equal(logits[:, :t], again[:, :t])
            # It does reach every position from t on, so that the line above says something.
            assert ((logits[:, t:] - again[:, t:]).abs().amax(-1) > 1e-4).all()
            # Nor do logits depend on how long the sequence goes on.
            torch.testing.assert_close(model(tokens[:, :t]), logits[:, :t], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "none"])
def test_positions_matter_only_where_there_are_any(positions):
    """Without positions, the last logits do not depend on the order of the tokens before; with them they do."""
    config = ModelConfig(**SMALL, positions=positions)
    model, tokens = lively(config), random_tokens(config)
    # One block alone: the causal mask tells a second one the order.
    model.blocks = model.blocks[:1]
    order = torch.cat([torch.arange(22, -1, -1), torch.tensor([23])])
    with torch.no_grad():
        difference = (model(tokens, last_only=True) - model(tokens[:, order], last_only=True)).abs().max()
    assert difference < 1e-5 if positions == "none" else difference > 1e-2


def test_rotary_scores_depend_on_the_distance_alone():
    """Two far-away stretches of one text give the same scores; every channel pair turns at its own speed."""
    config = ModelConfig(**SMALL, rope_base=100.0)
    positions = lively(config).positions
    cos, sin = positions.rotation(50, torch.device("cpu")).double()
    angles = np.arange(50)[:, None] * 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(cos.numpy(), np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles), atol=1e-7)


@pytest.mark.parametrize("kind", ["plain", "exact amplify"])
def test_birth_and_passes_leave_no_trace_in_random_state(kind):
    config = ModelConfig(**SMALL, attention=KINDS[kind], positions="learned")
    torch.manual_seed(3)
    np.random.seed(3)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    model = born(config, 0)
    model(random_tokens(config), observer=Recorder()).sum().backward()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_more_tokens_than_learned_positions_are_refused_and_not_wrapped():
    for max_seq_len in (1, 24):
        config = ModelConfig(**SMALL | {"max_seq_len": max_seq_len}, positions="learned")
        with pytest.raises((RuntimeError, IndexError, ValueError)):
            born(config, 0)(random_tokens(config, length=max_seq_len + 4))


def test_sinusoidal_positions_are_the_published_waves():
    config = ModelConfig(**SMALL, positions="sinusoidal")
    model, tokens, recorder = lively(config), random_tokens(config), Recorder()
    model(tokens, observer=recorder)
    waves = np.empty((24, 32))
    for t in range(24):
        for i in range(16):
            angle = t / 10000 ** (2 * i / 32)
            waves[t, 2 * i], waves[t, 2 * i + 1] = np.sin(angle), np.cos(angle)
    ((_, _, (embedding, *_)),) = [call for call in recorder.calls if call[0] == "embedding"]
    np.testing.assert_allclose((embedding - model.embed.weight[tokens]).detach(), np.stack([waves] * 3), atol=1e-6)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "none"])
def test_norms_on_both_sides_and_side_by_side(norm, parallel):
    """By hand, from the block's own attention and MLP and a norm written out."""
    placement = "both" if norm != "none" else "pre"
    config = ModelConfig(**SMALL, norm=norm, norm_placement=placement, parallel_residual=parallel, bias=True)
    block = lively(config).blocks[1].double()
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gains = {name: p for name, p in block.named_parameters() if name.startswith("norm")}
    assert len(gains) == {"rmsnorm": 4, "layernorm": 8, "none": 0}[norm]

    def normed(name, y):
        if norm == "none":
            return y
        if norm == "layernorm":
            y = y - y.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * gains[f"{name}.gain"]
        return y + gains[f"{name}.bias"] if norm == "layernorm" else y

    attended = x + normed("norm_attn_out", block.attn(normed("norm_attn", x), None, 2))
    read = x if parallel else attended
    expected = attended + normed("norm_mlp_out", block.mlp(normed("norm_mlp", read)))
    torch.testing.assert_close(block(x, None), expected, atol=1e-12, rtol=1e-12)
