from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.data.batches import permuted


@pytest.mark.parametrize("size", [*range(1, 70), 127, 128, 129, 1000, 4095, 4096, 4097, 65537])
def test_is_a_bijection(size: int) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(size), size, "test", 7)), np.arange(size))


@given(st.integers(1, 10**12), st.integers(0, 2**63), st.data())
def test_any_part_can_be_computed_alone(size: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    together = permuted(positions, size, seed)
    alone = [int(permuted(np.array([position]), size, seed)[0]) for position in positions]
    assert together.tolist() == alone
    assert len(set(together.tolist())) == len(set(positions.tolist()))
    assert together.min() >= 0
    assert together.max() < size


def test_keys_decide_the_order() -> None:
    orders = {permuted(np.arange(50), 50, *key).tobytes() for key in [(0, 0), (0, 1), (1, 0), (10, 0), (1, "00")]}
    assert len(orders) == 5
    assert np.array_equal(permuted(np.arange(50), 50, 3), permuted(np.arange(50), 50, 3))


@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 5, 12, 100])
def test_every_place_is_as_likely_as_another(size: int) -> None:
    """Over many keys each element should land everywhere equally often.

    Chi-square with (size − 1)² degrees of freedom, k: its sd is √(2k); five of them is past chance.
    """
    n_keys = 2000
    counts = np.zeros((size, size))
    for key in range(n_keys):
        counts[np.arange(size), permuted(np.arange(size), size, "uniform", key)] += 1
    expected = n_keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_part() -> None:
    """A shuffled order has no memory of the old one: rank correlation of consecutive places is chance (sd 1/√n)."""
    order = permuted(np.arange(10_000), 10_000, "serial", 0).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(10_000)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 5 / np.sqrt(10_000)
