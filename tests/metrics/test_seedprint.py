"""The lineage statistic and its nulls: against scipy, against enumeration, and on strangers."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from scipy import special, stats

from birthmark.metrics.config import LineageTestConfig, Null
from birthmark.metrics.seedprint import (
    HiddenStates,
    aggregate,
    analytic_sd,
    bonferroni,
    common_dimensions,
    compare,
    gaussian_moments,
    identity_dimensions,
    kendall_matrix,
    pairing_moments,
    pipeline_moments,
    spearman_matrix,
)


def gaussian(seed, n=60, width=40):
    return np.random.default_rng(seed).standard_normal((n, width))


def kin(seed, n=60, width=40, noise=1.0):
    """Two noisy views of one matrix."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, width))
    return x + noise * rng.standard_normal(x.shape), x + noise * rng.standard_normal(x.shape)


# ── the published procedure ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("choice", ["coset", "base"])
@pytest.mark.parametrize("k", [0.5, 12])
def test_the_published_statistic_is_scipys(choice, k):
    x, y = kin(0)
    x[:, 3] = np.round(x[:, 3], 1)  # ties
    wanted = 20 if k == 0.5 else k
    columns = sorted(np.argsort(x.mean(0))[:wanted])
    if choice == "coset":
        columns = [c for c in columns if c in set(np.argsort(y.mean(0))[:wanted])]
    p, q = (special.softmax(z[:, columns] / 10, axis=1) for z in (x, y))
    taus = [stats.kendalltau(p[:, i], q[:, i]).statistic for i in range(len(columns))]
    found = compare(x, y, LineageTestConfig(null="analytic", choice=choice, k=k))
    assert found.statistic == pytest.approx(np.mean(taus), abs=1e-12)
    assert found.k == len(columns)
    sd = np.sqrt(2 * (2 * 60 + 5) / (9 * 60 * 59)) / np.sqrt(len(columns))
    assert found.z == pytest.approx(np.mean(taus) / sd, rel=1e-12)
    assert found.p == pytest.approx(2 * stats.norm.sf(found.z), rel=1e-9)
    assert found.null == "analytic"


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_aggregated_signal_is_one_tau_of_raw_means_and_pays_for_two(mirrored):
    """As in the function ``run_test`` of the paper's repository, ``use_agg``."""
    x, y = kin(2, noise=2)
    y = -y if mirrored else y
    columns = sorted(set(np.argsort(x.mean(0))[:20]) & set(np.argsort(y.mean(0))[:20]))
    tau = stats.kendalltau(x[:, columns].mean(1), y[:, columns].mean(1)).statistic
    alone = compare(x, y, LineageTestConfig(null="analytic", k=0.5))
    found = compare(x, y, LineageTestConfig(null="analytic", k=0.5, aggregate=True))
    z = max(alone.z, tau / np.sqrt(2 * (2 * 60 + 5) / (9 * 60 * 59)))
    assert found.z == pytest.approx(z, rel=1e-12)
    assert found.p == pytest.approx(min(1, 4 * stats.norm.sf(z)), rel=1e-9)
    assert (found.verdict, found.k) == ("stranger" if mirrored else "kin", len(columns))


def test_the_aggregated_signal_can_see_what_no_column_shows():
    """A weak factor that all columns share: lost in each, plain in their mean."""
    rng = np.random.default_rng(0)
    factor_N1 = rng.standard_normal((200, 1))
    x, y = (0.12 * factor_N1 + rng.standard_normal((200, 60)) for _ in range(2))
    recipe = LineageTestConfig(null="analytic", choice="base", k=60)
    alone, found = (compare(x, y, replace(recipe, aggregate=a)) for a in (False, True))
    assert found.z > alone.z
    tau = stats.kendalltau(x.mean(1), y.mean(1)).statistic
    assert found.statistic == pytest.approx(tau, abs=1e-12)


def test_identity_dimensions_are_the_columns_of_smallest_mean():
    x = gaussian(0) + np.arange(40)[::-1]
    assert identity_dimensions(x, 3).tolist() == [39, 38, 37]
    y = gaussian(1) + np.arange(40)
    assert common_dimensions(x, y, 25, "coset").tolist() == list(range(15, 25))
    assert common_dimensions(x, y, 3, "base").tolist() == [37, 38, 39]
    # A sum in float32 loses what tells these means apart.
    far = np.float32(1000) + np.random.default_rng(0).standard_normal((2000, 20), dtype=np.float32) / 8
    assert identity_dimensions(far, 20).tolist() == np.argsort([math.fsum(column) for column in far.T]).tolist()


@pytest.mark.heavy
def test_the_gaussian_nulls_have_mean_zero_and_about_the_analytic_sd():
    mean, sd = gaussian_moments(100, 10, 10.0, 200, 0)
    assert abs(mean) < 4 * sd / np.sqrt(200)
    # The softmax at temperature 10 ties columns together a little.
    assert sd == pytest.approx(analytic_sd(100, 10), rel=0.25)
    mean, sd = pipeline_moments(100, 40, 20, "coset", 10.0, 200, 0)
    assert abs(mean) < 4 * sd / np.sqrt(200)
    assert sd == pytest.approx(analytic_sd(100, 10), rel=0.35)
    assert np.isnan(pipeline_moments(100, 20, 1, "coset", 10.0, 20, 0)[1])


@pytest.mark.parametrize("null", sorted(set(get_args(Null)) - {"matched"}))
def test_kin_are_kin_and_strangers_are_not(null):
    recipe = LineageTestConfig(null=null, k=0.5, draws=None if null == "dimensions_sampled" else 60)
    found = compare(*kin(0), recipe)
    assert found.verdict == "kin"
    assert found.z > 5
    assert found.null == null
    assert compare(gaussian(1), gaussian(2), recipe).verdict == "stranger"
    assert compare(*kin(0), recipe) == found


def test_the_far_tail_does_not_underflow():
    x = gaussian(0, 2000, 300)
    for null in ("analytic", "dimensions"):
        found = compare(x, x, LineageTestConfig(null=null, k=0.5))
        assert found.z > 40
        assert found.p == 0
        assert -(found.z**2) < found.log10_p < -(found.z**2) / 5
    reversed_order = compare(x, -x)
    assert reversed_order.verdict == "stranger"
    assert reversed_order.log10_p == 0


# ── pairings of dimensions ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [2, 3, 5, 6])
def test_moments_of_pairings_are_those_of_all_permutations(n):
    m = np.random.default_rng(n).standard_normal((n, n)) + np.arange(n)
    every = [m[np.arange(n), list(p)].mean() for p in itertools.permutations(range(n))]
    assert pairing_moments(m) == pytest.approx((np.mean(every), np.std(every)), abs=1e-12)


def test_correlation_matrices_are_scipys():
    x, y = kin(3, n=25, width=300)
    x[:, 5] = np.round(x[:, 5])
    y[:, 299] = np.round(y[:, 299], 1)
    a, b = HiddenStates(x.astype(np.float32)), HiddenStates(y.astype(np.float32))
    for i, j in ((0, 0), (5, 5), (5, 299), (299, 7), (256, 255)):
        assert spearman_matrix(a, b)[i, j] == pytest.approx(stats.spearmanr(a.x_ND[:, i], b.x_ND[:, j])[0], abs=1e-12)
    a, b = HiddenStates(x[:, :6]), HiddenStates(y[:, :6])
    assert kendall_matrix(a, b)[5, 2] == stats.kendalltau(x[:, 5], y[:, 2]).statistic
    mean = np.diag(kendall_matrix(a, b)).mean()
    assert compare(a, b, LineageTestConfig(correlation="kendall")).statistic == pytest.approx(mean)


@pytest.mark.heavy
def test_strangers_are_called_kin_as_often_as_the_level_says_however_their_columns_hang_together():
    rng, z = np.random.default_rng(0), []
    for _ in range(1000):
        pair = []
        for _ in range(2):
            factors, loads = rng.standard_normal((40, 3)), 1 + rng.standard_normal((3, 64))
            pair.append(factors @ loads + 0.3 * rng.standard_normal((40, 64)))
        z.append(compare(*pair).z)
    assert np.std(z) == pytest.approx(1, abs=0.06)
    assert abs(np.mean(z)) < 0.1
    low, high = stats.binomtest(int((np.array(z) > stats.norm.isf(0.01)).sum()), len(z)).proportion_ci(0.99)
    assert low < 0.01 < high


def test_a_sampled_p_is_the_share_of_pairings_that_do_as_well():
    x, y = kin(1, noise=4)
    exact, sampled = compare(x, y), compare(x, y, LineageTestConfig(null="dimensions_sampled", draws=5000))
    assert sampled.statistic == exact.statistic
    assert sampled.z == pytest.approx(exact.z, rel=0.05)
    assert sampled.p == pytest.approx(exact.p, rel=0.4, abs=1e-3)
    assert compare(x, x, LineageTestConfig(null="dimensions_sampled", draws=99)).p == pytest.approx(1 / 100)


# ── no verdict ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("null", ["analytic", "dimensions"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda x: x[:9], "9 inputs"),
        (lambda x: np.where(np.arange(40) == 2, np.nan, x), "NaN"),
        (lambda x: np.where(np.arange(40) < 3, 1.0, x), "3 of 40 dimensions are the same"),
        (lambda x: x[:, :1], "1 dimension"),
    ],
)
def test_what_cannot_be_tested_is_undefined(null, spoil, reason):
    x, y = kin(0)
    spoilt = spoil(x)
    found = compare(spoilt, y[: len(spoilt), : spoilt.shape[1]], LineageTestConfig(null=null, k=0.5))
    assert found.verdict == "undefined"
    assert reason in found.reason
    assert np.isnan([found.z, found.statistic, found.log10_p, found.p]).all()


def test_too_few_identity_dimensions_in_common_are_undefined():
    x, y = gaussian(0) + np.arange(40), gaussian(1) - np.arange(40)
    for null in ("analytic", "empirical", "empirical_full", "inputs"):
        found = compare(x, y, LineageTestConfig(null=null))
        assert (found.verdict, found.k) == ("undefined", 0)
        assert "0 identity dimensions in common (of 4)" in found.reason
    assert compare(x, y, LineageTestConfig(null="analytic", choice="base")).verdict != "undefined"
    assert compare(x, y).verdict == "stranger"


@pytest.mark.parametrize("null", ["analytic", "inputs"])
def test_a_dimension_that_the_softmax_flattens_is_named(null):
    x, y = kin(0)
    x[:, 0] -= 20_000
    y[:, 0] -= 20_000
    reason = compare(x, y, LineageTestConfig(null=null, k=8)).reason
    assert reason == "an identity dimension is the same for all inputs after the softmax"


def test_columns_that_all_rank_alike_are_undefined():
    x = gaussian(0)[:, :1].repeat(5, 1)
    found = compare(x, x)
    assert found.verdict == "undefined"
    assert "alike" in found.reason


def test_other_shapes_are_an_error():
    with pytest.raises(ValueError, match="different shapes"):
        compare(gaussian(0), gaussian(0)[:, :5])


# ── warnings, several tests, the recipe ──────────────────────────────────────────────────────────────────────────────


def test_a_null_that_is_known_to_be_off_says_so():
    x, y = gaussian(0), gaussian(1)
    assert compare(x, y, vocab_size=50).warnings == ()
    (leak,) = compare(x, y, probe="embedding").warnings
    assert "leaks along the residual stream" in leak
    small, few = compare(x, y, LineageTestConfig(null="analytic", choice="base"), vocab_size=50).warnings
    assert "vocabulary (50)" in small
    assert "4 dimensions" in few
    few = [[w.split(":")[0] for w in compare(x[:, :k], y[:, :k]).warnings] for k in (2, 29, 30)]
    assert few == [["2 dimensions"], ["29 dimensions"], []]


def test_kin_of_opposite_sign_are_strangers_with_a_word_about_it():
    x, y = kin(0)
    negated, half = compare(x, -y), compare(x, y * np.where(np.arange(40) % 2, 1, -1))
    assert negated.z == pytest.approx(-compare(x, y).z)
    assert (negated.verdict, negated.reversed) == ("stranger", True)
    assert f"z {negated.z:.1f}: the same dimensions rank the inputs in opposite order" in negated.warnings[0]
    # Of half of the channels they cancel: nothing is left to hint at.
    assert (half.verdict, half.reversed, half.warnings) == ("stranger", False, ())


def test_several_tests_pay_for_their_number():
    weak, strong = compare(*kin(1, noise=3)), compare(*kin(0))
    both = aggregate([weak, strong])
    assert both.z == strong.z
    assert both.log10_p == pytest.approx(strong.log10_p + np.log10(2))
    assert both.verdict == "kin"
    just = replace(strong, log10_p=np.log10(0.006))
    assert aggregate([just]).verdict == "kin"
    assert aggregate([just, just]).verdict == "stranger"
    lost = compare(gaussian(0)[:5], gaussian(1)[:5])
    assert aggregate([lost, lost]).verdict == "undefined"
    assert aggregate([lost, strong]).log10_p == both.log10_p
    assert bonferroni(-0.1, 100) == 0
    with pytest.raises(ValueError, match="no tests"):
        aggregate([])


def test_a_recipe_says_what_is_wrong_with_it():
    assert LineageTestConfig().problems() == []
    assert [LineageTestConfig(k=k).n_dimensions(128) for k in (0.1, 0.25, 7, 500)] == [12, 32, 7, 128]
    problems = " ".join(LineageTestConfig(k=1.5, temperature=0, draws=3).problems())
    assert all(name in problems for name in ("k is 1.5", "temperature is 0", "draws is 3"))
    assert "at least 1000" in LineageTestConfig(null="dimensions_sampled", draws=100).problems()[0]
    assert LineageTestConfig(null="analytic", aggregate=True).problems() == []
    assert "null_seed is -1: give at least 0" in LineageTestConfig(null_seed=-1).problems()
    assert "k is inf" in LineageTestConfig(k=float("inf")).problems()[0]
    (problem,) = LineageTestConfig(aggregate=True).problems()
    assert "aggregate is true: the null dimensions has no such signal" in problem


@pytest.mark.parametrize(
    ("field", "value", "choices"),
    [
        ("null", "dimension", "'matched', 'analytic', 'empirical', 'empirical_full' or 'inputs'"),
        ("correlation", "pearson", "one of 'spearman' or 'kendall'"),
        ("choice", "first", "one of 'coset' or 'base'"),
        ("k", "a", "a number"),
        ("aggregate", 1, "true or false"),
        ("draws", 100.5, "a whole number"),
        ("null_seed", None, "a whole number"),
    ],
)
def test_a_misspelt_setting_runs_no_other_test(field, value, choices):
    (problem,) = LineageTestConfig(**{field: value}).problems()
    assert problem.startswith(f"{field} is {value!r}, not ")
    assert problem.endswith(choices)
