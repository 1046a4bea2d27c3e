"""Super neurons against means over all activations at once (definitions §7)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.metrics.neurons import SuperNeurons, robust_z, super_neurons, unit_weights


def activations(n=8, length=6, units=10, seed=0, dtype=torch.float64):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, length, units)) * 10 ** rng.uniform(-2, 2, size=units)).to(dtype)


def measured(layers, splits=()):
    metric = SuperNeurons(len(layers), layers[0].shape[-1])
    for layer, a in enumerate(layers):
        for part in torch.tensor_split(a, list(splits)):
            metric.update(layer, part)
    return metric.compute()


def explicit(layers):
    sizes = [np.abs(a.double().numpy()) for a in layers]
    return np.stack([a[:, 0].mean(0) for a in sizes]), np.stack([a[:, 1:].mean((0, 1)) for a in sizes])


@settings(max_examples=30, deadline=None)
@given(
    st.tuples(st.integers(1, 6), st.integers(2, 8), st.integers(1, 5)),
    st.integers(0, 99),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_it_is_the_mean_over_all_activations_at_once(shape, seed, dtype):
    layers = [activations(*shape, seed=seed + i, dtype=dtype) for i in range(2)]
    result = measured(layers)
    for value, expected in zip(result, explicit(layers), strict=True):
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_a_single_position_has_no_others():
    result = measured([activations(length=1)])
    assert np.isfinite(result.first).all()
    assert np.isnan(result.others).all()


def test_batches_of_sequences_of_other_lengths_count_by_sequence():
    batches = [activations(n=3), activations(n=2, length=4, seed=1), activations(n=1, seed=2)]
    metric = SuperNeurons(1, 10)
    for a in batches:
        metric.update(0, a)
    others = np.concatenate([a[:, 1:].abs().mean(1) for a in batches]).mean(0)
    np.testing.assert_allclose(metric.compute().others[0], others, rtol=1e-12)


def test_a_small_rest_is_not_lost_beside_a_large_first():
    a = torch.ones(2, 4, 3)
    a[:, 0] = 1e9
    assert (measured([a]).others == 1).all()


def test_robust_z_is_that_of_a_normal_sample_and_blind_to_outliers():
    x = np.random.default_rng(0).normal(3, 2, size=100_001)
    np.testing.assert_allclose(robust_z(x)[:5], (x[:5] - 3) / 2, atol=0.02)
    x[:1000] = 1e9
    np.testing.assert_allclose(robust_z(x)[1000:1005], (x[1000:1005] - 3) / 2, atol=0.05)
    assert robust_z(np.array([2.0, 2, 2, 5, 1])).tolist() == [0, 0, 0, np.inf, -np.inf]
    assert (robust_z(np.zeros(4)) == 0).all()


def test_a_super_neuron_is_an_outlier_at_the_first_position_alone():
    rng = np.random.default_rng(0)
    first, others = rng.uniform(0.8, 1.2, size=(2, 2, 200))
    first[0, 7] = others[0, 8] = 100  # the first is one; the second is loud, but elsewhere
    first[0, 9] = others[0, 9] = 100  # loud everywhere
    others[1, 3] = 0.01  # silent elsewhere, but no outlier where it fires
    found = super_neurons(first, others)
    assert np.argwhere(found.is_super).tolist() == [[0, 7]]
    assert found.ratio[0, 7] == pytest.approx(100 / others[0, 7])
    assert super_neurons(first, others, ratio_threshold=0.5).is_super.sum() == 2
    assert super_neurons(first, others, z_threshold=1e9).is_super.sum() == 0
    assert super_neurons(first, others, found.z[0, 7], found.ratio[0, 7]).is_super[0, 7]  # at both thresholds


def test_a_unit_that_never_fires_has_no_ratio_and_one_that_fires_at_the_first_alone_an_infinite_one():
    found = super_neurons(np.array([0.0, 5.0, 1.0, 1.1, 0.9]), np.array([0.0, 0.0, 1.0, 1.0, 1.0]))
    assert found.ratio[:2].tolist() == [0, np.inf]


def test_no_unit_of_a_normal_layer_is_one():
    first, others = np.abs(np.random.default_rng(0).normal(size=(2, 64, 4096))).mean(1)
    assert not super_neurons(first, others).is_super.any()


def test_weights_of_a_unit_are_those_that_it_reads_and_writes():
    gate, up = (torch.nn.Linear(4, 6, bias=False).requires_grad_(False) for _ in range(2))
    down = torch.nn.Linear(6, 4, bias=False).requires_grad_(False)
    down.weight[:, 5] = 0
    down.weight[:, 2] = torch.tensor([0.0, 0.0, -3.0, 0.0])
    found = unit_weights(np.array([2, 5, 0]), up.weight, down.weight, gate.weight)
    for i, unit in enumerate((2, 5, 0)):
        # Unit by unit, from the unit vector of the hidden space.
        one = torch.eye(6)[unit]
        assert found.gate_norm[i] == pytest.approx(float((gate.weight.T @ one).norm()))
        assert found.up_norm[i] == pytest.approx(float((up.weight.T @ one).norm()))
        written = (down.weight @ one).abs()
        if unit != 5:
            assert found.down_sparsity[i] == pytest.approx(float(written.max() / written.mean()))
            assert found.down_dimension[i] == written.argmax()
    assert found.down_sparsity[:2].tolist() == [4, 1]
    assert np.isnan(unit_weights(np.array([1]), up.weight, down.weight).gate_norm).all()
