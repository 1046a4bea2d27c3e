"""Interventions against a forward pass written out, with the explicit matrix of weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.launch.cli import main
from birthmark.measure.interventions import intervene
from birthmark.models.attention.rotation import rotate
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, ModelConfig

CONFIG = ModelConfig(d_model=16, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=32, max_seq_len=12)
PROBE = random_probe(32, 9, 12, 0)


def living(config=CONFIG):
    """A model that attends to some tokens more than to others."""
    model = born(config, 0).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


@torch.no_grad()
def explicit(model, change, masked=None):
    """Weights ``[L, B, H, T, T]``, and what the blocks aggregate; ``masked`` = (layer, position) sees itself only."""
    tokens = torch.from_numpy(PROBE)
    x, place = model.embed(tokens), model.positions.place(12, tokens.device)
    all_weights, outputs = [], []
    for layer, block in enumerate(model.blocks, start=1):
        attn, y = block.attn, block.norm_attn(x)
        q, k, v = rotate(attn.q(y), place.rotation), rotate(attn.k(y), place.rotation), attn.v(y)
        k, v = (z.repeat_interleave(2, dim=1) for z in (k, v))
        seen = torch.ones(12, 12, dtype=torch.bool).tril()
        if masked is not None and masked[0] == layer:
            seen[masked[1]] = False
            seen[masked[1], masked[1]] = True
        weights = (q @ k.mT / 2).masked_fill(~seen, -torch.inf).softmax(-1)
        o = change(layer, weights @ v)
        if model.config.attention.aggregation == "headnorm":
            o = torch.nn.functional.rms_norm(o, (4,), attn.aggregate.gain, attn.aggregate.eps)
        x = x + attn.o(o.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm_mlp(x))
        all_weights.append(weights)
        outputs.append(o)
    return torch.stack(all_weights), outputs


def importance(weights, layer, position):
    return weights[layer:, :, :, position:, position].mean((1, 3)).numpy()


@pytest.mark.heavy
@pytest.mark.parametrize("aggregation", ["plain", "headnorm"])
@pytest.mark.parametrize(("layer", "position"), [(1, 0), (1, 5), (2, 11)])
@pytest.mark.parametrize("kind", ["mask", "amplify", "scale"])
def test_an_intervention_does_what_its_definition_says(kind, layer, position, aggregation):
    model = living(replace(CONFIG, attention=AttentionConfig(aggregation=aggregation)))
    # After the first block, what enters the second is as it was: the mean is that of the pass that is left alone.
    means = {}

    def keep(at, o):
        means[at] = o.mean((0, 2))
        return o

    explicit(model, keep)
    lambdas = [0.0, 1.0, 4.0]
    found = intervene(model, PROBE, kind, layer, position, lambdas, batch_size=4)
    assert found.importance.shape == (2 if kind == "mask" else 3, 3 - layer, 4)
    for dose, row in zip(found.lambdas, found.importance, strict=True):

        def change(at, o, dose=dose):
            if at != layer or kind == "mask":
                return o
            centre = means[layer] if kind == "amplify" else 0
            o = o.clone()
            o[:, :, position] = centre + dose * (o[:, :, position] - centre)
            return o

        masked = (layer, position) if kind == "mask" and dose else None
        expected = importance(explicit(model, change, masked)[0], layer, position)
        # Rotary angles are float32 in both; all else is float64.
        np.testing.assert_allclose(row, expected, atol=1e-9)
    assert found.uniform == pytest.approx(np.mean([1 / (t + 1) for t in range(position, 12)]))


def test_dose_one_is_the_model_itself_and_others_are_not():
    model = living()
    plain = importance(explicit(model, lambda at, o: o)[0], 1, 4)
    for kind in ("amplify", "scale"):
        found = intervene(model, PROBE, kind, 1, 4, [1, 8])
        np.testing.assert_allclose(found.importance[0], plain, atol=1e-9)
        assert np.abs(found.importance[1] - plain).max() > 0.01


def test_nothing_is_left_behind():
    model = living().train()
    tokens = torch.from_numpy(PROBE)
    before = model(tokens).detach(), [len(m._forward_pre_hooks) for m in model.modules()]
    intervene(model, PROBE, "amplify", 1, 3)
    assert all(m.training for m in model.modules())
    assert torch.equal(model(tokens), before[0])
    assert [len(m._forward_pre_hooks) for m in model.modules()] == before[1]


@pytest.mark.parametrize(
    ("changes", "arguments", "match"),
    [
        ({}, ("mask", 3, 0), "layer 3: give 1 to 2"),
        ({}, ("mask", 0, 0), "layer 0: give 1 to 2"),
        ({}, ("scale", 1, 12), "position 12: give 0 to 11"),
        ({}, ("scale", 1, 0, []), "give one lambda"),
        ({}, ("scale", 1, 0, [1.0, float("nan")]), "lambda nan: give a finite number"),
        ({}, ("break", 1, 0), "give one of mask, amplify, scale"),
        ({"normaliser": "sigmoid"}, ("mask", 1, 0), "no plain softmax"),
        ({"aggregation": "calibrated"}, ("mask", 1, 0), "calibrated by its weights"),
    ],
)
def test_what_is_impossible_is_said(changes, arguments, match):
    with pytest.raises(UsageError, match=match):
        intervene(living(replace(CONFIG, attention=AttentionConfig(**changes))), PROBE, *arguments)


@pytest.mark.parametrize("aggregation", ["plain", "headnorm"])
def test_a_dose_too_large_for_float32_and_a_broken_model_are_named(aggregation):
    """At 1e20 every state is finite; its squares are not, and a norm makes zeros of it."""
    model = living(replace(CONFIG, attention=AttentionConfig(aggregation))).float()
    for dose in (1e20, 1e39):
        with pytest.raises(RunError, match=rf"lambda {re.escape(f'{dose:g}')}: .* give a smaller one"):
            intervene(model, PROBE, "scale", 1, 2, [1.0, dose])
    with torch.no_grad():
        model.blocks[0].attn.v.weight[0, 0] = torch.nan
    for kind in ("mask", "amplify", "scale"):
        with pytest.raises(RunError, match="the model gives NaN or inf"):
            intervene(model, PROBE, kind, 1, 2, [1.0])


def test_the_command_prints_a_table_or_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the picture goes to the working folder
    file = tmp_path / "small.yaml"
    shape = "model: {d_model: 16, n_layers: 3, n_heads: 2, vocab_size: 32, max_seq_len: 12}"
    file.write_text(f"{shape}\nsnapshot: {{seq_len: 12}}\n")
    command = ["intervene", f"{file}@3", "--layer=1", "--position=4", "--n_sequences=8", "--seq_len=12"]
    assert main([*command, "--kind=amplify", "--lambda=1,8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["lambdas"] == [1.0, 8.0]
    config = ModelConfig(d_model=16, n_layers=3, n_heads=2, vocab_size=32, max_seq_len=12)
    expected = intervene(born(config, 3), random_probe(32, 8, 12, 0), "amplify", 1, 4, [1, 8])
    np.testing.assert_allclose(printed["importance"], expected.importance, atol=1e-6)
    assert main([*command, "--kind=mask"]) == 0
    page = capsys.readouterr().out.splitlines()
    assert page[0].endswith("mask at block 1, position 4")
    assert page[1].split() == ["mask", "block", "2", "block", "3"]
    assert [line.split()[0] for line in page[3:5]] == ["off", "on"]
    for more, message in (
        (["--kind=mask", "--layer=3"], "--layer 3: give 1 to 2"),
        (["--kind=scale", "--lambda=1,x"], "--lambda 1,x: give numbers"),
        (["--kind=twist"], "twist"),
        (["--kind=mask", "--seq_len=null"], "seq_len: 'None' is not a whole number"),
    ):
        assert main([*command, *more]) == 2
        assert message in capsys.readouterr().err
