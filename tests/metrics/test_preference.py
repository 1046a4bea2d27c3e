"""Token preference against float64 softmax, scipy and brute force (definitions §4)."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from birthmark.metrics.preference import TokenPreference, coverage, kl_to_uniform, normalised_entropy, preference_ratio


def logits(n, v, seed=0, dtype=torch.float64, spread=3.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, v)) * spread).to(dtype)


def explicit(logits_NV):
    x = logits_NV.double().numpy()
    p = np.exp(x - x.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    w = np.zeros(x.shape[1])
    for row in x:
        largest = max(row)
        chosen = [i for i, value in enumerate(row) if value == largest]
        w[chosen] += 1 / (len(x) * len(chosen))
    return p.mean(0), w


def measured(logits_NV, splits=()):
    metric = TokenPreference(logits_NV.shape[1])
    for part in torch.tensor_split(logits_NV, list(splits)):
        metric.update(part)
    result = metric.compute()
    assert result.mean_prob.dtype == result.argmax_share.dtype == np.float64
    return result


@settings(max_examples=30, deadline=None)
@given(*map(st.integers, (1, 2, 0), (20, 60, 99)), st.sampled_from([0.1, 3.0, 300.0]), st.booleans())
def test_both_vectors_are_the_means_of_explicit_distributions(n, v, seed, spread, wide):
    x = logits(n, v, seed, torch.float64 if wide else torch.float32, spread)
    p, w = measured(x)
    expected_p, expected_w = explicit(x)
    # One float32 softmax: exponents of up to spread carry a relative rounding of 6e-8 each.
    np.testing.assert_allclose(p, expected_p, rtol=1e-12 if wide else 1e-5, atol=1e-12)
    np.testing.assert_allclose(w, expected_w, rtol=1e-12)


def test_bf16_logits_are_measured_in_float32():
    x = logits(50, 3000, dtype=torch.bfloat16)
    p, w = measured(x)
    np.testing.assert_allclose(p, explicit(x)[0], rtol=1e-5)
    assert (np.abs(50 * w - np.round(50 * w)) > 0.1).any(), "rounded logits tie"
    np.testing.assert_allclose(w, explicit(x)[1], rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 7), st.integers(0, 99), st.lists(st.integers(0, 9), max_size=3))
def test_tied_tokens_share_a_choice_in_equal_parts(n, v, seed, splits):
    """In whole numbers: rows of a few values only, so that most of them tie."""
    x = np.random.default_rng(seed).integers(0, 3, size=(n, v))
    share = [Fraction(0)] * v
    for row in x:
        chosen = np.flatnonzero(row == row.max())
        for token in chosen:
            share[token] += Fraction(1, n * len(chosen))
    w = measured(torch.from_numpy(x).float(), sorted(min(split, n) for split in splits)).argmax_share
    assert w.sum() == pytest.approx(1)
    np.testing.assert_allclose(w, [float(part) for part in share], rtol=1e-12)


def test_many_small_batches_do_not_lose_what_one_of_them_adds():
    """2^25 in float32 would swallow the next 1."""
    metric = TokenPreference(2)
    metric.update(torch.tensor([[0.0, 0.0]]))
    metric.prob_sum += 2.0**25
    metric.argmax_count += 2.0**25
    before = metric.prob_sum.clone()
    metric.update(torch.tensor([[0.0, 0.0]]))
    assert torch.equal(metric.prob_sum - before, torch.full((2,), 0.5, dtype=torch.float64))


DISTRIBUTIONS = st.lists(st.integers(0, 9), min_size=2, max_size=9).filter(any)


@settings(max_examples=60, deadline=None)
@given(DISTRIBUTIONS)
def test_ratio_divergence_and_entropy_equal_scipy(counts):
    p = np.array(counts) / sum(counts)
    n = len(p)
    assert preference_ratio(p) == pytest.approx(n * max(counts) / sum(counts))
    assert kl_to_uniform(p) == pytest.approx(stats.entropy(p, np.full(n, 1 / n)), abs=1e-12)
    assert normalised_entropy(p) == pytest.approx(stats.entropy(p, base=n), abs=1e-12)
    single = np.eye(n)[n // 2]
    assert (normalised_entropy(single), coverage(single)) == (0, 1 / n)


@settings(max_examples=80, deadline=None)
@given(DISTRIBUTIONS, st.sampled_from([Fraction(4, 5), Fraction(1, 2), Fraction(1)]))
def test_coverage_is_the_smallest_set_of_tokens_that_is_large_enough(counts, share):
    """By brute force over all sets, in whole numbers: 4 of 5 is 80 %, whatever floats make of it."""
    n_votes = sum(counts)
    smallest = min(
        size
        for size in range(1, len(counts) + 1)
        if any(sum(chosen) >= share * n_votes for chosen in combinations(counts, size))
    )
    w = np.array(counts, dtype=np.float64) / n_votes
    assert coverage(w, float(share)) == pytest.approx(smallest / len(counts))
    if share == Fraction(4, 5):
        assert coverage(w) == coverage(w, 0.8)


@pytest.mark.parametrize("n_votes", [5, 10, 35, 1000, 4095])
def test_coverage_of_votes_that_are_exactly_enough(n_votes):
    w = np.full(n_votes, 1 / n_votes)
    assert coverage(w) == pytest.approx(-(-4 * n_votes // 5) / n_votes)
