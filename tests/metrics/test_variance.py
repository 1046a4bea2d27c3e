"""Positional variance against numpy on all head outputs at once (definitions §6)."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birthmark.metrics.variance import PositionalVariance


def outputs(n, h, t, k, seed=0, dtype=torch.float64):
    """Head outputs whose mean and scale differ from place to place."""
    rng = np.random.default_rng(seed)
    o = rng.normal(size=(n, h, t, k)) * 10 ** rng.uniform(-2, 2, size=(h, t, 1)) + rng.normal(size=(h, t, k))
    return torch.from_numpy(o).to(dtype)


def measured(layers, splits=()):
    """Every layer's outputs ``[N, H, T, K]``, in the given parts."""
    _, h, t, k = layers[0].shape
    metric = PositionalVariance(len(layers), h, t, k)
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


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 9))
def test_the_split_of_the_probe_into_batches_does_not_matter(splits, seed):
    layers = [outputs(12, 2, 5, 3, seed)]
    for value, whole in zip(measured(layers, sorted(splits)), measured(layers), strict=True):
        np.testing.assert_allclose(value, whole, rtol=1e-9)


def test_merged_states_are_one_probe():
    o = outputs(9, 2, 6, 4)
    first, second = PositionalVariance(1, 2, 6, 4), PositionalVariance(1, 2, 6, 4)
    first.update(0, o[:4])
    second.update(0, o[4:])
    first.merge_state(second)
    np.testing.assert_allclose(first.compute().variance, measured([o]).variance, rtol=1e-9)


def test_uniform_attention_over_independent_values_divides_the_variance_by_the_number_of_tokens():
    rng = np.random.default_rng(0)
    v = torch.from_numpy(rng.normal(size=(20_000, 1, 16, 4)))
    o = v.cumsum(2) / torch.arange(1, 17)[:, None]
    variance, discrepancy = measured([o])
    np.testing.assert_allclose(variance[0, 0, 0] / variance[0, 0], np.arange(1, 17), rtol=0.05)
    assert discrepancy[0] == pytest.approx(1 / np.mean(1 / np.arange(9, 17)), rel=0.03)


def test_equal_variance_has_no_discrepancy():
    assert measured([outputs(4000, 2, 6, 16) * 0 + torch.randn(4000, 2, 6, 16)]).discrepancy[0] == pytest.approx(
        1, rel=0.02
    )


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_a_mean_far_above_the_deviation_does_not_drown_it(offset):
    o = (torch.from_numpy(np.random.default_rng(0).normal(size=(300, 1, 4, 8))) + offset).float()
    np.testing.assert_allclose(measured([o]).variance, explicit([o])[0], rtol=1e-6)


def test_a_constant_first_position_has_no_variance():
    """A fixed BOS: σ²(0) is 0, never a small negative number."""
    o = outputs(50, 2, 6, 4, dtype=torch.float32)
    o[:, :, 0] = o[:1, :, 0]
    variance, discrepancy = measured([o])
    assert (variance >= 0).all()
    np.testing.assert_allclose(variance[:, :, 0], 0, atol=1e-12)
    np.testing.assert_allclose(discrepancy, 0, atol=1e-12)


def test_one_sequence_has_no_variance():
    result = measured([outputs(1, 1, 4, 2)])
    assert np.isnan(result.variance).all()
    assert np.isnan(result.discrepancy).all()


def test_the_middle_of_an_odd_length_is_early():
    o = outputs(8, 1, 5, 3)
    changed = o.clone()
    changed[:, :, 2] = 100 * o[:, :, 2]
    assert measured([o]).discrepancy == pytest.approx(measured([changed]).discrepancy)


SCRIPT = """
import sys
import numpy as np, torch, torch.distributed as dist
from birthmark.metrics.variance import PositionalVariance

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
o = torch.randn(10, 2, 6, 4, generator=torch.Generator().manual_seed(0)) + 3
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
metric = PositionalVariance(1, 2, 6, 4)
metric.update(0, o[(slice(0, 7), slice(7, 10))[rank]])
np.savez(out, whole=o, **metric.compute()._asdict())
dist.destroy_process_group()
"""


def test_two_processes_with_a_part_each_compute_the_whole(tmp_path):
    results = [tmp_path / "0.npz", tmp_path / "1.npz"]
    runs = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), tmp_path / "store", result])
        for rank, result in enumerate(results)
    ]
    try:
        assert [run.wait(timeout=60) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
    for result in map(np.load, results):
        variance, discrepancy = explicit([torch.from_numpy(result["whole"])])
        np.testing.assert_allclose(result["variance"], variance, rtol=1e-9)
        np.testing.assert_allclose(result["discrepancy"], discrepancy, rtol=1e-9)
