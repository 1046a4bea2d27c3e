"""Positional variance against numpy on all head outputs at once (definitions §6)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birthmark.metrics.variance import EffectiveTokens, PositionalVariance


def outputs(n, h, t, k, seed=0, dtype=torch.float64):
    """Head outputs whose mean and scale differ from place to place."""
    rng = np.random.default_rng(seed)
    o = rng.normal(size=(n, h, t, k)) * 10 ** rng.uniform(-2, 2, size=(h, t, 1)) + rng.normal(size=(h, t, k))
    return torch.from_numpy(o).to(dtype)


def measured(layers, splits=(), **more):
    """Every layer's outputs ``[N, H, T, K]``, in the given parts."""
    _, h, t, k = layers[0].shape
    metric = PositionalVariance(len(layers), h, t, k, **more)
    for layer, o in enumerate(layers):
        for part in torch.tensor_split(o, list(splits)):
            metric.update(layer, part)
    result = metric.compute()
    assert result.variance.shape == (len(layers), h, t)
    assert result.discrepancy.shape == (len(layers),)
    assert result.variance.dtype == result.discrepancy.dtype == np.float64
    return result


def explicit(layers):
    """The definition, from every value: unbiased variance over sequences, mean over channels."""
    variance = np.stack([np.var(o.double().numpy(), axis=0, ddof=1).mean(-1) for o in layers])
    per_position = variance.mean(1)
    t = np.arange(per_position.shape[1])
    return variance, per_position[:, 0] / per_position[:, t >= len(t) / 2].mean(1)


SHAPES = st.tuples(st.integers(2, 9), st.integers(1, 3), st.integers(2, 9), st.integers(1, 6))


@given(SHAPES, st.integers(0, 99), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_it_is_the_variance_of_all_outputs_at_once(shape, seed, dtype):
    layers = [outputs(*shape, seed=seed + i, dtype=dtype) for i in range(2)]
    for value, expected in zip(measured(layers), explicit(layers), strict=True):
        # Two sequences may agree by chance to 1e-4 of their mean: sums of squares then lose eight more digits.
        np.testing.assert_allclose(value, expected, rtol=1e-7)


@pytest.mark.parametrize("splits", [(), (1, 2, 3), range(2, 300, 2), (1, 298)])
@pytest.mark.parametrize("offset", [0.0, 1.0, 1e2, 1e4])
def test_a_mean_far_above_the_deviation_drowns_neither_it_nor_means_in_float32(offset, splits):
    o = (torch.from_numpy(np.random.default_rng(0).normal(size=(300, 1, 4, 8))) + offset).float()
    expected = explicit([o])[0]
    np.testing.assert_allclose(measured([o], splits).variance, expected, rtol=1e-6)
    in_float32 = measured([o], splits, dtype=torch.float32).variance
    np.testing.assert_allclose(in_float32, expected, rtol=1e-6 + 1e-7 * offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_sequences_have_no_variance_however_they_are_split(dtype):
    o = outputs(1, 2, 6, 4).to(dtype).expand(9, -1, -1, -1)
    assert (measured([o], (1, 3, 8), dtype=dtype).variance == 0).all()


def test_one_sequence_has_no_variance():
    result = measured([outputs(1, 1, 4, 2)])
    assert np.isnan(result.variance).all()
    assert np.isnan(result.discrepancy).all()


def weights(n=5, h=2, t=6, seed=0):
    """Rows that sum to 1."""
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(n, h, t, t)) * 2)
    return scores.masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf).softmax(-1)


def test_effective_tokens_of_rows_that_do_not_sum_to_one():
    a = 3 * weights()
    a[0, 0, 3] = 0
    sums = a.sum(-1)
    metric, shares = EffectiveTokens(1, *a.shape[1:3]), (a / sums[..., None]).nan_to_num()
    metric.update(0, a.square().sum(-1), shares.square().sum(-1))
    found = metric.compute()
    raw = np.divide(1, (a**2).sum(-1).numpy(), where=(sums > 0).numpy(), out=np.zeros(sums.shape))
    np.testing.assert_allclose(found.n_eff[0], raw.mean(0))
    np.testing.assert_allclose(found.n_eff_normalised[0], 9 * raw.mean(0))


def test_where_outputs_are_the_same_by_construction_the_variance_is_zero_and_no_rounding():
    o = outputs(9, 2, 8, 4, dtype=torch.float32)
    o[:, :, :2] = o[:1, :, :2] * (1 + 1e-7 * torch.randn(9, 1, 1, 1, generator=torch.Generator().manual_seed(0)))
    assert measured([o]).discrepancy[0] > 0
    found, free = measured([o], n_constant=2), measured([o])
    assert (found.variance[:, :, :2] == 0).all()
    assert found.discrepancy[0] == 0
    np.testing.assert_array_equal(found.variance[:, :, 2:], free.variance[:, :, 2:])
    assert np.isnan(measured([o[:1]], n_constant=2).discrepancy).all()  # one sequence has no variance
