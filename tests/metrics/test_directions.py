"""Contraction against the mean over explicit pairs (definitions §3)."""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.metrics.directions import Contraction, mean_pair_cosine


def hidden(n, t, d, seed=0, dtype=torch.float64, mean=1.0):
    """Hidden states of very different lengths that share a direction."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(n, t, d)) + mean * rng.normal(size=d)
    return torch.from_numpy(h * 10 ** rng.uniform(-3, 3, size=(n, t, 1))).to(dtype)


def pairs(vectors):
    """Mean cosine over all pairs, each formed; with a zero vector every cosine counts as 0."""
    cosines = []
    for a, b in combinations(np.asarray(vectors, dtype=np.float64), 2):
        norms = np.sqrt((a**2).sum() * (b**2).sum())
        cosines.append((a * b).sum() / norms if norms else 0.0)
    return np.mean(cosines) if cosines else np.nan


def explicit(h):
    h = h.double().numpy()
    return pairs(h[:, -1]), np.mean([pairs(sequence) for sequence in h])


def measured(h, splits=(), n_places=1, place=0):
    metric = Contraction(n_places, h.shape[-1])
    for part in torch.tensor_split(h, list(splits)):
        metric.update(place, part)
    result = metric.compute()
    assert result.inter.shape == result.intra.shape == (n_places,)
    assert result.inter.dtype == result.intra.dtype == np.float64
    return result.inter[place], result.intra[place]


SHAPES = st.tuples(st.integers(2, 7), st.integers(2, 9), st.integers(1, 12))


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(0, 99), st.booleans())
def test_both_are_the_mean_cosine_of_explicit_pairs(shape, seed, wide):
    h = hidden(*shape, seed=seed, dtype=torch.float64 if wide else torch.float32)
    # Float32 inside a batch: a rounding is 6e-8, and with two vectors a pair is the difference of two sums.
    np.testing.assert_allclose(measured(h), explicit(h), atol=1e-12 if wide else 2e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_less_precision_lose_nothing_beyond_their_own_rounding(dtype, autocast):
    h = hidden(16, 20, 64, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = measured(h)
    np.testing.assert_allclose(result, explicit(h), atol=1e-6)


def test_hidden_states_of_one_direction_have_contracted_fully():
    h = hidden(1, 1, 32).expand(8, 5, 32) * torch.logspace(-3, 3, 5, dtype=torch.float64)[:, None]
    np.testing.assert_allclose(measured(h), (1.0, 1.0), atol=1e-6)
    alternating = h * torch.tensor([1.0, -1.0]).repeat(4)[:, None, None]
    np.testing.assert_allclose(measured(alternating), (-1 / 7, 1.0), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_fewer_than_two_vectors_have_no_pair(seed):
    """A unit vector's squared length is 1 only up to rounding: 1e-8 over 0 pairs must not become infinite."""
    for dtype in (torch.float32, torch.float64):
        h = hidden(6, 5, 33, seed=seed, dtype=dtype)
        assert np.isnan(measured(h[:1])[0])
        assert not np.isnan(measured(h[:1])[1])
        assert np.isnan(measured(h[:, :1])[1])
        assert not np.isnan(measured(h[:, :1])[0])
        unit = h[0, :1] / h[0, :1].norm()
        assert torch.isnan(mean_pair_cosine(unit.sum(0), 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("zeros", [1, 2, 3, 4])
def test_a_zero_vector_has_cosine_zero_with_every_other(zeros, dtype):
    """The embedding of a padding token: (‖Σu‖² − n) alone would call two of them opposite."""
    h = hidden(4, 6, 8, dtype=dtype)
    h[:zeros, -1] = 0
    h[1, :3] = 0
    np.testing.assert_allclose(measured(h), explicit(h), atol=2e-6)
    np.testing.assert_allclose(measured(h, (1, 2)), explicit(h), atol=2e-6)


def test_mean_pair_cosine_takes_numbers_of_vectors_as_tensors_too():
    vectors = torch.nn.functional.normalize(hidden(3, 7, 5), dim=-1)
    sums = torch.stack([vectors[0, :7].sum(0), vectors[1, :4].sum(0), vectors[2, :2].sum(0)])
    expected = [pairs(vectors[i, :n]) for i, n in enumerate((7, 4, 2))]
    np.testing.assert_allclose(mean_pair_cosine(sums, torch.tensor([7, 4, 2])), expected, rtol=1e-12)
