"""A real, trained model from its GGUF file against eager transformers; controls of the study of real models."""

import functools
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

from birthmark.data.probes import random_probe
from birthmark.measure.config import SnapshotConfig
from birthmark.models.config import ModelConfig
from birthmark.research.real_models.ablations import ABLATIONS, N_CONTROLS, Suspect, _Setting, _summary
from birthmark.research.real_models.released_lock import read_lock
from birthmark.research.real_models.variants import VARIANTS
from birthmark.trainer.by_name.loaded_model import load_named, measure_loaded


@torch.no_grad()
@pytest.mark.heavy
def test_a_snapshot_of_smollm2_is_that_of_eager_transformers(smollm2, monkeypatch):
    loaded = load_named(str(smollm2))
    found = measure_loaded(loaded, SnapshotConfig(n_sequences=4, seq_len=33, batch_size=2))
    tokens_BT = torch.from_numpy(random_probe(loaded.model.config.vocab_size, 4, 33, 0))
    # The library dequantises by itself. It makes this table for every module.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    eager = transformers.LlamaForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    )
    passed = eager(tokens_BT, output_attentions=True)
    mean_prob_V = passed.logits[:, -1].softmax(-1).double().mean(0)
    torch.testing.assert_close(torch.from_numpy(found.arrays["mean_prob"]).double(), mean_prob_V, atol=1e-6, rtol=1e-3)
    for layer, weights_BHTT in enumerate(passed.attentions):
        mass_H = weights_BHTT[:, :, 1:, 0].double().mean((0, 2))
        np.testing.assert_allclose(found.arrays["sink_mass"][layer], mass_H.numpy(), atol=1e-6, rtol=0)
    # Heads of the later blocks park on the first key.
    assert found.arrays["sink_mass"].max() > 0.9
    assert found.summary["stored_kinds"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}


# ---------------------------------------------------------------- controls of their study, and changed copies


def test_controls_are_others_of_the_same_kind():
    at = _Setting(ModelConfig(d_model=32, n_layers=4, d_ff=64), Suspect(3, (7, 9), (2, 3), (1, 5, 7, 9), 11), 64)
    for name, plan in ABLATIONS.items():
        what, controls = plan(at)
        what.check(at.config, at.seq_len)
        assert len({(c.units, c.channels, c.positions) for c in controls}) == N_CONTROLS
        for control in controls:
            control.check(at.config, at.seq_len)
            assert (control.kind, control.layers, control.fill) == (what.kind, what.layers, what.fill)
            assert not {1, 5, 7, 9} & set(control.units) or what.kind != "ablate_unit"
            assert 11 not in control.channels
            assert 0 not in control.positions
            assert len(control.units) == len(what.units)
        assert plan(at)[1] == controls, name


def test_an_ablation_is_held_against_the_largest_control():
    def figures(after, loss):
        return {"key_0": [0.5, after], "key_0_in_later_blocks": [0.6, after], "loss_increase": [loss, 0.1]}

    found = _summary(figures(0.1, 1.0), [figures(0.4, -2.0), figures(0.5, 0.1), figures(0.45, 0.2)])
    assert np.isclose([found["key_0"][k] for k in ("change", "median", "largest")], [0.4, 0.05, 0.1]).all()
    assert found["key_0"]["as_large"] == 0
    assert found["loss"] == {"change": 1.0, "median": 0.2, "largest": 2.0, "as_large": 1}


def test_copies_change_matrices_alone():
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.inner, model.head = torch.nn.Linear(20, 10), torch.nn.Linear(10, 3)
    model.get_decoder = lambda: SimpleNamespace(modules=lambda: [model.inner])
    before, head = model.inner.weight.detach().clone(), model.head.weight.detach().clone()
    VARIANTS["pruned"].change(model, None, None)
    pruned = model.inner.weight.detach()
    assert (pruned == 0).sum() == 60
    assert before[pruned == 0].abs().max() < before[pruned != 0].abs().min()
    assert torch.equal(pruned[pruned != 0], before[pruned != 0])
    VARIANTS["w4"].change(model, None, None)
    assert all(len(row.unique()) <= 15 for row in model.inner.weight.detach())
    assert torch.equal(model.head.weight.detach(), head)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_released_lock_is_the_notebooks_formula(family):
    """Against whole products in numpy, from the model's weights and states alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 6, "vocab_size": 20, "max_position_embeddings": 16}
    decoder = AutoModel.from_config(AutoConfig.for_model(family, **sizes), attn_implementation="eager").eval()
    for p in decoder.parameters():
        p.data += 0.2 * torch.randn_like(p)
    tokens_NT, channel = torch.randint(0, 20, (3, 9)), 5
    found = read_lock(decoder, tokens_NT, channel)
    states = decoder(tokens_NT, output_hidden_states=True).hidden_states
    for layer, block in enumerate(decoder.layers):
        x = block.input_layernorm(states[layer]).detach().double().numpy()
        size = np.abs(x[:, 0])
        dominance = size[:, channel].mean() / np.delete(size, channel, 1).mean(1).mean()
        assert np.isclose(found["dominance"][layer], dominance)
        for head in range(4):
            rows, group = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
            w_q = block.self_attn.q_proj.weight[rows].detach().double().numpy()
            k = block.self_attn.k_proj.weight[group, channel].detach().double().numpy()
            first = np.linalg.svd(w_q)[0][:, 0]
            assert np.isclose(found["lock"][layer][head], abs(first @ k) / np.linalg.norm(k), rtol=1e-4)
            assert np.isclose(found["positive"][layer][head], ((x[:, 1:] @ w_q.T @ k) > 0).mean())
