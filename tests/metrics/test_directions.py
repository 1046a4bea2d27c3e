"""Contraction against the mean over explicit pairs; alignment, drift and energy share against explicit sums
(definitions §3).
"""

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birthmark.metrics.directions import Contraction, SeedAlignment, mean_pair_cosine


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


# ---------------------------------------------------------------- alignment, drift and energy share


def make(n, t, d, r=2, s=1, seed=0):
    """Hidden states ``[s, n, t, d]`` of different lengths, and unit references ``[r, s, d]``."""
    rng = np.random.default_rng(seed)
    h = (rng.normal(size=(s, n, t, d)) + rng.normal(size=d)) * 10 ** rng.uniform(-2, 2, size=(s, n, t, 1))
    references = rng.normal(size=(r, s, d))
    return torch.from_numpy(h), torch.from_numpy(references / np.linalg.norm(references, axis=-1, keepdims=True))


def cosine(a, b):
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / (np.sqrt((a**2).sum()) * np.sqrt((b**2).sum())))


def explicit_alignment(h, references):
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


def measured_alignment(h, references, splits=()):
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
@given(st.tuples(*map(st.integers, (1, 1, 1, 0, 1, 0), (8, 4, 12, 3, 3, 99))))
def test_every_number_is_its_definition(sizes):
    h, references = make(*sizes)
    assert_equal(measured_alignment(h, references), explicit_alignment(h, references), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_of_less_precision_lose_nothing_more(dtype, autocast):
    h, references = make(9, 3, 16)
    h = h.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        result = measured_alignment(h, references)
    assert_equal(result, explicit_alignment(h, references), rtol=1e-10, atol=1e-12)


def test_a_zero_vector_has_cosine_zero_with_every_direction():
    h, references = make(4, 1, 8)
    h[:, 1, -1] = 0
    others = torch.cat([h[:, :1], h[:, 2:]], dim=1)
    for splits in ((), (1, 2)):
        result, expected = measured_alignment(h, references, splits), explicit_alignment(others, references)
        np.testing.assert_allclose(result.alignment, 0.75 * expected[0], rtol=1e-12)
        # Sums that need no direction are right all the same.
        np.testing.assert_allclose(result.drift, expected[1], rtol=1e-12)
        np.testing.assert_allclose(result.energy_share, expected[2], rtol=1e-12)
