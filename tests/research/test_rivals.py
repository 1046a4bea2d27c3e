"""Rival fingerprints against numbers of their authors' released code, or where none is released the slow formula.

``released_code.json`` names the repositories and commits. The numbers were made by running their code on the inputs
of `inputs` below; nothing of it is here.
"""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from birthmark.data.probes import random_probe
from birthmark.measure.hf import HFModel
from birthmark.measure.hidden_states import FingerprintProbe
from birthmark.metrics.matched_weights import StreamWeights
from birthmark.metrics.seedprint import HiddenStates

RELEASED = json.loads((Path(__file__).parent / "released_code.json").read_text())
L, D, F, H, V, N, R = 4, 8, 12, 2, 16, 20, 30


def hashed(seed, *shape):
    """Numbers in (−1, 1) that no generator of random numbers decides."""
    index = np.arange(1, np.prod(shape) + 1, dtype=np.float64)
    return (2 * np.modf(np.abs(np.sin(12.9898 * index + 78.233 * seed)) * 43758.5453)[0] - 1).reshape(shape)


def unit_rows(x_LRF):
    """Units of one length over positions, for which the smallest distances are the largest cosines."""
    return x_LRF / np.linalg.norm(x_LRF, axis=1, keepdims=True)


SHAPES = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (F, D), "down": (D, F), "gate": (F, D)}


def inputs(kin):
    """Two models as arrays: the second is kin of the first, in another order of channels and units, or a stranger."""
    order_D, order_F = np.argsort(hashed(90, D)), np.argsort(hashed(91, F))
    signs_D = np.where(hashed(92, D) > 0, 1.0, -1.0)
    a = {
        "embed": hashed(1, V, D),
        "up_out": unit_rows(hashed(2, L, R, F)),
        "gate_out": unit_rows(hashed(3, L, R, F)),
        "states": hashed(4, N, D),
        "blocks": [{name: hashed(10 + 10 * i + j, *SHAPES[name]) for j, name in enumerate(SHAPES)} for i in range(L)],
    }
    noise = {
        "embed": hashed(101, V, D),
        "up_out": hashed(102, L, R, F),
        "gate_out": hashed(103, L, R, F),
        "states": hashed(104, N, D),
        "blocks": [{name: hashed(110 + 10 * i + j, *SHAPES[name]) for j, name in enumerate(SHAPES)} for i in range(L)],
    }
    if not kin:
        noise["up_out"], noise["gate_out"] = unit_rows(noise["up_out"]), unit_rows(noise["gate_out"])
        return a, noise

    def moved(name, x, y):
        x = x + 0.6 * y
        rows = {"up": order_F, "gate": order_F}.get(name, np.arange(len(x)))
        columns = order_F if name == "down" else np.arange(D) if name == "o" else order_D
        x = x[rows][:, columns]
        return x * signs_D if name in ("q", "k", "v", "embed") else x

    b = {
        "embed": moved("embed", a["embed"], noise["embed"]),
        "up_out": unit_rows(a["up_out"] + 0.1 * noise["up_out"])[:, :, order_F],
        "gate_out": unit_rows(a["gate_out"] + 0.1 * noise["gate_out"])[:, :, order_F],
        "states": a["states"] + 0.6 * noise["states"],
        "blocks": [
            {name: moved(name, x[name], y[name]) for name in SHAPES}
            for x, y in zip(a["blocks"], noise["blocks"], strict=True)
        ],
    }
    return a, b


@pytest.fixture(scope="module")
def bench():
    """``bench(name)``: a module of ``research/fingerprints``."""
    return lambda name: import_module(f"birthmark.research.fingerprints.{name}")


@pytest.fixture(scope="module")
def evidence(bench):
    """``evidence(model)``: those arrays as methods see a model."""
    module = bench("evidence")

    def made(model):
        parameters = {"embed": model["embed"]}
        parameters |= {f"{i}.{name}": x for i, block in enumerate(model["blocks"]) for name, x in block.items()}
        return module.Evidence(
            name="made",
            n_heads=H,
            embed_VD=model["embed"],
            blocks=tuple(module.Block(**block) for block in model["blocks"]),
            parameters=parameters,
            final=HiddenStates(model["states"]),
            states_LND=np.stack([model["states"]] * L),
            up_LRF=model["up_out"],
            gate_LRF=model["gate_out"],
            stream=StreamWeights({}, {}),
        )

    return made


@pytest.mark.parametrize("kind", ["kin", "stranger"])
def test_the_numbers_of_the_released_code(bench, evidence, kind):
    a, b = map(evidence, inputs(kind == "kin"))
    expected = RELEASED["numbers"][kind]
    for function in ("awm", "ics", "pcs", "reef"):
        assert getattr(bench("methods"), function)(a, b).score == pytest.approx(expected[function], abs=2e-6), function
    tracing = bench("methods")
    for function in ("csu", "csh", "match"):
        p = 10 ** getattr(tracing, function)(a, b).log10_p
        assert p == pytest.approx(tracing_p(expected[function]), rel=1e-6), function


def tracing_p(of_blocks):
    """Fisher's p of the blocks' own."""
    with np.errstate(divide="ignore"):
        return stats.combine_pvalues(of_blocks, "fisher").pvalue


def test_the_intrinsic_fingerprint_by_its_formula(bench, evidence):
    a, b = (evidence(model) for model in inputs(kin=True))
    correlations = []
    for kind in "qkvo":
        x, y = ([float(np.std(getattr(block, kind))) for block in model.blocks] for model in (a, b))
        correlations.append(stats.pearsonr(x, y).statistic)
    found = bench("methods").intrinsic(a, b)
    assert found.score == pytest.approx(np.mean(correlations), abs=1e-12)


def test_what_a_method_needs_and_does_not_get_is_no_test(bench, evidence):
    method, table = bench("method"), {found.name: found for found in bench("methods").METHODS}
    a, b = (evidence(model) for model in inputs(kin=True))
    narrow = replace(b, embed_VD=b.embed_VD[:, :-1])
    for name, other, why in (
        ("csu", narrow, "widths: 8 and 7"),
        ("HuRef, ICS", replace(b, embed_VD=b.embed_VD[1:]), "vocabularies: 16 and 15"),
        ("csh", replace(b, up_LRF=b.up_LRF[..., 1:]), "hidden units: 12 and 11"),
        ("match", replace(b, gate_LRF=None), "an MLP without gate"),
        ("csu", replace(b, blocks=b.blocks[1:]), "blocks: 4 and 3"),
        ("HuRef, PCS", replace(b, parameters={}), "no parameter of one name and shape"),
        ("audit's cosine", replace(b, parameters={}), "fewer than 4 tensors of one name and shape"),
    ):
        assert method.compare(table[name], a, other) == method.NoTest(why)
    two = [replace(model, blocks=model.blocks[:2]) for model in (a, b)]
    assert method.compare(table["intrinsic"], *two) == method.NoTest("2 blocks: at least 3 are needed")


def test_awm_finds_blocks_and_channels_again(bench, evidence):
    a = evidence(inputs(kin=True)[0])
    awm, chosen = bench("methods").awm, np.array([6, 0, 3, 1, 7])
    blocks = [replace(a.blocks[i], q=-a.blocks[i].q[:, chosen], k=-a.blocks[i].k[:, chosen]) for i in (2, 0)]
    smaller = replace(a, embed_VD=-a.embed_VD[:, chosen], blocks=tuple(blocks))
    assert awm(a, smaller).score == pytest.approx(1)
    assert awm(smaller, a).score == pytest.approx(1)


def test_keys_of_a_group_are_repeated_for_each_of_its_heads(bench):
    k_KD = np.arange(4.0)[:, None] * np.ones((1, 3))
    assert bench("methods").repeated(k_KD, n_heads=4, d_head=2)[:, 0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.fixture(scope="module")
def theirs():
    """Newborn models of transformers: grouped heads with a gate, packed and transposed maps, plain ones."""
    import transformers

    small = {"vocab_size": 40, "max_position_embeddings": 16}
    wide = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    configs = (
        transformers.Qwen2Config(**small, **wide, intermediate_size=24, num_key_value_heads=2),
        transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=4),
        transformers.OPTConfig(**small, **wide, ffn_dim=24, word_embed_proj_dim=16),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [transformers.AutoModelForCausalLM.from_config(config).eval() for config in configs]


@torch.no_grad()
def test_matrices_and_states_of_models_of_transformers(bench, theirs):
    probe = FingerprintProbe(n_inputs=12, seq_len=5)
    tokens_NT = torch.from_numpy(random_probe(40, 12, 5, 0))
    for model in theirs:
        found = bench("evidence").gather("theirs", HFModel(model), probe)
        states = model(tokens_NT, output_hidden_states=True).hidden_states
        np.testing.assert_allclose(found.states_LND[0], states[1][:, -1], atol=1e-6)
        np.testing.assert_allclose(found.final.x_ND, states[-1][:, -1], atol=1e-5)
        block = found.blocks[1]
        assert block.q.shape == block.o.shape == (16, 16)
        assert block.up.shape == block.down.T.shape
        # A map's output is its matrix times what the norm before it gives: one least-squares fit is exact.
        assert found.up_LRF.shape == (3, 60, len(block.up))
        residual = np.linalg.lstsq(np.c_[block.up, np.ones(len(block.up))], found.up_LRF[1].T, rcond=None)[1]
        assert residual.max() < 1e-6
        gates = found.gate_LRF
        assert (gates is not None) == (model.config.model_type == "qwen2") == (block.gate is not None)
    gpt2 = bench("evidence").gather("gpt2", HFModel(theirs[1]), probe)
    np.testing.assert_array_equal(gpt2.blocks[1].k, theirs[1].transformer.h[1].attn.c_attn.weight[:, 16:32].T)
