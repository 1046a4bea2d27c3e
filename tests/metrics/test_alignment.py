"""Alignment, drift and energy share against explicit sums over sequences (definitions §3)."""

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


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_less_precision_lose_nothing_more(dtype, autocast):
    h, references = make(9, 3, 16)
    h = h.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = measured(h, references)
    assert_equal(result, explicit(h, references), rtol=1e-10, atol=1e-12)


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
