"""Every family of ``transformers`` that is promised, against its own eager attention and hidden states."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from oracles import Rows, Seen
from torch import nn

from birthmark.data.probes import random_probe
from birthmark.errors import UsageError
from birthmark.measure.hf import MODEL_TYPES, HFModel
from birthmark.measure.hidden_states import FingerprintProbe, hidden_states
from birthmark.measure.measurement import measure
from birthmark.measure.model_reading import read_model
from birthmark.metrics.sinks import AttentionSinks

PROBE = random_probe(61, 9, 20, 0)

#: What a block adds to the residual stream after the attention, where it is not the output of its ``mlp``.
ADDED = dict.fromkeys(("gemma2", "gemma3_text", "olmo3"), "post_feedforward_layernorm") | {
    "opt": "fc2", "bloom": "mlp.dense_4h_to_h", "mpt": "ffn.down_proj",
}  # fmt: skip
DOWN_MAPS = {"mlp.down_proj", "mlp.c_proj", "mlp.fc2", "mlp.fc_out", "mlp.dense_4h_to_h", "fc2", "ffn.down_proj"}
OUTPUT_PROJECTIONS = {"o_proj", "out_proj", "dense"}


def blocks_of(model):
    decoder = model.get_decoder()
    return next(found for name in ("layers", "h", "blocks") if (found := getattr(decoder, name, None)) is not None)


def first(output):
    return output[0] if isinstance(output, tuple) else output


def explicit_pass(model, name, tokens):
    """The model's own eager pass: its output, and by block what leaves it, enters its output projection, is added, and
    enters the down map of a dense MLP."""
    left, entered, added, read, handles = {}, {}, {}, {}, []
    for layer, block in enumerate(blocks_of(model), start=1):
        handles.append(block.register_forward_hook(lambda m, a, out, at=layer: left.update({at: first(out)})))
        o = [m for n, m in block.named_modules() if n.split(".")[-1] in OUTPUT_PROJECTIONS and "linear_attn" not in n]
        for module in o:
            handles.append(module.register_forward_pre_hook(lambda m, a, at=layer: entered.update({at: a[0]})))
        down = [m for n, m in block.named_modules() if n in DOWN_MAPS]
        for module in down:
            handles.append(module.register_forward_pre_hook(lambda m, a, at=layer: read.update({at: a[0]})))
        last = block.get_submodule(ADDED.get(name.split()[0], "mlp"))
        handles.append(last.register_forward_hook(lambda m, a, out, at=layer: added.update({at: first(out).clone()})))
    with torch.no_grad():
        output = model(tokens, output_attentions=True, output_hidden_states=True, use_cache=False)
    for handle in handles:
        handle.remove()
    return output, left, entered, added, read


def inter(h):
    u = h[:, -1].double() / h[:, -1].double().norm(dim=-1, keepdim=True)
    return ((u.sum(0).square().sum() - len(u)) / (len(u) * (len(u) - 1))).item()


def test_a_family_gives_what_the_explicit_way_gives(family_name, family_model):
    model, tokens = family_model(family_name), torch.from_numpy(PROBE)
    output, left, entered, added, read = explicit_pass(model, family_name, tokens)
    hf_model, seen = HFModel(model), Seen()
    found = measure(hf_model, PROBE, batch_size=4)
    with torch.no_grad():
        logits = hf_model(tokens, observer=seen)
    torch.testing.assert_close(logits, output.logits, atol=1e-4, rtol=1e-4)
    # The residual stream. Their last hidden state is normed already; that of the last block is not among them.
    for layer, h in enumerate(output.hidden_states[:-1]):
        torch.testing.assert_close(seen.residuals["mlp" if layer else "embedding", layer], h, atol=1e-4, rtol=1e-4)
        assert found.arrays["inter_mlp"][layer] == pytest.approx(inter(h), abs=1e-4)
    for layer, h in left.items():
        torch.testing.assert_close(seen.residuals["mlp", layer], h, atol=1e-4, rtol=1e-4)
    for layer, block in enumerate(blocks_of(model), start=1):
        after = seen.residuals["attention", layer]
        total = after + added[layer].view_as(after) * getattr(block, "residual_multiplier", 1.0)
        if "post-norm" in family_name:
            total = block.final_layer_norm(total)
        torch.testing.assert_close(total, left[layer], atol=1e-4, rtol=1e-4)
    # The attention of the blocks that have one, in their order.
    attended = [layer for layer in range(1, len(left) + 1) if layer in seen.attended]
    has_sinks = family_name == "gpt_oss"
    sinks = AttentionSinks(len(attended), 4, 20, rows_sum_to_one=not has_sinks)
    for i, (layer, weights) in enumerate(zip(attended, output.attentions, strict=True)):
        sinks.update(i, Rows(weights, sums=has_sinks))
        out = seen.attended[layer].out_BHTK.transpose(1, 2).flatten(2)
        torch.testing.assert_close(out, entered[layer], atol=1e-4, rtol=1e-4)
        values = seen.attended[layer].v_BHTK
        torch.testing.assert_close(seen.attended[layer].o_BHTK, weights @ values, atol=1e-4, rtol=1e-4)
        n_eff = (1 / weights.square().sum(-1)).mean(0)
        np.testing.assert_allclose(found.arrays["n_eff"][layer - 1], n_eff.numpy(), rtol=1e-3, atol=1e-4)
    expected, rows = sinks.compute(), [layer - 1 for layer in attended]
    for suffix in ("", "_normalised") if has_sinks else ("",):
        for quantity in ("mass", "importance"):
            name = f"{'sink_' if quantity == 'mass' else ''}{quantity}{suffix}"
            wanted = getattr(expected, f"{quantity}{suffix}")
            np.testing.assert_allclose(found.arrays[name][rows], wanted, atol=1e-4)
    p = output.logits[:, -1].double().softmax(-1).mean(0)
    np.testing.assert_allclose(found.arrays["mean_prob"], p.numpy(), rtol=1e-3)
    # What a fingerprint rests on, and an embedding probe.
    probe = FingerprintProbe(n_inputs=9, seq_len=20)
    states = hidden_states(hf_model, probe, batch_size=4)
    np.testing.assert_allclose(states, output.hidden_states[-1][:, -1].numpy(), rtol=1e-4, atol=1e-4)
    probe = FingerprintProbe("embedding", n_inputs=9, seq_len=20).like(hf_model)
    vectors = torch.from_numpy(probe.vectors(0, 9, hf_model.embeddings.weight.shape[1]))
    with torch.no_grad():
        given = model(inputs_embeds=vectors, output_hidden_states=True).hidden_states[-1][:, -1]
    np.testing.assert_allclose(hidden_states(hf_model, probe), given.numpy(), rtol=1e-4, atol=1e-4)
    # Hidden units of dense MLPs are what the down map reads.
    assert seen.units.keys() == read.keys()
    for layer, units in seen.units.items():
        torch.testing.assert_close(units, read[layer].view_as(units), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_the_experts_that_are_seen_are_those_that_the_router_ranks_highest(name, family_model):
    model, chosen = family_model(name), {}

    class Routing(Seen):
        def routing(self, layer, chosen_BTK):
            chosen[layer] = chosen_BTK

    with torch.no_grad():
        HFModel(model)(torch.from_numpy(PROBE), observer=Routing())
        ranked = model(torch.from_numpy(PROBE), output_router_logits=True).router_logits
    for experts, logits in zip(chosen.values(), ranked, strict=True):
        assert experts.shape == (9, 20, 2)
        assert torch.equal(experts.flatten(0, 1).sort().values, logits.topk(2).indices.sort().values)
    found = measure(HFModel(model), PROBE)
    shares = np.stack([np.bincount(e[:, 0].flatten(), minlength=4) / 18 for e in chosen.values()])
    np.testing.assert_allclose(found.arrays["expert_share_first"][[layer - 1 for layer in chosen]], shares)
    assert np.isnan(found.arrays["expert_share_first"]).any() == (len(chosen) < 2)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_the_units_of_experts_are_what_their_maps_down_read(name, family_model):
    """Mapped down, weighed and summed they are what the experts give."""
    model, shown, passed = family_model(name), {}, {}

    class Units(Seen):
        def expert_units(self, layer, expert, a_RF, position_R):
            shown[layer, expert] = a_RF, position_R

    blocks = dict(enumerate(model.model.layers, start=1))
    routed = {layer: block.mlp.experts for layer, block in blocks.items() if hasattr(block.mlp, "experts")}
    handles = [
        experts.register_forward_hook(lambda module, args, output, layer=layer: passed.update({layer: (args, output)}))
        for layer, experts in routed.items()
    ]
    with torch.no_grad():
        HFModel(model)(torch.from_numpy(PROBE), observer=Units())
    for handle in handles:
        handle.remove()
    for layer, experts in routed.items():
        (_, chosen_NK, weight_NK), expected = passed[layer]
        found_ND = torch.zeros_like(expected)
        for e in range(experts.num_experts):
            a_RF, position_R = shown[layer, e]
            token_R, k_R = (chosen_NK == e).nonzero(as_tuple=True)
            assert torch.equal(position_R, token_R % PROBE.shape[1])
            down = experts.down_proj[e] if name == "gpt_oss" else experts.down_proj[e].T
            y_RD = a_RF @ down + (experts.down_proj_bias[e] if name == "gpt_oss" else 0)
            found_ND.index_add_(0, token_R, y_RD * weight_NK[token_R, k_R, None])
        torch.testing.assert_close(found_ND, expected, rtol=1e-4, atol=1e-5)
    arrays = measure(HFModel(model), PROBE).arrays
    for name in ("expert_super_neurons", "expert_dead_units"):
        assert np.isfinite(arrays[name]).any(1).tolist() == [layer in routed for layer in blocks]


def test_the_final_states_of_a_family_make_its_logits(family_name, family_model, tmp_path):
    """And its head: two models are compared by them."""
    model = family_model(family_name)
    reading = read_model(family_name, HFModel(model), PROBE, tmp_path, batch_size=4, minibatch=9)
    states = torch.cat([reading.states(batch) for batch in range(reading.n_batches)])
    with torch.no_grad():
        logits = model(torch.from_numpy(PROBE)).logits
    torch.testing.assert_close(reading.head()(states), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["opt", "gpt_neo"])
def test_a_model_in_training_is_looked_at_without_its_dropout(name, family_model):
    model = family_model(name).train()
    assert HFModel(model).unseen() == ()
    assert all(module.training for module in model.modules())


def test_every_type_that_is_promised_is_tested(their_names, family_names):
    tested = {name.split()[0] for name in [*their_names, *family_names]}
    assert tested == set(MODEL_TYPES)


# ---------------------------------------------------------------- models of no family that is known

_SMALL = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_GLM = _SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
_FIRST_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24}
_MAMBA = {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "time_step_rank": 2}
_LATENT = _SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "q_lora_rank": 16,
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
_GRANITE = _SMALL | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "layer_types": ["mamba"] * 3,
}  # fmt: skip
#: The encoder, which the decoder alone lacks, has other sizes.
_BART = _SMALL | {
    "d_model": 32, "encoder_layers": 4, "encoder_attention_heads": 2, "decoder_layers": 3,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_NO_ROW = {"neurons", "after_attention", "attention_output", "mlp_output"}
#: Type → (architecture, config, blocks whose attention is seen).
UNKNOWN = {
    "glm": ("GlmForCausalLM", _GLM, (1, 2, 3)),
    # Values of another width than keys.
    "youtu": ("YoutuForCausalLM", _LATENT, (1, 2, 3)),
    # Its class hands on that no cache is wanted, without naming it; with one these blocks fail.
    "granite": ("GraniteMoeHybridForCausalLM", _GRANITE, ()),
    # Its blocks return lists.
    "openai-gpt": ("OpenAIGPTLMHeadModel", _SMALL | _FIRST_GPT, ()),
    "mamba": ("MambaForCausalLM", _SMALL | _MAMBA, ()),
    # They run through the interface and do not declare it.
    "bamba": ("BambaForCausalLM", _GLM | _MAMBA_2 | {"attn_layer_indices": [1]}, (2,)),
    "falcon_h1": ("FalconH1ForCausalLM", _GLM | _MAMBA_2 | {"mamba_d_ssm": 64}, (1, 2, 3)),
    "biogpt": ("BioGptForCausalLM", _GLM | {"max_position_embeddings": 64}, (1, 2, 3)),
    "bart": ("BartForCausalLM", _BART, (1, 2, 3)),
}


@pytest.fixture
def unknown_model(enliven):
    """``unknown_model(name)``: the model, and the blocks whose attention is seen."""

    def build(name):
        architecture, config, attending = UNKNOWN[name]
        kind = getattr(transformers, architecture)
        return enliven(kind(kind.config_class(**config))), attending

    return build


#: Type → (architecture, config, what its shape is not).
OF_OTHER_SHAPES = {
    "positions of its own": (
        "CpmAntForCausalLM", {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8,
        "dim_ff": 48, "num_hidden_layers": 2}, "the embedding gives [1, 52, 32] where its config says [1, 20, 32]",
    ),
    "sequences behind tokens": (
        "XLNetLMHeadModel", {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        "the embedding gives [20, 1, 32] where its config says [1, 20, 32]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OTHER_SHAPES)
def test_a_residual_stream_of_another_shape_is_refused_by_name(name):
    architecture, config, why = OF_OTHER_SHAPES[name]
    kind = getattr(transformers, architecture)
    with pytest.raises(UsageError, match=re.escape(f"model is not measured: {why}")):
        measure(HFModel(kind(kind.config_class(**config)).eval()), PROBE)


def test_a_masked_language_model_is_refused_by_name():
    """Its queries see every key: the level of uniform attention is that of causal models."""
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(UsageError, match=r"^BertForMaskedLM is not measured: it fills masked tokens, and sinks"):
        HFModel(transformers.BertForMaskedLM(config))
    config.is_decoder = True
    assert "attention" not in {unseen.place for unseen in HFModel(transformers.BertLMHeadModel(config)).unseen()}


def test_a_map_between_final_states_and_head_is_refused_by_name(tmp_path):
    config = transformers.ElectraConfig(
        vocab_size=61, embedding_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, is_decoder=True,
    )  # fmt: skip
    model = HFModel(transformers.ElectraForCausalLM(config).eval())
    with pytest.raises(UsageError, match=r"^this electra's logits are no linear map of its final states, so they"):
        read_model("electra", model, PROBE, tmp_path, batch_size=4, minibatch=9)


def test_heads_and_logits_that_the_config_does_not_tell_are_refused_by_name(unknown_model):
    def uneven(config):
        raise RuntimeError("'head_dim' is a per-layer attribute")

    model, _ = unknown_model("glm")
    model.config.vocab_size = 60
    with pytest.raises(UsageError, match=r"its head gives \[1, 20, 61\] where its config says \[1, 20, 60\]"):
        measure(HFModel(model), PROBE % 60)
    heads, model.config.vocab_size = model.config.num_attention_heads, 61
    model.config.num_attention_heads = heads // 2
    with pytest.raises(UsageError, match=rf"^block 1 has {heads} heads of width .* config says {heads // 2} of"):
        measure(HFModel(model), PROBE)
    config = type(model.config)
    model.config.__class__ = type(config.__name__, (config,), {"head_dim": property(uneven)})
    with pytest.raises(UsageError, match=r"^this glm model is not measured: 'head_dim' is a per-layer attribute$"):
        HFModel(model)


@pytest.mark.parametrize("name", UNKNOWN)
def test_of_any_other_model_the_residual_stream_is_measured_and_the_rest_is_named(name, unknown_model):
    model, attending = unknown_model(name)
    hf_model, tokens = HFModel(model), torch.from_numpy(PROBE)
    found = measure(hf_model, PROBE, batch_size=4)
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True, use_cache=False)
    # Mamba's list begins behind the first block.
    for layer, h in enumerate(output.hidden_states[:3], start=name == "mamba"):
        assert found.arrays["inter_mlp"][layer] == pytest.approx(inter(h), abs=1e-5)
    p = output.logits[:, -1].double().softmax(-1).mean(0)
    np.testing.assert_allclose(found.arrays["mean_prob"], p.numpy(), rtol=1e-4)
    others = tuple(layer for layer in (1, 2, 3) if layer not in attending)
    unseen = dict.fromkeys(_NO_ROW, (1, 2, 3)) | ({"attention": others} if others else {})
    assert {place.place: place.layers for place in hf_model.unseen()} == unseen
    assert len(found.unseen) == len(unseen)
    assert sum("of blocks 1–3 (" in sentence for sentence in found.unseen) == len(unseen) - (others == (1, 3))
    assert ("sink_mass" in found.scalars) == bool(attending)
    assert "super_neurons" not in found.scalars
    assert np.isnan(found.arrays["inter_attention"]).all()
    assert np.isfinite(list(found.scalars.values())).all()
    if attending:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            weights = [w for w in model(tokens, output_attentions=True).attentions if w is not None]
        rows = [layer - 1 for layer in attending]
        mass = torch.stack([w[:, :, 1:, 0].mean((0, 2)) for w in weights])
        np.testing.assert_allclose(found.arrays["sink_mass"][rows], mass.numpy(), atol=1e-5)
        n_eff = torch.stack([(1 / w.square().sum(-1)).mean(0) for w in weights])
        np.testing.assert_allclose(found.arrays["n_eff"][rows], n_eff.numpy(), rtol=1e-4)


class OfLists(transformers.PreTrainedModel):
    """A language model of a user: a list of norms lies before the list of maps that read the stream."""

    class config_class(transformers.PretrainedConfig):  # noqa: N801, the library's name
        model_type = "of_lists"

    def __init__(self, config):
        super().__init__(config)
        self.table, self.head = nn.Embedding(61, 8), nn.Linear(8, 61)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.maps = nn.ModuleList(Added(8, 8) for _ in range(3))
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.head

    def get_decoder(self):
        return self

    def forward(self, input_ids):
        self.stream = [self.table(input_ids)]
        for _ in range(1 + (self.config.way == "looped")):
            for norm, block in zip(self.norms, self.maps, strict=True):
                x = self.stream[-1]
                self.stream.append(x + block(norm(x)) if self.config.way == "parallel" else block(x, norm))
        return SimpleNamespace(logits=self.head(self.stream[-1]))


class Added(nn.Linear):
    """A linear map, added to its input if that is normed here."""

    def forward(self, x, norm=None):
        return super().forward(x) if norm is None else x + super().forward(norm(x))


def test_the_blocks_are_the_modules_that_hand_the_stream_on(enliven):
    sizes = {"vocab_size": 61, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = enliven(OfLists(OfLists.config_class(**sizes, way="blocks")))
    found = measure(HFModel(model), PROBE, batch_size=9).arrays["inter_mlp"]
    model(torch.from_numpy(PROBE))
    np.testing.assert_allclose(found, [inter(h) for h in model.stream], atol=1e-6)
    for way, why in (("parallel", "none reads what another gives"), ("looped", "it calls one of its blocks more than")):
        model.config.way = way
        with pytest.raises(UsageError, match=rf"^this of_lists model is not measured: in no list of 3 .*\({why}"):
            measure(HFModel(model), PROBE)
    xlm = transformers.XLMConfig(n_words=61, emb_dim=16, n_layers=2, n_heads=2, causal=True)
    with pytest.raises(UsageError, match=r"^this xlm model is not measured: in no list of 2 modules does the output"):
        measure(HFModel(transformers.XLMWithLMHeadModel(xlm)), PROBE)


@pytest.mark.parametrize("fault", ["another attention", "an attention that is looked up elsewhere"])
def test_an_attention_that_cannot_be_observed_is_named_with_its_reason(fault, unknown_model, monkeypatch):
    model, _ = unknown_model("glm")
    attention = model.model.layers[0].self_attn
    first = attention.forward

    def forward(*args, **kwargs):
        if fault == "another attention":
            attention.scaling = 0.1 if attention.config._attn_implementation == "birthmark" else 1.0
        else:
            {"sdpa": first}[attention.config._attn_implementation]
        return first(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", forward)
    found = measure(HFModel(model), PROBE)
    assert "sink_mass" not in found.scalars
    assert np.isfinite(found.scalars["preference_ratio"])
    reason = (
        "observed, it differs after the attention of block 1, by "
        if fault == "another attention"
        else "it fails in Birthmark's place: KeyError: 'birthmark'"
    )
    assert f"the attention of blocks 1–3 ({reason}" in found.unseen[0]


def test_outputs_behind_a_fixed_token_vary_where_queries_see_later_ones(family_model):
    """The first position's variance is 0 in a causal model alone."""
    probe = PROBE.copy()
    probe[:, 0] = 7
    for is_bidirectional in (False, True):
        model = HFModel(family_model("gemma3_text", use_bidirectional_attention=is_bidirectional).eval())
        found = measure(model, probe, batch_size=4).arrays["positional_variance"]
        with torch.no_grad():
            model(torch.from_numpy(probe), observer=(seen := Seen()))
        wanted = torch.stack([seen.attended[layer].o_BHTK.double().var(0).mean(-1) for layer in (1, 2)])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-9)
        assert (found[:, :, 0] > 1e-6).all() == is_bidirectional
