"""Shares hold at every thousand, and any sample is found without those before it."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from birthmark.data.mixture import Proportions, _spread

# Neighbours of very different sizes are what a tree of halves does worst with.
WEIGHTS = st.lists(st.sampled_from([0.0, 1e-7, 0.01, 0.5, 1.0]) | st.floats(1e-3, 1e3), min_size=1, max_size=8)


@pytest.mark.heavy
@settings(max_examples=25)
@given(weights=WEIGHTS, far=st.integers(0, 10**10))
def test_each_source_has_its_share_at_every_thousand_and_its_samples_in_order(weights: list[float], far: int) -> None:
    assume(any(weights))
    proportions = Proportions(weights)
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    source_N, number_N = proportions.places(np.arange(5000))
    for i, share in enumerate(shares):
        assert number_N[source_N == i].tolist() == list(range(int((source_N == i).sum())))
        for n in range(1000, 5001, 1000):
            assert abs(int((source_N[:n] == i).sum()) - n * share) <= n / 1000
    # Far in, over the border of a block: as many before as the shares say, and on from there.
    before = proportions.taken(far).tolist()
    assert sum(before) == far
    assert all(abs(count - far * share) <= 2.7 for count, share in zip(before, shares, strict=True))
    source_N, number_N = proportions.places(np.arange(far, far + 300))
    for i, count in enumerate(before):
        assert number_N[source_N == i].tolist() == list(range(count, count + int((source_N == i).sum())))
    assert proportions.taken(far + 300).tolist() == (before + np.bincount(source_N, minlength=len(weights))).tolist()


@pytest.mark.parametrize("n_sources", [2, 3, 8])
def test_no_place_of_the_first_block_is_a_sample_off(n_sources: int) -> None:
    weights = np.random.default_rng(n_sources).random(n_sources) ** 3
    source_N, _ = Proportions(weights.tolist()).places(np.arange(2000))
    counts_NS = np.cumsum(source_N[:, None] == np.arange(n_sources), axis=0)
    assert np.abs(counts_NS - np.arange(1, 2001)[:, None] * weights / weights.sum()).max() < 1


def test_samples_in_any_order_are_those_in_order() -> None:
    proportions = Proportions([5, 2, 0, 1])
    source_N, number_N = proportions.places(np.arange(20_000))
    shuffled = np.random.default_rng(0).permutation(20_000)
    found = proportions.places(shuffled)
    assert np.array_equal(found[0], source_N[shuffled])
    assert np.array_equal(found[1], number_N[shuffled])


@pytest.mark.parametrize("counts", [(5,), (0, 3, 4), (1, 1, 30), (7, 5, 5, 2), (4, 4, 4, 4, 4), (2, 0, 11, 3, 1, 1)])
def test_the_order_within_a_block_is_the_rules(counts: tuple[int, ...]) -> None:
    total, given = sum(counts), [i for i, count in enumerate(counts) if count]
    margin, taken = Fraction(1, max(2 * len(given) - 2, 1)), [0] * len(counts)
    for k, source, number in zip(range(total), *(x.tolist() for x in _spread(counts)), strict=True):
        behind = [
            i for i in given if Fraction((k + 1) * counts[i], total) - taken[i] >= margin and taken[i] < counts[i]
        ]
        # The last place at which each must have come.
        last = {i: (taken[i] + 1 - margin) * total // counts[i] for i in behind}
        assert source == min(behind, key=lambda i: (last[i], i))
        assert number == taken[source]
        taken[source] += 1
