"""Models of ``transformers``: the same numbers as from our own decoder, and nothing left behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure.foreign import MODEL_TYPES, ForeignModel
from birthmark.measure.measurement import birth_reference, measure
from birthmark.metrics.sinks import AttentionSinks
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.pretrained import load_pretrained

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PROBE = random_probe(61, 9, 20, 0)

_WINDOWED = {"head_dim": 12, "sliding_window": 6}
#: Model types that our decoder cannot be: (architecture, config beside `their_shape`).
OTHERS = {
    "mistral": ("Mistral", _WINDOWED | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "gemma": ("Gemma", {"head_dim": 12}),
    "gemma2": ("Gemma2", _WINDOWED | {"query_pre_attn_scalar": 30, "attn_logit_softcapping": None}),
    "gemma3_text": ("Gemma3", _WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}),
    "olmo": ("Olmo", {"clip_qkv": 1.0}),
    "olmo3": ("Olmo3", _WINDOWED | {"layer_types": ["sliding_attention", "full_attention"]}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
}


@pytest.fixture
def other_model(their_shape, enliven):
    """``other_model(name, attention="eager")``: one of those, with random values everywhere."""

    def build(name, attention="eager"):
        architecture, config = OTHERS[name]
        kind = "Gemma3TextConfig" if architecture == "Gemma3" else f"{architecture}Config"
        config = getattr(transformers, kind)(**their_shape | config, attn_implementation=attention)
        return enliven(getattr(transformers, f"{architecture}ForCausalLM")(config))

    return build


@pytest.fixture
def both(enliven):
    """``both(ours, theirs)``: one set of weights measured natively and through transformers, against one birth."""

    def both(ours, theirs):
        birth, stranger = (birth_reference(enliven(Decoder(ours.config), seed), PROBE, 4) for seed in (1, 2))
        return [measure(m, PROBE, birth, [stranger], batch_size=4) for m in (ours, ForeignModel(theirs))]

    return both


def assert_same(native, foreign):
    """Every figure and list. Found: at most 7e-7, and 4e-6 for singular values, which are roots of eigenvalues: the two
    do the same in another order. Ranks agree exactly where no two tokens or units tie to a millionth, as here."""
    assert native.scalars.keys() == foreign.scalars.keys()
    assert native.arrays.keys() == foreign.arrays.keys()
    for name, value in native.scalars.items():
        assert foreign.scalars[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, value in native.arrays.items():
        assert foreign.arrays[name].dtype == value.dtype, name
        atol = 1e-5 * value.max() if name == "singular_values" else 1e-6
        np.testing.assert_allclose(foreign.arrays[name], value, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.heavy
def test_the_same_weights_give_the_same_figures_natively_and_through_transformers(
    their_name, their_model, both, tmp_path
):
    theirs = their_model(their_name)
    theirs.save_pretrained(tmp_path)
    assert_same(*both(load_pretrained(tmp_path), theirs))


def test_mistrals_window_is_ours(other_model, both, their_shape, tmp_path):
    theirs = other_model("mistral", "sdpa")
    shape = {key: value for key, value in OTHERS["mistral"][1].items() if key != "sliding_window"}
    alike = transformers.LlamaForCausalLM(transformers.LlamaConfig(**their_shape | shape))
    alike.load_state_dict(theirs.state_dict())
    alike.save_pretrained(tmp_path)
    plain = load_pretrained(tmp_path)
    attention = dataclasses.replace(plain.config.attention, window=6)
    ours = Decoder(dataclasses.replace(plain.config, attention=attention))
    ours.load_state_dict(plain.state_dict())
    native, foreign = both(ours, theirs)
    assert_same(native, foreign)
    assert (foreign.arrays["n_eff"] <= 6.001).all()


class Rows:
    """Rows of an explicit matrix of weights."""

    def __init__(self, weights):
        self.weights = weights

    def rows(self, start, stop):
        return self.weights[:, :, start:stop, :stop].clone()

    def row_sum(self):
        return None


@pytest.mark.heavy
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_types_give_what_the_explicit_way_gives(name, attention, other_model):
    if name == "gemma2" and attention == "sdpa":
        pytest.skip("transformers refuses gemma2 with sdpa: its class has no support for it")
    model, tokens = other_model(name, attention), torch.from_numpy(PROBE)
    birth = birth_reference(ForeignModel(other_model(name)), PROBE, 4)
    found = measure(ForeignModel(model), PROBE, birth, [], batch_size=4)
    explicit = other_model(name)
    with torch.no_grad():
        output = explicit(tokens, output_attentions=True, output_hidden_states=True)
    # Their last hidden state is normed already; that of the last block is not among them.
    hidden = [h.double() for h in output.hidden_states[:-1]]
    assert len(hidden) == 2
    for layer, h in enumerate(hidden):
        u = h[:, -1] / h[:, -1].norm(dim=-1, keepdim=True)
        inter = (u.sum(0).square().sum() - len(u)) / (len(u) * (len(u) - 1))
        assert found.arrays["inter_mlp"][layer] == pytest.approx(inter.item(), abs=1e-5)
        seed = h[:, -1].mean(0) / h[:, -1].mean(0).norm()
        assert found.arrays["alignment"][layer] == pytest.approx((u @ seed).mean().item(), abs=1e-5)
    sinks = AttentionSinks(2, 4, 20)
    for layer, weights in enumerate(output.attentions):
        sinks.update(layer, Rows(weights))
    expected = sinks.compute()
    np.testing.assert_allclose(found.arrays["sink_mass"], expected.mass, atol=1e-5)
    np.testing.assert_allclose(found.arrays["importance"], expected.importance, atol=1e-5)
    p = output.logits[:, -1].double().softmax(-1).mean(0)
    np.testing.assert_allclose(found.arrays["mean_prob"], p.numpy(), rtol=1e-4)
    assert found.scalars["drift"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_places_of_other_types_add_up(name, other_model):
    """After the MLP is after attention and what the MLP adds; the hidden units are what the down map reads."""
    seen, added = {}, {}

    class Keep:
        def residual(self, site, layer, h):
            seen[site, layer] = h

        def attention(self, layer, attended):
            seen["attended", layer] = attended

        def neurons(self, layer, a):
            seen["neurons", layer] = a

    def keep(layer, output):
        added[layer] = output  # of the last pass, which is the observed one

    model = other_model(name)
    for layer, block in enumerate(model.model.layers, start=1):
        last = getattr(block, "post_feedforward_layernorm", block.mlp)
        last.register_forward_hook(lambda module, args, output, layer=layer: keep(layer, output))
    with torch.no_grad():
        ForeignModel(model)(torch.from_numpy(PROBE), observer=Keep())
        for layer, block in enumerate(model.model.layers, start=1):
            after = seen["attention", layer] + added[layer]
            torch.testing.assert_close(after, seen["mlp", layer], atol=1e-5, rtol=1e-5)
            out = block.mlp.down_proj(seen["neurons", layer])
            norm = getattr(block, "post_feedforward_layernorm", None)
            torch.testing.assert_close(out if norm is None else norm(out), added[layer], atol=1e-5, rtol=1e-5)
            o = block.self_attn.o_proj(seen["attended", layer].out_BHTK.transpose(1, 2).flatten(2))
            if name in ("gemma2", "gemma3_text", "olmo3"):
                o = block.post_attention_layernorm(o)
            before = seen["mlp", layer - 1] if layer > 1 else seen["embedding", 0]
            torch.testing.assert_close(before + o, seen["attention", layer], atol=1e-5, rtol=1e-5)


def test_every_type_that_is_promised_is_tested(their_names):
    assert {name.split()[0] for name in their_names} | OTHERS.keys() == set(MODEL_TYPES)


# ---------------------------------------------------------------- nothing is left behind


def state_of(model):
    """All that a measurement might leave changed."""
    return {
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "attention": [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")],
        "config": model.config.to_dict(),
        "gradients": [p.requires_grad for p in model.parameters()],
        "versions": [p._version for p in model.parameters()],
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_measurement_leaves_no_trace(attention, other_model):
    model = other_model("mistral", attention).train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    tokens = torch.from_numpy(PROBE)
    model(tokens).logits.logsumexp(-1).mean().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, random = state_of(model), torch.get_rng_state()
    first = measure(ForeignModel(model), PROBE).scalars
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(p.grad, gradient)
    assert model(tokens).logits.requires_grad
    assert measure(ForeignModel(model), PROBE).scalars == first


def test_a_pass_that_fails_leaves_no_trace_and_nan_is_named_by_its_place(their_model):
    model = their_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[0, 0] = torch.nan
    before = state_of(model)
    with pytest.raises(RunError, match="the residual stream after the MLP of block 2"):
        measure(ForeignModel(model), PROBE)
    assert state_of(model) == before


def test_without_a_birth_what_needs_one_is_absent(their_model):
    foreign = ForeignModel(their_model("llama"))
    birth = birth_reference(foreign, PROBE, 4)
    full, bare = measure(foreign, PROBE, birth, []), measure(foreign, PROBE)
    absent = {"alignment", "drift", "energy_share", "energy_share_chance", "rank_persistence", "kendall_tau", "rbo"}
    assert full.scalars.keys() - bare.scalars.keys() == absent | {"overlap_10"}
    strange = {"alignment_stranger", "rank_persistence_stranger"}
    assert full.arrays.keys() - bare.arrays.keys() == {"alignment", "drift", "energy_share"} | strange
    assert all(full.scalars[name] == value for name, value in bare.scalars.items())
    # Strangers alone can be compared with.
    beside = measure(foreign, PROBE, None, [birth])
    assert beside.scalars["alignment_stranger"] == pytest.approx(abs(full.scalars["alignment"]))
    assert "alignment" not in beside.scalars


def test_bf16_is_measured_too(their_model):
    theirs = their_model("qwen3")
    found, rounded = (measure(ForeignModel(m), PROBE).scalars for m in (theirs, theirs.to(torch.bfloat16)))
    for name in ("sink_mass", "inter", "n_eff", "entropy"):
        assert rounded[name] == pytest.approx(found[name], rel=0.02, abs=0.02), name


# ---------------------------------------------------------------- refusals


def test_what_cannot_be_measured_is_refused_by_name(their_shape, enliven):
    capped = transformers.Gemma2Config(**their_shape | _WINDOWED | {"query_pre_attn_scalar": 30})
    model = enliven(transformers.Gemma2ForCausalLM(capped))
    before = state_of(model)
    with pytest.raises(UsageError, match=r"block 1 caps its attention scores \(softcap\)"):
        measure(ForeignModel(model), PROBE)
    assert state_of(model) == before
    with pytest.raises(UsageError, match=r"model type 'opt' cannot be measured; there are: gpt2, llama"):
        ForeignModel(transformers.OPTForCausalLM(transformers.OPTConfig(num_hidden_layers=1, vocab_size=9)))
    with pytest.raises(UsageError, match="not the gpt2 model that transformers has"):
        ForeignModel(transformers.GPT2Model(transformers.GPT2Config(n_layer=1, vocab_size=9)))


def test_an_attention_that_is_not_what_was_observed_is_refused(their_model):
    """Whatever a model does to its scores that the attention function does not see shows in the logits."""
    model = their_model("llama")

    def squeezed(module, query, key, value, attention_mask, **more):
        sdpa = transformers.AttentionInterface()["sdpa"]
        return sdpa(module, 0.5 * query, key, value, attention_mask, **more)

    transformers.AttentionInterface.register("squeezed", squeezed)
    model.config._attn_implementation = "squeezed"
    with pytest.raises(UsageError, match="attention is no plain causal softmax"):
        measure(ForeignModel(model), PROBE)
    assert model.config._attn_implementation == "squeezed"
