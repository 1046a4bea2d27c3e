"""Models of ``transformers``: the same numbers as from our own decoder, and nothing left behind."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure.find_model import measurable
from birthmark.measure.hf import HFModel
from birthmark.measure.measurement import birth_reference, measure
from birthmark.models.decoder import Decoder
from birthmark.models.exchange.pretrained import load_pretrained

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

PROBE = random_probe(61, 9, 20, 0)


@pytest.fixture
def both(enliven):
    """``both(ours, theirs)``: one set of weights measured natively and through transformers, against one birth."""

    def both(ours, theirs):
        birth, stranger = (birth_reference(enliven(Decoder(ours.config), seed), PROBE, 4) for seed in (1, 2))
        return [measure(m, PROBE, birth, [stranger], batch_size=4) for m in (ours, HFModel(theirs))]

    return both


def assert_same(native, hf_model):
    """Every figure and list. Found: at most 7e-7, and 4e-6 for singular values, which are roots of eigenvalues: the two
    do the same in another order. Ranks agree exactly where no two tokens or units tie to a millionth, as here."""
    assert native.scalars.keys() == hf_model.scalars.keys()
    assert native.arrays.keys() == hf_model.arrays.keys()
    for name, value in native.scalars.items():
        assert hf_model.scalars[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for name, value in native.arrays.items():
        assert hf_model.arrays[name].dtype == value.dtype, name
        atol = 1e-5 * value.max() if name == "singular_values" else 1e-6
        np.testing.assert_allclose(hf_model.arrays[name], value, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.heavy
def test_the_same_weights_give_the_same_figures_through_transformers(their_name, their_model, both, tmp_path):
    theirs = their_model(their_name)
    theirs.save_pretrained(tmp_path)
    assert_same(*both(load_pretrained(tmp_path), theirs))


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
def test_a_measurement_leaves_no_trace(attention, family_model):
    model = family_model("mistral", attention).train()
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    tokens = torch.from_numpy(PROBE)
    model(tokens).logits.logsumexp(-1).mean().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, random = state_of(model), torch.get_rng_state()
    first = measure(HFModel(model), PROBE).scalars
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(p.grad, gradient)
    assert model(tokens).logits.requires_grad
    assert measure(HFModel(model), PROBE).scalars == first


def test_a_pass_that_fails_leaves_no_trace_and_nan_is_named_by_its_place(their_model):
    model = their_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[0, 0] = torch.nan
    before = state_of(model)
    with pytest.raises(RunError, match="the residual stream after the MLP of block 2"):
        measure(HFModel(model), PROBE)
    assert state_of(model) == before


def test_without_a_birth_what_needs_one_is_absent(their_model):
    hf_model = HFModel(their_model("llama"))
    birth = birth_reference(hf_model, PROBE, 4)
    full, bare = measure(hf_model, PROBE, birth, []), measure(hf_model, PROBE)
    absent = {"alignment", "drift", "energy_share", "energy_share_chance", "rank_persistence", "kendall_tau", "rbo"}
    assert full.scalars.keys() - bare.scalars.keys() == absent | {"overlap_10"}
    strange = {"alignment_stranger", "rank_persistence_stranger"}
    assert full.arrays.keys() - bare.arrays.keys() == {"alignment", "drift", "energy_share"} | strange
    assert all(full.scalars[name] == value for name, value in bare.scalars.items())
    # Strangers alone can be compared with.
    beside = measure(hf_model, PROBE, None, [birth])
    assert beside.scalars["alignment_stranger"] == pytest.approx(abs(full.scalars["alignment"]))
    assert "alignment" not in beside.scalars


def test_bf16_is_measured_too(their_model):
    theirs = their_model("qwen3")
    found, rounded = (measure(HFModel(m), PROBE).scalars for m in (theirs, theirs.to(torch.bfloat16)))
    for name in ("sink_mass", "inter", "n_eff", "entropy"):
        assert rounded[name] == pytest.approx(found[name], rel=0.02, abs=0.02), name


# ---------------------------------------------------------------- modules in several places


@pytest.mark.parametrize(
    ("name", "size", "shared"),
    [("mistral", "num_hidden_layers", ""), ("mixtral", "num_hidden_layers", ""), ("bloom", "n_layer", "")]
    + [("mistral", "num_hidden_layers", part) for part in ("self_attn", "mlp")],
)
def test_blocks_that_share_modules_are_measured_as_copies_of_them(name, size, shared, family_model):
    model = family_model(name, **{size: 4})
    decoder = model.get_decoder()
    place = "h" if name == "bloom" else "layers"
    blocks = list(getattr(decoder, place))
    if shared:
        for first, second in (blocks[:2], blocks[2:]):
            second.set_submodule(shared, first.get_submodule(shared))
    else:
        blocks = [blocks[i] for i in (0, 0, 1, 1)]
    setattr(decoder, place, nn.ModuleList(blocks))
    found = measure(HFModel(model), PROBE, batch_size=4)
    copies = nn.ModuleList(copy.deepcopy(block) for block in blocks)
    for layer, block in enumerate(copies):
        for module in block.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = layer
    setattr(decoder, place, copies)
    wanted = measure(HFModel(model), PROBE, batch_size=4)
    assert (found.scalars, found.unseen) == (wanted.scalars, wanted.unseen)
    for key, array in wanted.arrays.items():
        np.testing.assert_array_equal(found.arrays[key], array, err_msg=key)


# ---------------------------------------------------------------- weights that are elsewhere


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_that_accelerate_keeps_elsewhere_are_fetched_block_by_block(name, their_model):
    import accelerate

    model = their_model(name)
    whole = measure(HFModel(model), PROBE)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert all(p.is_meta for p in model.parameters())
    apart = measure(HFModel(model), PROBE)
    assert apart.scalars == whole.scalars
    np.testing.assert_array_equal(apart.arrays["neuron_up_norm"], whole.arrays["neuron_up_norm"])
    assert all(p.is_meta for p in model.parameters())


def test_a_model_on_several_devices_is_refused(their_model):
    model = their_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    with pytest.raises(UsageError, match=r"blocks of this llama model run on several devices \(0, 1\); load it on one"):
        HFModel(model)


# ---------------------------------------------------------------- refusals


def test_what_cannot_be_measured_is_refused_by_name(their_model, monkeypatch):
    with pytest.raises(UsageError, match=r"not the gpt2 model that transformers has \(it has no language-model head\)"):
        HFModel(transformers.GPT2Model(transformers.GPT2Config(n_layer=1, vocab_size=9)))
    sizes = ("layers", "attention_heads", "ffn_dim")
    parts = {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in sizes}
    mbart = transformers.MBartConfig(vocab_size=61, d_model=16, max_position_embeddings=24, **parts)
    with pytest.raises(UsageError, match=r"^MBartForConditionalGeneration is an encoder and a decoder, .*ForCausalLM"):
        HFModel(transformers.MBartForConditionalGeneration(mbart))
    assert measure(HFModel(transformers.MBartForCausalLM(mbart)), PROBE).scalars["preference_ratio"] > 1
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 16, "vocab_size": 9}
    music = transformers.MusicgenDecoderConfig(**sizes, num_codebooks=2)
    with pytest.raises(UsageError, match=r"\(it has no one table of token embeddings\)"):
        HFModel(transformers.MusicgenForCausalLM(music))
    renamed = their_model("llama")
    for block in renamed.model.layers:
        block.attention = block.self_attn
        del block.self_attn
    with pytest.raises(UsageError, match=r"not the llama model that transformers has \(no self_attn.o_proj in"):
        HFModel(renamed)
    with torch.device("meta"):
        empty = type(renamed)(renamed.config)
    with pytest.raises(UsageError, match=r"model.embed_tokens.weight is on the meta device, without values; load the"):
        measurable(empty)
    monkeypatch.setattr("birthmark.measure.hf.observed_pass._LEAST", (99, 1))
    with pytest.raises(UsageError, match=r"^measuring a LlamaForCausalLM needs transformers 99\.1 or later, and this"):
        HFModel(their_model("llama"))


class Packed(nn.Module):
    """Linear map whose weight is no tensor of the module, as dynamic quantisation packs it away."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.held = linear.in_features, linear.out_features, [linear.weight]

    def forward(self, x):
        return x @ self.held[0].T


def test_a_map_without_parameters_or_buffers_is_read_too(their_model):
    packed = their_model("llama")
    for block in packed.model.layers:
        block.mlp.gate_proj = Packed(block.mlp.gate_proj)
    found, whole = (
        measure(HFModel(model), PROBE).arrays["neuron_gate_norm"] for model in (packed, their_model("llama"))
    )
    np.testing.assert_allclose(found, whole, rtol=1e-6)


def test_an_attention_that_is_not_what_was_observed_is_refused(their_model):
    """Whatever a model does to its scores that the attention function does not see shows in what follows."""
    model = their_model("llama")

    def squeezed(module, query, key, value, attention_mask, **more):
        sdpa = transformers.AttentionInterface()["sdpa"]
        return sdpa(module, 0.5 * query, key, value, attention_mask, **more)

    transformers.AttentionInterface.register("squeezed", squeezed)
    model.config._attn_implementation = "squeezed"
    with pytest.raises(UsageError, match=r"llama model's attention is not .* differs after the attention of block 1,"):
        measure(HFModel(model), PROBE)
    assert model.config._attn_implementation == "squeezed"


def _assert_maps_and_figures(model, expected):
    """The maps of two models, and the figures of them."""
    changed, wanted = HFModel(model), HFModel(expected)
    for layer in (1, 2):
        found, maps = (
            [x for x in (*model.mlp_weights(layer), model.output_weights(layer)) if x is not None]
            for model in (changed, wanted)
        )
        torch.testing.assert_close(found, maps, atol=1e-5, rtol=1e-5)
    probe = random_probe(wanted.config.vocab_size, 4, 10, 0)
    found, exact = measure(changed, probe), measure(wanted, probe)
    assert found.unseen == exact.unseen
    for name in ("neuron_gate_norm", "neuron_up_norm", "neuron_z", "sink_mass", "mean_prob"):
        assert (name in found.arrays) == (name in exact.arrays)
        if name in exact.arrays:
            np.testing.assert_allclose(found.arrays[name], exact.arrays[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("how", [{}, {"use_dora": True}])
@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_adapted_maps_are_those_of_the_merged_model(name, how, their_names, their_model, family_model):
    peft = pytest.importorskip("peft", reason="the adapters are its own: pip install peft")
    base = their_model(name) if name in their_names else family_model(name)
    options = {"target_modules": "all-linear", "lora_dropout": 0.5, "init_lora_weights": False}
    options["fan_in_fan_out"] = name == "gpt2"
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options, **how)).train()
    merged = copy.deepcopy(adapted).eval().merge_and_unload()
    _assert_maps_and_figures(adapted, merged)
    assert all(module.training for module in adapted.modules())
    with adapted.disable_adapter():
        _assert_maps_and_figures(adapted, copy.deepcopy(adapted).unload())


class _Codes(torch.nn.Module):
    """A map whose weight is 8-bit codes, by row, or 4-bit codes, two in a byte of a column."""

    def __init__(self, linear, bits):
        super().__init__()
        self.in_features, self.out_features, self.bits = linear.in_features, linear.out_features, bits
        self.SCB = linear.weight.detach().abs().amax(1) / (2 ** (bits - 1) - 1)
        codes = (linear.weight.detach() / self.SCB[:, None]).round()
        if bits == 4:
            codes = (codes + 8).to(torch.uint8).flatten()
            codes = (codes[::2] * 16 + codes[1::2])[:, None]
        self.weight = torch.nn.Parameter(codes if bits == 4 else codes.to(torch.int8), requires_grad=False)

    def matrix(self):
        codes = self.weight
        if self.bits == 4:
            codes = torch.stack((codes[:, 0] // 16, codes[:, 0] % 16), 1).view(self.out_features, -1).float() - 8
        return codes * self.SCB[:, None]

    def forward(self, x):
        return x @ self.matrix().T


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_maps_are_what_their_codes_stand_for(bits, family_model):
    model, expected = family_model("mistral"), family_model("mistral")
    expected.load_state_dict(model.state_dict())
    for block, exact in zip(model.model.layers, expected.model.layers, strict=True):
        for name, linear in [(n, m) for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)]:
            codes = _Codes(linear, bits)
            block.set_submodule(name, codes)
            exact.get_submodule(name).weight.data = codes.matrix()
    _assert_maps_and_figures(model, expected)
