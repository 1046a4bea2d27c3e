"""Alignment, drift and energy share against explicit sums over sequences (definitions §3)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.metrics.directions import SeedAlignment


def make(n, t, d, r=2, s=1, seed=0):
    """Hidden states ``[s, n, t, d]`` of different lengths, and unit references ``[r, s, d]``."""
    rng = np.random.default_rng(seed)
    h = (rng.normal(size=(s, n, t, d)) + rng.normal(size=d)) * 10 ** rng.uniform(-2, 2, size=(s, n, t, 1))
    references = rng.normal(size=(r, s, d))
    return torch.from_numpy(h), torch.from_numpy(references / np.linalg.norm(references, axis=-1, keepdims=True))


def cosine(a, b):
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / (np.sqrt((a**2).sum()) * np.sqrt((b**2).sum())))


def explicit(h, references):
    """Every number by its definition, one vector at a time."""
    last, references = h[:, :, -1].double().numpy(), references.double().numpy()
    n_references, n_places, _ = references.shape
    alignment, drift, energy = (np.zeros((n_references, n_places)) for _ in range(3))
    for s in range(n_places):
        for r in range(n_references):
            reference = references[r, s]
            alignment[r, s] = np.mean([cosine(v, reference) for v in last[s]])
            drift[r, s] = cosine(last[s].mean(0), reference)
            energy[r, s] = np.mean([(v @ reference) ** 2 for v in last[s]]) / np.mean([v @ v for v in last[s]])
    mean = last.mean(1)
    return alignment, drift, energy, mean / np.linalg.norm(mean, axis=-1, keepdims=True)


def measured(h, references, splits=()):
    metric = SeedAlignment(references)
    for place, states in enumerate(h):
        for part in torch.tensor_split(states, list(splits)):
            metric.update(place, part)
    return metric.compute()


def assert_equal(result, expected, **tolerance):
    for name, a, b in zip(result._fields, result, expected, strict=True):
        assert a.dtype == np.float64
        assert a.shape == b.shape, name
        np.testing.assert_allclose(a, b, err_msg=name, **tolerance)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 4), st.integers(1, 12), st.integers(0, 3), st.integers(1, 3), st.integers(0, 99)
)
def test_every_number_is_its_definition(n, t, d, r, s, seed):
    h, references = make(n, t, d, r, s, seed)
    assert_equal(measured(h, references), explicit(h, references), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_less_precision_lose_nothing_more(dtype):
    h, references = make(9, 3, 16)
    h = h.to(dtype)
    assert_equal(measured(h, references), explicit(h, references), rtol=1e-10, atol=1e-12)


def test_autocast_around_the_measurement_changes_nothing():
    h, references = make(9, 3, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = measured(h.float(), references)
    assert_equal(result, explicit(h.float(), references), rtol=1e-10, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=4), st.integers(0, 9))
def test_the_split_of_the_probe_into_batches_does_not_matter(splits, seed):
    h, references = make(12, 2, 10, seed=seed)
    assert_equal(measured(h, references, sorted(splits)), measured(h, references), rtol=1e-12, atol=1e-14)


def test_merged_states_are_one_probe():
    h, references = make(9, 3, 8, s=2)
    metrics = [SeedAlignment(references) for _ in range(3)]
    for metric, part in zip(metrics, (h[:, :2], h[:, 2:7], h[:, 7:]), strict=True):
        for place in (1, 0):
            metric.update(place, part[place])
    metrics[0].merge_state(metrics[1])
    metrics[0].merge_state(metrics[2])
    assert_equal(metrics[0].compute(), measured(h, references), rtol=1e-12, atol=1e-14)


def test_the_mean_direction_of_a_newborn_is_wholly_aligned_with_itself():
    """How a seed direction is found: without references; then measured against, on the very same states."""
    h, _ = make(20, 3, 16, s=2)
    direction = measured(h, torch.zeros(0, 2, 16)).mean_direction
    result = measured(h, torch.from_numpy(direction)[None])
    np.testing.assert_allclose(result.drift, 1.0, rtol=1e-12)
    opposite = measured(-h, torch.from_numpy(direction)[None])
    np.testing.assert_allclose(opposite.drift, -1.0, rtol=1e-12)
    np.testing.assert_allclose(opposite.alignment, -result.alignment, rtol=1e-12)
    np.testing.assert_allclose(opposite.energy_share, result.energy_share, rtol=1e-12)


def test_one_sequence_drifts_as_it_aligns():
    h, references = make(1, 3, 16)
    result = measured(h, references)
    np.testing.assert_allclose(result.alignment, result.drift, rtol=1e-12)
    np.testing.assert_allclose(result.energy_share, result.alignment**2, rtol=1e-12)


def test_long_vectors_weigh_in_the_mean_direction_and_not_in_the_alignment():
    h = torch.tensor([[[1e6, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]], [[0.0, 1.0]]], dtype=torch.float64)[None]
    result = measured(h, torch.tensor([[[0.0, 1.0]]], dtype=torch.float64))
    assert result.alignment.item() == pytest.approx(0.75)
    assert result.drift.item() == pytest.approx(3e-6)
    assert result.energy_share.item() == pytest.approx(3e-12)


def test_chance_levels_of_directions_without_a_preference():
    """Isotropic states: alignment 0, energy share 1/d; standard errors of 2000 draws."""
    d, rng = 64, np.random.default_rng(0)
    h = torch.from_numpy(rng.normal(size=(1, 2000, 1, d)))
    result = measured(h, make(1, 1, d, r=5)[1])
    assert np.abs(result.alignment).max() < 5 / np.sqrt(d * 2000)
    np.testing.assert_allclose(result.energy_share, 1 / d, rtol=5 * np.sqrt(2 / 2000))


def test_a_zero_vector_has_cosine_zero_with_every_direction():
    h, references = make(4, 1, 8)
    h[:, 1, -1] = 0
    others = torch.cat([h[:, :1], h[:, 2:]], dim=1)
    for splits in ((), (1, 2)):
        result, expected = measured(h, references, splits), explicit(others, references)
        np.testing.assert_allclose(result.alignment, 0.75 * expected[0], rtol=1e-12)
        # Sums that need no direction are right all the same.
        np.testing.assert_allclose(result.drift, expected[1], rtol=1e-12)
        np.testing.assert_allclose(result.energy_share, expected[2], rtol=1e-12)


def test_constant_hidden_states_are_their_own_direction():
    h = torch.full((1, 5, 2, 4), 3.0)
    result = measured(h, torch.full((1, 1, 4), 0.5))
    for value in (result.alignment, result.drift, result.energy_share):
        np.testing.assert_allclose(value, [[1.0]], rtol=1e-12)
    np.testing.assert_allclose(result.mean_direction, np.full((1, 4), 0.5), rtol=1e-12)
