"""Likeness of rankings against slow definitions and scipy (definitions §4)."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from birthmark.metrics.rankings import Ranked, kendall_tau, rank_biased_overlap, ranking, spearman, top_overlap

# Few different values, so that there are ties.
VECTORS = st.integers(2, 14).flatmap(lambda n: st.tuples(*[st.lists(st.integers(0, 6), min_size=n, max_size=n)] * 2))


def arrays(pair):
    return [np.array(x, dtype=np.float64) / 7 for x in pair]


def by_hand(p):
    """Token ids by falling preference, ties by id."""
    return sorted(range(len(p)), key=lambda i: (-p[i], i))


@settings(max_examples=80, deadline=None)
@given(VECTORS)
def test_spearman_is_the_correlation_of_mean_ranks(pair):
    p, q = arrays(pair)
    assume(len(set(p)) > 1)
    assume(len(set(q)) > 1)
    rank_p, rank_q = (np.array([np.mean([j for j, y in enumerate(sorted(v)) if y == x]) for x in v]) for v in (p, q))
    assert spearman(p, q) == pytest.approx(np.corrcoef(rank_p, rank_q)[0, 1], abs=1e-12)


@settings(max_examples=80, deadline=None)
@given(VECTORS)
def test_kendall_is_tau_b_over_all_pairs(pair):
    p, q = arrays(pair)
    assume(len(set(p)) > 1)
    assume(len(set(q)) > 1)
    score = n_p = n_q = 0
    for i, j in combinations(range(len(p)), 2):
        a, b = np.sign(p[i] - p[j]), np.sign(q[i] - q[j])
        score, n_p, n_q = score + a * b, n_p + abs(a), n_q + abs(b)
    assert kendall_tau(p, q) == pytest.approx(score / math.sqrt(n_p * n_q), abs=1e-12)


def test_a_constant_side_has_no_correlation():
    constant, other = np.full(8, 0.125), np.arange(8.0)
    for measure in (spearman, kendall_tau):
        assert math.isnan(measure(constant, other))
        assert math.isnan(measure(other, constant))
        assert math.isnan(measure(constant, constant))


@settings(max_examples=60, deadline=None)
@given(VECTORS, st.integers(1, 20))
def test_overlap_is_the_share_of_common_tokens_at_the_top(pair, k):
    p, q = arrays(pair)
    assert ranking(p).tolist() == by_hand(p)
    if k > len(p):
        assert math.isnan(top_overlap(p, q, k))
    else:
        assert top_overlap(p, q, k) == len(set(by_hand(p)[:k]) & set(by_hand(q)[:k])) / k
        assert top_overlap(p, p, k) == 1
    assert top_overlap(p, q, len(p)) == 1


def slow_rbo(p, q, persistence, depth):
    """The infinite sum of Webber et al. with both rankings' last agreement going on for ever."""
    a, b, total = by_hand(p), by_hand(q), 0.0
    for d in range(1, depth + 1):
        shared = len(set(a[:d]) & set(b[:d])) / d if d <= len(a) else 1.0
        total += persistence ** (d - 1) * shared
    return (1 - persistence) * total


@settings(max_examples=60, deadline=None)
@given(VECTORS, st.sampled_from([0.3, 0.9, 0.98]))
def test_rank_biased_overlap_is_the_sum_of_its_definition(pair, persistence):
    p, q = arrays(pair)
    value = rank_biased_overlap(p, q, persistence)
    assert value == pytest.approx(slow_rbo(p, q, persistence, depth=2000), abs=1e-9)
    assert value == pytest.approx(rank_biased_overlap(q, p, persistence), abs=1e-12)
    assert 0 <= value <= 1 + 1e-12
    assert rank_biased_overlap(p, p, persistence) == pytest.approx(1)


def test_rank_biased_overlap_looks_at_the_top():
    p = np.arange(1000.0)[::-1].copy()
    top, bottom = p.copy(), p.copy()
    top[:50], bottom[-50:] = top[:50][::-1], bottom[-50:][::-1]
    assert rank_biased_overlap(p, bottom) > 0.9999
    assert rank_biased_overlap(p, top) < 0.8
    # The default: half of the weight of all ranks lies on the first few dozen.
    assert rank_biased_overlap(p, top) == pytest.approx(slow_rbo(p, top, 0.98, depth=3000), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(VECTORS)
def test_a_preference_that_is_ranked_once_gives_what_scipy_and_its_numbers_give(pair):
    p, q = arrays(pair)
    np.testing.assert_array_equal(Ranked(p).mean_ranks + 1, stats.rankdata(-p))
    for measure in (spearman, kendall_tau, rank_biased_overlap):
        assert measure(Ranked(p), Ranked(q)) == pytest.approx(measure(p, q), abs=0, nan_ok=True)
    assert top_overlap(Ranked(p), q, len(p) // 2) == top_overlap(p, q, len(p) // 2)
