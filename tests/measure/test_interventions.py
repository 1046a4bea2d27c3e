"""Interventions against passes that are written out: of our decoder explicit, of others eager attention with hooks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import birthmark as bm
from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.findings.interventions import intervention_sentence
from birthmark.measure.hf import HFModel
from birthmark.measure.intervention_kinds import KINDS, Intervention
from birthmark.measure.interventions import intervene
from birthmark.models.attention import normalisers
from birthmark.models.attention.rotation import rotate
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ExpertsConfig, ModelConfig

transformers.logging.set_verbosity_error()

SIZES = {"d_model": 16, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "d_ff": 24, "vocab_size": 32, "max_seq_len": 12}
CONFIG = ModelConfig(**SIZES, mlp="swiglu")
PROBE, OTHER = random_probe(32, 9, 12, 0), random_probe(32, 7, 12, 1)

#: One intervention of every kind and form, on one block and on several.
WHATS = {
    "mask one block": Intervention("mask", (1,), (5,)),
    "mask all blocks": Intervention("mask", (1, 2, 3, 4), (3,)),
    "mask the first position": Intervention("mask", (2,), (0,)),
    "mask two positions": Intervention("mask", (1, 3), (4, 9)),
    "amplify one block": Intervention("amplify", (2,), (5,), lambdas=(0.0, 1.0, 4.0)),
    "amplify several": Intervention("amplify", (1, 2, 3), (5, 7), lambdas=(1.0, 3.0)),
    "amplify around values": Intervention("amplify", (1, 3), (10,), lambdas=(1.0, 4.0), around="values"),
    "scale": Intervention("scale", (1, 2), (5,), lambdas=(0.0, 1.0, 4.0)),
    "scale matched": Intervention("scale", (1, 2), (5,), lambdas=(1.0, 4.0), matched=True),
    "scale matched around values": Intervention("scale", (3,), (5,), lambdas=(4.0,), matched=True, around="values"),
    "ablate units": Intervention("ablate_unit", (2, 4), units=(3, 20)),
    "ablate a unit at a position": Intervention("ablate_unit", (1,), (4,), units=(3,)),
    "mean unit": Intervention("ablate_unit", (2,), units=(3,), fill="mean"),
    "ablate channels": Intervention("ablate_channel", (1, 2), channels=(7, 15)),
    "mean channel at a position": Intervention("ablate_channel", (3,), (2,), channels=(7,), fill="mean"),
    "ablate heads": Intervention("ablate_head", (1, 4), heads=(0, 3)),
    "mean head": Intervention("ablate_head", (2,), heads=(1,), fill="mean"),
    "ablate a value": Intervention("ablate_value", (1, 2, 3), (0,)),
    "mean value": Intervention("ablate_value", (2,), (0, 4), fill="mean"),
}


def living(config=CONFIG):
    """A model that attends to some tokens more than to others."""
    model = born(config, 0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


# ── the formulas ─────────────────────────────────────────────────────────────────────────────────────────────────────


def kept_to_itself(seen, what):
    """A mask ``[T, T]`` whose chosen queries see themselves only."""
    for k in what.positions:
        seen[k] = False
        seen[k, k] = True
    return seen


def new_output(what, dose, o, mean_outputs, mean_values):
    """What heads aggregate, ``[B, H, T, K]``, after a change that acts on it alone."""
    if what.kind not in ("amplify", "scale", "ablate_head"):
        return o
    o, before = o.clone(), o
    # The whole probe is one batch here: its mean is that of the blocks as they are changed.
    centre = mean_values if what.around == "values" else before.mean((0, 2))
    if what.kind == "ablate_head":
        at = list(what.positions) or slice(None)
        for head in what.heads:
            o[:, head, at] = mean_outputs[head] if what.fill else 0.0
        return o
    for k in what.positions:
        amplified = centre + dose * (before[:, :, k] - centre)
        if what.kind == "amplify":
            o[:, :, k] = amplified
    if what.kind == "scale":
        # All positions together: the factor is of a sequence.
        chosen = before[:, :, list(what.positions)]
        amplified = centre[:, None] + dose * (chosen - centre[:, None])
        factor = torch.full((len(o),), dose, dtype=o.dtype)
        if what.matched:
            factor = amplified.flatten(1).norm(dim=1) / chosen.flatten(1).norm(dim=1)
        for k in what.positions:
            o[:, :, k] = factor[:, None, None] * before[:, :, k]
    return o


def ablated(what, x, mean):
    """``[B, T, C]`` without the chosen entries."""
    x = x.clone()
    for index in (*what.units, *what.channels):
        for t in what.positions or range(x.shape[1]):
            x[:, t, index] = mean[index] if what.fill else 0.0
    return x


def figures_of(weights_LBHTT, states_LBTD, keys):
    """Attention on the keys and on key 0 by the queries after them; norms, channels and values of states."""
    to_key = torch.stack([weights_LBHTT[:, :, :, k + 1 :, k].mean((1, 3)) for k in keys], -1)
    to_first = torch.stack([weights_LBHTT[:, :, :, k + 1 :, 0].mean((1, 3)) for k in keys], -1)
    h_LBPD = states_LBTD[:, :, list(keys)]
    channel = h_LBPD.abs().mean(1).argmax(-1)
    value = h_LBPD.mean(1).gather(-1, channel[..., None])[..., 0]
    return to_key, to_first, h_LBPD.norm(dim=-1).mean(1), channel, value


def assert_same(figures, expected, loss_N, atol):
    names = ("attention", "attention_to_first", "state_norm", "channel", "channel_value")
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(getattr(figures, name), value.numpy(), atol=atol, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(figures.losses, loss_N.numpy(), atol=atol, rtol=1e-5)


def losses(logits, tokens):
    """Mean loss of every sequence."""
    chances = logits[:, :-1].softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return -chances.log().mean(1)


# ── our decoder ──────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def explicit(model, tokens, what=None, dose=1.0, means=None):
    """A forward pass with ``[T, T]`` matrices: weights, values, outputs, hidden units, states, logits."""
    x, place = model.embed(tokens), model.positions.place(12, tokens.device)
    found = {name: [] for name in ("weights", "values", "outputs", "units", "states")}
    for layer, block in enumerate(model.blocks, start=1):
        change = what is not None and layer in what.layers
        attn, y = block.attn, block.norm_attn(x)
        q, k, v = rotate(attn.q(y), place.rotation), rotate(attn.k(y), place.rotation), attn.v(y)
        k, v = (z.repeat_interleave(2, dim=1) for z in (k, v))
        seen = torch.ones(12, 12, dtype=torch.bool).tril()
        if change and what.kind == "mask":
            seen = kept_to_itself(seen, what)
        weights = (q @ k.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1)
        found["values"].append(v)
        if change and what.kind == "ablate_value":
            v = v.clone()
            for key in what.positions:
                v[:, :, key] = means["random values"][layer - 1] if what.fill else 0.0
        o = weights @ v
        found["outputs"].append(o)
        if change:
            o = new_output(what, dose, o, means["outputs"][layer - 1], means["random values"][layer - 1])
        if model.config.attention.aggregation == "headnorm":
            o = torch.nn.functional.rms_norm(o, (4,), attn.aggregate.gain, attn.aggregate.eps)
        x = x + attn.o(o.transpose(1, 2).flatten(2))
        mlp, y = block.mlp, block.norm_mlp(x)
        a = torch.nn.functional.silu(mlp.gate(y)) * mlp.up(y)
        found["units"].append(a)
        if change and what.units:
            a = ablated(what, a, means["units"][layer - 1])
        x = x + mlp.down(a)
        if change and what.channels:
            x = ablated(what, x, means["states"][layer - 1])
        found["weights"].append(weights)
        found["states"].append(x)
    return {name: torch.stack(parts) for name, parts in found.items()} | {"logits": model.leave(x)}


def means_of(passed, of_random):
    """Means of each block over sequences and positions; those of values of another probe."""
    found = {name: passed[name].mean((1, -2)) for name in ("outputs", "units", "states")}
    return found | {"random values": of_random["values"].mean((1, -2))}


@pytest.mark.heavy
@pytest.mark.parametrize("aggregation", ["plain", "headnorm"])
@pytest.mark.parametrize("name", WHATS)
def test_an_intervention_does_what_its_definition_says(name, aggregation, monkeypatch):
    monkeypatch.setattr(normalisers, "_QUERY_BLOCK", 5)  # the watched keys lie before, in and behind a block
    what = WHATS[name]
    model = living(replace(CONFIG, attention=AttentionConfig(aggregation=aggregation)))
    tokens = torch.from_numpy(PROBE)
    alone = explicit(model, tokens)
    means = means_of(alone, explicit(model, torch.from_numpy(OTHER)))
    found = intervene(model, PROBE, what, random_NT=OTHER, is_text=True, batch_size=4)
    assert [figures.dose for figures in found.passes] == [None, *what.doses]
    moved = []
    for figures in found.passes:
        passed = alone if figures.dose is None else explicit(model, tokens, what, figures.dose, means)
        expected = figures_of(passed["weights"], passed["states"], what.watched)
        # Rotary angles are float32 in both; all else is float64, but for the loss.
        assert_same(figures, expected, losses(passed["logits"], tokens), atol=2e-6)
        moved.append(float((passed["logits"] - alone["logits"]).abs().max()))
    assert moved[0] == 0
    # A query 0 that sees itself only is what it was, and head-wise norm undoes a common factor; else something moves.
    same = name == "mask the first position" or (aggregation == "headnorm" and what.matched)
    assert (max(moved) > 1e-2) != same
    uniform = [np.mean([1 / (t + 1) for t in range(k + 1, 12)]) for k in what.watched]
    np.testing.assert_allclose(found.uniform, uniform)


def test_a_matched_scale_gives_the_norm_of_amplify_and_the_direction_of_what_was():
    model = living()
    for around in (None, "values"):
        amplify = Intervention("amplify", (2,), (5,), lambdas=(8.0,), around=around)
        both = amplify, replace(amplify, kind="scale", matched=True)
        norms = [intervene(model, PROBE, what, random_NT=OTHER).passes[1] for what in both]
        for figures in norms:
            np.testing.assert_allclose(figures.norm_before[1], norms[0].norm_before[1])
            assert figures.norm_after[1] > 2 * figures.norm_before[1]
            np.testing.assert_allclose(figures.norm_after[1], norms[0].norm_after[1])
            assert np.isnan(np.delete(figures.norm_after, 1, axis=0)).all()
        # The direction decides the rest.
        assert np.abs(norms[0].attention - norms[1].attention).max() > 1e-3


def test_nothing_is_left_behind():
    model = living().train()
    tokens = torch.from_numpy(PROBE)

    def hooks():
        return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    before = model(tokens).detach(), hooks()
    for what in WHATS.values():
        intervene(model, PROBE, what)
    assert all(m.training for m in model.modules())
    assert torch.equal(model(tokens), before[0])
    assert hooks() == before[1]


# ── a model of transformers ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def gemma(family_model):
    """A small Gemma 3: two windowed blocks, two that see everything; norms around both halves of a block."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return family_model("gemma3_text", num_hidden_layers=4, layer_types=kinds).double()


@torch.no_grad()
def eager(model, tokens, what=None, dose=1.0, means=None):
    """A pass of eager attention, changed by hooks on its maps: what the oracle of our decoder gives."""
    handles, found = [], {name: {} for name in ("values", "outputs", "units", "states")}
    length = tokens.shape[1]

    def heads(x):  # [B, T, heads·K] → [B, 4, T, K]
        x = x.unflatten(-1, (-1, 12)).transpose(1, 2)
        return x.repeat_interleave(4 // x.shape[1], dim=1)

    for layer, block in enumerate(model.model.layers, start=1):
        change = what is not None and layer in what.layers

        def values(module, args, output, layer=layer, change=change):
            found["values"][layer] = heads(output)
            if change and what.kind == "ablate_value":
                output = output.unflatten(-1, (2, 12)).clone()
                for key in what.positions:
                    output[:, key] = means["random values"][layer - 1][::2] if what.fill else 0.0
                return output.flatten(-2)
            return None

        def outputs(module, args, layer=layer, change=change):
            o = heads(args[0])
            found["outputs"][layer] = o
            if not change:
                return None
            if what.kind == "mask":
                o = o.clone()
                for k in what.positions:
                    o[:, :, k] = found["values"][layer][:, :, k]
            o = new_output(what, dose, o, means["outputs"][layer - 1], means["random values"][layer - 1])
            return (o.transpose(1, 2).reshape(args[0].shape),)

        def units(module, args, layer=layer, change=change):
            found["units"][layer] = args[0]
            return (ablated(what, args[0], means["units"][layer - 1]),) if change and what.units else None

        def states(module, args, output, layer=layer, change=change):
            h = output[0] if isinstance(output, tuple) else output
            if change and what.channels:
                h = ablated(what, h, means["states"][layer - 1])
            found["states"][layer] = h
            return (h, *output[1:]) if isinstance(output, tuple) else h

        handles += [
            block.self_attn.v_proj.register_forward_hook(values),
            block.self_attn.o_proj.register_forward_pre_hook(outputs),
            block.mlp.down_proj.register_forward_pre_hook(units),
            block.register_forward_hook(states),
        ]
    try:
        output = model(tokens, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    parts = {name: torch.stack([x[i] for i in sorted(x)]) for name, x in found.items()}
    assert output.logits.shape[1] == length
    return parts | {"weights": torch.stack(output.attentions), "logits": output.logits}


@pytest.mark.heavy
@pytest.mark.parametrize("name", WHATS)
def test_a_model_of_transformers_is_changed_as_eager_attention_with_hooks_is(name, gemma):
    what, tokens = WHATS[name], torch.from_numpy(PROBE)
    alone = eager(gemma, tokens)
    means = means_of(alone, eager(gemma, torch.from_numpy(OTHER)))
    model = HFModel(gemma)
    found = intervene(model, PROBE, what, random_NT=OTHER, is_text=True, batch_size=4)
    for figures in found.passes:
        passed = alone if figures.dose is None else eager(gemma, tokens, what, figures.dose, means)
        weights = passed["weights"].clone()
        if what.kind == "mask" and figures.dose is not None:
            # Hooks change what a masked query gives, and leave its row of weights, which another position may read.
            for layer in what.layers:
                for k in what.positions:
                    weights[layer - 1, :, :, k] = torch.eye(12)[k]
        expected = figures_of(weights, passed["states"], what.watched)
        assert_same(figures, expected, losses(passed["logits"], tokens), atol=1e-5)
    assert model.change_attention is None


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3_next"])
def test_blocks_whose_units_are_not_seen_are_named(family, family_model):
    model = HFModel(family_model(family))
    line = r"units: the units of this model|layers 1: its hidden units cannot be changed"
    with pytest.raises(UsageError, match=line):
        intervene(model, random_probe(61, 4, 8, 0), Intervention("ablate_unit", (1,), units=(0,)))
    if family == "qwen3_next":  # its first block has no matrix of weights
        with pytest.raises(UsageError, match=r"layers 1: its attention cannot be changed \(.*\); give other blocks"):
            intervene(model, random_probe(61, 4, 8, 0), Intervention("scale", (1, 4), (2,)))


# ── what is impossible ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "what", "match"),
    [
        ({}, {"kind": "mask", "layers": (4,)}, "layers 4: is the last block; change one that has a block after it"),
        ({}, {"layers": (0,)}, "layers 0: this model has 4 blocks; give 1 to 4"),
        ({}, {"layers": (1, 40)}, "layers 40: this model has 4 blocks; give 1 to 4"),
        ({}, {"layers": ()}, "layers: give one block at least"),
        ({}, {"positions": (11,)}, "positions 11: the probe has 12, and queries must follow; give 0 to 10"),
        ({}, {"positions": (3, -1)}, "positions -1: the probe has 12"),
        ({}, {"positions": ()}, "positions: kind scale needs one"),
        ({}, {"lambdas": (1.0, float("nan"))}, "lambda nan: give a finite number"),
        ({}, {"kind": "break"}, "give one of mask, amplify, scale"),
        ({}, {"kind": "mask", "lambdas": (2.0,)}, "lambdas: kind mask does not read it, only amplify, scale; leave it"),
        ({}, {"kind": "amplify", "matched": True}, "matched: kind amplify does not read it, only scale"),
        ({}, {"around": "values"}, "around: scale reads it only where it is matched"),
        ({}, {"units": (1,)}, "units: kind scale does not read it, only ablate_unit"),
        ({}, {"kind": "ablate_unit"}, "units: kind ablate_unit needs one at least, from 0 to 23"),
        ({}, {"kind": "ablate_unit", "units": (24,)}, "units 24: a block has 24; give 0 to 23"),
        ({}, {"kind": "ablate_channel", "channels": (16,)}, "channels 16: a block has 16; give 0 to 15"),
        ({}, {"kind": "ablate_head", "heads": (4,)}, "heads 4: a block has 4; give 0 to 3"),
        ({}, {"kind": "ablate_value", "positions": ()}, "positions: kind ablate_value needs one"),
        ({"attention": {"normaliser": "sigmoid"}}, {"kind": "mask"}, "no plain softmax"),
        ({"attention": {"aggregation": "calibrated"}}, {"kind": "mask"}, "calibrated by its weights"),
        ({"experts": {"n_experts": 4}}, {"kind": "ablate_unit", "units": (1,)}, "layers 1: its"),
    ],
)
def test_what_is_impossible_is_said(changes, what, match):
    parts = {"attention": AttentionConfig, "experts": ExpertsConfig}
    config = replace(CONFIG, **{name: parts[name](**values) for name, values in changes.items()})
    asked = Intervention(**({"kind": "scale", "layers": (1,), "positions": (0,)} | what))
    with pytest.raises(UsageError, match=match):
        intervene(living(config), PROBE, asked)


def test_every_kind_is_tried():
    assert {what.kind for what in WHATS.values()} == set(KINDS)


@pytest.mark.parametrize("aggregation", ["plain", "headnorm"])
def test_a_dose_too_large_for_float32_and_a_broken_model_are_named(aggregation):
    """At 1e20 every state is finite; its squares are not, and a norm makes zeros of it."""
    model = living(replace(CONFIG, attention=AttentionConfig(aggregation))).float()
    for dose in (1e20, 1e39):
        with pytest.raises(RunError, match=r"lambda 1e\+(20|39): .* give a smaller one"):
            intervene(model, PROBE, Intervention("scale", (1,), (2,), lambdas=(1.0, dose)))
    with torch.no_grad():
        model.blocks[0].attn.v.weight[0, 0] = torch.nan
    for what in WHATS.values():
        with pytest.raises(RunError, match="the model gives NaN or inf"):
            intervene(model, PROBE, what)


# ── real models ──────────────────────────────────────────────────────────────────────────────────────────────────────


def masked_at_20(file, layers, **probe):
    """Attention to key 20 and to key 0, mean over blocks and heads, left alone and masked; and all that was found."""
    found = bm.intervene(file, "mask", layers=layers, positions=20, n_sequences=16, **probe).found
    return [(figures.attention.mean(), figures.attention_to_first.mean()) for figures in found.passes], found


@pytest.mark.slow
def test_a_key_that_sees_itself_only_becomes_a_sink_of_smollm2(smollm2):
    """Figures of plain PyTorch, written independently: T 64, 16 random sequences."""
    (alone, masked), found = masked_at_20(smollm2, range(1, 13))
    np.testing.assert_allclose([*alone, *masked], [0.009, 0.470, 0.256, 0.263], atol=0.01)
    assert found.passes[0].state_norm[11, 0] < 200
    assert found.passes[1].state_norm[11, 0] > 20_000
    assert found.passes[1].channel[11, 0] == 507
    assert intervention_sentence(found).startswith("A sink forms at 20")


@pytest.mark.slow
def test_a_key_that_sees_itself_only_becomes_none_of_gemma(gemma3):
    (alone, masked), found = masked_at_20(gemma3, "all", probe="bos")
    np.testing.assert_allclose([alone[0], *masked], [0.013, 0.003, 0.437], atol=0.01)
    assert intervention_sentence(found).startswith("No sink forms at 20")
