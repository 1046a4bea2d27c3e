"""The backward snapshot against autograd on whole graphs in float64, one sequence at a time."""

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from birthmark.data.probes import random_probe
from birthmark.errors import RunError, UsageError
from birthmark.measure.config import SnapshotConfig
from birthmark.measure.gradients import measure_gradients
from birthmark.measure.hf import HFModel
from birthmark.metrics.declarations.outliers_and_gradients import GRADIENTS
from birthmark.metrics.gradient_norms import GradientNorms, first_over_others
from birthmark.models.birth import born
from birthmark.models.config import AttentionConfig, CalibrationConfig, ModelConfig
from birthmark.models.exchange.pretrained import load_pretrained

transformers.logging.set_verbosity_error()

N, T, L, H = 3, 10, 2, 4
PROBE = random_probe(61, N, T, 0)
PLAIN = ModelConfig(d_model=32, n_layers=L, n_heads=H, n_kv_heads=2, vocab_size=61, max_seq_len=T)
CONFIGS = {
    "plain": PLAIN,
    "head norm, learned, tied, capped, gelu": replace(
        PLAIN, attention=AttentionConfig("headnorm"), positions="learned", tie_embeddings=True, logit_softcap=3.0,
        mlp="gelu",
    ),
    "prefix, t5, parallel": replace(
        PLAIN, attention=AttentionConfig(prefix=4), positions="t5", parallel_residual=True, n_kv_heads=H
    ),
    "correlated, learned sink": replace(PLAIN, attention=AttentionConfig(
        "calibrated", normaliser="softmax_sink", calibration=CalibrationConfig(correlation="estimated")
    )),
    "sigmoid, alibi": replace(PLAIN, attention=AttentionConfig(normaliser="sigmoid"), positions="alibi"),
}  # fmt: skip


class Kept:
    """An observer whose tensors keep their gradients."""

    def __init__(self):
        self.mlp, self.attended, self.heads = [], [], []

    def residual(self, site, layer, h_BTD):
        h_BTD.retain_grad()
        (self.attended if site == "attention" else self.mlp).append(h_BTD)

    def attention(self, layer, attended):
        self.heads.append((attended.q_BHTK, attended.k_BHTK, attended.v_BHTK))
        for x in self.heads[-1]:
            x.retain_grad()

    def neurons(self, layer, a_BTF):
        pass


def slowly(model, first_target=1):
    """The same norms from the graph of the whole model, and the loss."""
    model = copy.deepcopy(model).double().requires_grad_(True)
    losses, found = [], []
    for tokens in torch.from_numpy(PROBE)[:, None]:
        kept = Kept()
        logits = model(tokens[:, :-1], observer=kept)[0, first_target - 1 :]
        loss = F.cross_entropy(logits, tokens[0, first_target:])
        loss.backward()
        norms = [torch.stack([x.grad[0].norm(dim=-1) for x in xs]) for xs in (kept.mlp, kept.attended)]
        norms += [torch.stack([x.grad[0].norm(dim=-1) for x in xs]) for xs in zip(*kept.heads, strict=True)]
        losses.append(loss.item())
        found.append(norms)
    names = ("mlp", "attention", "query", "key", "value")
    means = (torch.stack(of_sequences).mean(0).numpy() for of_sequences in zip(*found, strict=True))
    return dict(zip(names, means, strict=True)), np.mean(losses)


def assert_alike(found, expected, loss, rtol):
    assert found.scalars["gradient_loss"] == pytest.approx(loss, rel=rtol)
    for name, norms in expected.items():
        array = found.arrays[f"gradient_{name}"]
        np.testing.assert_allclose(array[..., :-1], norms, rtol=rtol, atol=rtol * norms.max(), err_msg=name)
        assert np.isnan(array[..., -1]).all()
    for name, of in (("gradient_sink", "mlp"), ("gradient_sink_key", "key"), ("gradient_sink_value", "value")):
        ratio = expected[of][..., 0] / expected[of][..., 1:].mean(-1)
        np.testing.assert_allclose(found.arrays[name], ratio, rtol=20 * rtol)
        reduced = ratio.max() if name == "gradient_sink" else ratio.mean()
        assert found.scalars[name] == pytest.approx(reduced, rel=20 * rtol)


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_are_those_of_the_whole_graph(name, enliven):
    config = CONFIGS[name]
    model = enliven(born(config, 0))
    expected, loss = slowly(model, config.attention.prefix or 1)
    assert_alike(measure_gradients(copy.deepcopy(model).double(), PROBE, batch_size=2), expected, loss, 1e-9)
    found = measure_gradients(model, PROBE, batch_size=3)
    assert_alike(found, expected, loss, 2e-4)
    assert set(found.arrays) == {q.name for q in GRADIENTS if q.has_array}
    assert set(found.scalars) == {q.name for q in GRADIENTS if q.has_scalar}


def of_theirs(model, attn, split):
    """The same of a model of transformers, by hooks that retain gradients on an eager copy in float64.

    Rotations leave norms as they are: those of projections are those of queries and keys.
    """
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    kept = {}

    def keep(name):
        def hook(module, inputs, output):
            x = output[0] if isinstance(output, (tuple, list)) else output
            x.retain_grad()
            kept[name] = x

        return hook

    for i, block in enumerate(blocks):
        block.register_forward_hook(keep(("mlp", i + 1)))
        getattr(block, attn).register_forward_hook(keep(("attention", i)))
        for name, module in split(getattr(block, attn)).items():
            module.register_forward_hook(keep((name, i)))
    blocks[0].register_forward_pre_hook(lambda m, args, kwargs: keep(("mlp", 0))(m, (), (*args, *kwargs.values())[0]),
                                        with_kwargs=True)  # fmt: skip
    sums = {}
    for tokens in torch.from_numpy(PROBE)[:, None]:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
        F.cross_entropy(logits, tokens[0, 1:]).backward()
        for key, x in kept.items():
            g = x.grad[0]
            named = {key: g}
            if key[0] == "qkv":
                named = dict(zip([(n, key[1]) for n in ("query", "key", "value")], g.chunk(3, -1), strict=True))
            for (name, i), part in named.items():
                heads = name in ("query", "key", "value")
                norms = (part.unflatten(-1, (H, -1)).transpose(0, 1) if heads else part).norm(dim=-1).numpy() / N
                sums[name, i] = sums.get((name, i), 0) + norms
    of_place = {name: [sums[key] for key in sorted(sums) if key[0] == name] for name, _ in sums}
    return {name: np.stack(norms) for name, norms in of_place.items()}


@pytest.mark.parametrize(
    ("name", "attn", "split"),
    [
        ("gpt2", "attn", lambda attn: {"qkv": attn.c_attn}),
        ("llama", "self_attn", lambda attn: {"query": attn.q_proj, "key": attn.k_proj, "value": attn.v_proj}),
    ],
    ids=["gpt2", "llama"],
)
def test_of_models_of_transformers_too(name, attn, split, their_model, their_shape, enliven):
    if name == "llama":  # without groups: a projection has the gradient of all heads that share it
        config = transformers.LlamaConfig(**their_shape | {"num_key_value_heads": H})
        theirs = enliven(transformers.LlamaForCausalLM(config))
    else:
        theirs = their_model(name)
    expected = of_theirs(theirs, attn, split)
    before = {key: x.clone() for key, x in theirs.state_dict().items()}
    # Frozen parameters, as of adapters, cut no graph.
    next(theirs.parameters()).requires_grad_(False)
    found = measure_gradients(HFModel(theirs), PROBE, batch_size=2)
    for place, norms in expected.items():
        array = found.arrays[f"gradient_{place}"][..., :-1]
        np.testing.assert_allclose(array, norms, rtol=2e-4, atol=1e-5 * norms.max(), err_msg=place)
    assert all(p.grad is None for p in theirs.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in theirs.modules())
    assert all(torch.equal(x, before[key]) for key, x in theirs.state_dict().items())


def test_heads_that_share_keys_have_the_gradients_of_our_own_decoder(their_model, tmp_path):
    theirs = their_model("llama")
    theirs.save_pretrained(tmp_path)
    ours, found = (measure_gradients(model, PROBE) for model in (load_pretrained(tmp_path), HFModel(theirs)))
    assert found.arrays.keys() == ours.arrays.keys()
    for name, array in ours.arrays.items():
        atol = 1e-5 * np.nanmax(array)
        np.testing.assert_allclose(found.arrays[name], array, rtol=1e-3, atol=atol, err_msg=name)


def test_the_model_and_random_numbers_are_left_alone():
    config = CONFIGS["correlated, learned sink"]
    model = born(config, 0).train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state, before = torch.get_rng_state(), {key: x.clone() for key, x in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_gradients(model, PROBE, batch_size=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert versions == [p._version for p in model.parameters()]
    assert all((p.grad == 1).all() and p.requires_grad for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_broken_gradient_is_named_by_its_place():
    model = born(PLAIN, 0)
    with torch.no_grad():
        model.blocks[0].attn.v.weight[3, 3] = float("inf")
    with pytest.raises(RunError, match=r"the loss gradient is NaN or inf, first by the residual stream after block 2"):
        measure_gradients(model, PROBE, batch_size=4)


def test_a_model_may_scale_its_embeddings_in_place(enliven):
    """Torch forbids that to the tensor that begins a graph."""
    config = transformers.CTRLConfig(vocab_size=61, n_embd=32, n_layer=L, n_head=H, n_positions=T, dff=48)
    theirs = enliven(transformers.CTRLLMHeadModel(config))
    expected = of_theirs(theirs, "multi_head_attention", lambda attn: {})["mlp"]
    found = measure_gradients(HFModel(theirs), PROBE, batch_size=2).arrays["gradient_mlp"][..., :-1]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-5 * expected.max())


def test_sharded_parameters_of_transformers_are_refused(their_model):
    model = their_model("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(UsageError, match="llama model are sharded over ranks, and its gradients cannot"):
        measure_gradients(HFModel(model), PROBE)


def test_two_positions_are_too_few():
    assert SnapshotConfig(seq_len=2).problems() == []
    (problem,) = SnapshotConfig(seq_len=2, gradients=True).problems()
    assert problem.startswith("snapshot.seq_len is 2: snapshot.gradients compares position 0")


# ---------------------------------------------------------------- the metric: what is unseen, broken or zero


def test_a_layer_without_attention_is_nan_and_a_broken_gradient_inf():
    metric = GradientNorms(L, H, T)
    metric.update(torch.tensor(2.0), 1)
    for layer in range(L + 1):
        metric.after_mlp(layer, torch.full((1, T - 1, 8), float("nan") if layer == 1 else 1.0))
    found = metric.compute()
    assert np.isinf(found.mlp[1, :-1]).all()
    assert np.isfinite(found.mlp[[0, 2], :-1]).all()
    assert np.isnan(found.heads["key"]).all()
    assert np.isnan(found.attention).all()


@pytest.mark.parametrize(("norms", "ratio"), [([4, 1, 3], 2), ([0, 0, 0], 1), ([0, 1, 1], 0), ([3, 0, 0], np.inf)])
def test_the_first_over_the_mean_of_the_others(norms, ratio):
    assert first_over_others(np.array([*norms, np.nan], dtype=float)) == ratio


def test_in_inference_mode_they_are_what_they_are_outside():
    shape = {"vocab_size": 61, "n_positions": T, "n_embd": 16, "n_layer": 2, "n_head": 2}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    for made in (born(PLAIN, 0), HFModel(theirs)):
        alone = measure_gradients(made, PROBE)
        with torch.inference_mode():
            assert measure_gradients(made, PROBE).scalars == alone.scalars
    with torch.inference_mode():
        made = born(PLAIN, 0)
    with pytest.raises(UsageError, match=r"^gradients: the model was made in torch\.inference_mode"):
        measure_gradients(made, PROBE)
