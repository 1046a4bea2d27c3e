"""Released forms against the authors' formulas on whole tensors, in numpy."""

import numpy as np
import pytest
import torch
from oracles import Seen
from scipy import stats

from birthmark.measure.measurement import measure
from birthmark.metrics.quantity import Sizes
from birthmark.metrics.released_forms import ReleasedForms
from birthmark.models.attention.config import AttentionConfig
from birthmark.models.birth import born
from birthmark.models.config import ModelConfig

NAME = "birthmark.metrics.released_forms:ReleasedForms"
N, V, L = 5, 40, 2


def slow_rank(h_TD):
    """As the notebook has it, which adds 1e-12 inside the logarithm."""
    values = np.linalg.svd(h_TD, compute_uv=False)
    p = values / values.sum()
    return np.exp(-(p * np.log(p + 1e-12)).sum())


@pytest.mark.parametrize("attention", [{"aggregation": "headnorm_released"}, {"normaliser": "sigmoid"}], ids=str)
@pytest.mark.parametrize(("n_positions", "batch_size"), [(12, 2), (12, N), (140, N)])
def test_released_forms_are_those_of_whole_tensors(attention, n_positions, batch_size):
    sizes = {"d_model": 16, "n_layers": L, "n_heads": 2, "vocab_size": V, "max_seq_len": n_positions}
    config = ModelConfig(**sizes, attention=AttentionConfig(**attention))
    model, generator = born(config, 0), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, (N, n_positions), generator=generator)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
        model.eval()(tokens, observer=(seen := Seen()))
    found = measure(model, tokens.numpy(), batch_size=batch_size, metrics=[NAME])
    plain = measure(model, tokens.numpy(), batch_size=batch_size)

    # What enters the output projection, the states behind whole blocks, and whole matrices of attention.
    entered = [a.out_BHTK.double().transpose(1, 2).flatten(2).numpy() for a in seen.attended.values()]
    states = [h_BTD.double().numpy() for (site, _), h_BTD in seen.residuals.items() if site != "attention"]
    matrices = [a.weights.rows(0, n_positions).double().numpy() for a in seen.attended.values()]
    spread_channels = np.stack([out.std(-1, ddof=1).mean(0) for out in entered])
    spread_sequences = np.stack([out.std(0, ddof=1).mean(-1) for out in entered])
    ranks = [np.mean([slow_rank(h[:128]) for h in of_place]) for of_place in states]
    sink = np.stack([weights[..., 0].mean((0, 2)) for weights in matrices])
    arrays = found.arrays
    np.testing.assert_allclose(arrays["released_spread_channels"], spread_channels, rtol=1e-4)
    np.testing.assert_allclose(arrays["released_spread_sequences"], spread_sequences, rtol=1e-4)
    np.testing.assert_allclose(arrays["released_effective_rank"], ranks, rtol=1e-4)
    np.testing.assert_allclose(arrays["released_sink"], sink, rtol=1e-4, atol=1e-6)
    assert found.scalars["released_sink"] == pytest.approx(sink.mean(), rel=1e-4)
    # Nothing of it is there unless it is asked for, and nothing else changes.
    assert not [name for name in plain.arrays if name.startswith("released")]
    assert all(np.array_equal(array, arrays[name], equal_nan=True) for name, array in plain.arrays.items())


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_super_neurons_are_the_units_of_the_largest_rows(mlp):
    config = ModelConfig(d_model=16, n_layers=L, n_heads=2, d_ff=24, vocab_size=V, max_seq_len=8, mlp=mlp)
    model = born(config, 0)
    found = measure(model, np.arange(16).reshape(2, 8), metrics=[NAME]).arrays
    for layer, block in enumerate(model.blocks):
        maps = {name: p.detach().double().numpy() for name, p in block.mlp.named_parameters() if "weight" in name}
        for name in ("gate", "up"):
            of_map = [found[f"released_{name}_{what}"][layer] for what in ("unit", "norm", "kurtosis")]
            if f"{name}.weight" not in maps:
                assert np.isnan(of_map).all()
                continue
            norms = np.linalg.norm(maps[f"{name}.weight"], axis=1)
            units = np.argsort(norms)[::-1][:10]
            np.testing.assert_array_equal(of_map[0], units)
            np.testing.assert_allclose(of_map[1], norms[units], rtol=1e-5)
            np.testing.assert_allclose(of_map[2], stats.kurtosis(maps["down.weight"][:, units]), rtol=1e-6)


def test_one_sequence_has_no_deviation_over_sequences_and_states_of_zeros_have_no_rank():
    metric = ReleasedForms(Sizes(1, 2, 4, 3, 8, V, 5))
    metric.update(0, torch.randn(1, 2, 5, 3), torch.ones(1, 2))
    for place in range(2):
        metric.add_states(place, torch.zeros(1, 5, 4))
    found = metric.compute()
    assert np.isnan(found["released_spread_sequences"]).all()
    assert (found["released_effective_rank"] == 0).all()
    assert (found["released_sink"] == 1).all()
