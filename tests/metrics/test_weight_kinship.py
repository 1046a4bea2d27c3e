"""Kinship and order of weights, on walks whose order is known."""

import numpy as np
import pytest

from birthmark.metrics.weight_kinship import (
    births,
    is_shorter,
    kinship,
    mean_distances,
    nearest_path,
    overshoot,
    shortest_path,
    squared_distances,
    tailedness,
)


def walk(seed, n, step=0.15, tensors=8):
    """Checkpoints of a training: each is the one before it and a small move."""
    numbers = np.random.default_rng(seed)
    found = [{f"t{i}": numbers.normal(size=(4, 64)).astype(np.float32) for i in range(tensors)}]
    for _ in range(n - 1):
        found.append({name: x + np.float32(step) * numbers.normal(size=x.shape) for name, x in found[-1].items()})
    return found


def test_strangers_are_called_kin_no_more_often_than_p_says():
    """Trained strangers too: all weights of each share a direction of its own."""
    numbers, p = np.random.default_rng(0), []
    for _ in range(200):
        a, b = ({f"t{i}": numbers.normal(size=(4, 64)) + 0.5 * numbers.normal(size=64) for i in range(8)} for _ in "ab")
        test = kinship(a, b)
        assert test.verdict is False
        p.append(test.p)
    # Three standard deviations of a binomial share.
    assert abs(np.mean(np.array(p) < 0.05) - 0.05) < 3 * (0.05 * 0.95 / 200) ** 0.5
    assert np.mean(p) == pytest.approx(0.5, abs=0.05)


def test_a_small_cosine_is_no_kinship_however_sure_and_what_all_of_a_run_of_values_share_counts_for_nothing():
    numbers = np.random.default_rng(0)
    a, b = ({f"t{i}": numbers.normal(size=(32, 64)) for i in range(40)} for _ in "ab")
    near = kinship(a, {name: x + 0.06 * a[name] for name, x in b.items()})
    assert 0.04 < near.cosine < 0.08
    assert near.p < 1e-6
    assert near.verdict is False
    shared = {name: 3 * numbers.normal(size=(32, 1)) for name in a}
    apart = kinship(*({name: x + shared[name] for name, x in one.items()} for one in (a, b)))
    assert abs(apart.cosine) < 0.02


@pytest.mark.parametrize("n_alike", [0, 16, 29])
def test_tensors_that_every_seed_draws_alike_and_training_has_moved_make_no_kin(n_alike):
    """As `A_log` of Mamba and `time_mix_key` of RWKV: up to half of all, and nothing of a stranger else is near."""
    numbers = np.random.default_rng(0)
    alike = {f"log{i}": np.log(np.arange(1.0, 65.0)).repeat(4).reshape(4, 64) for i in range(n_alike)}
    for _ in range(10):
        a, b = ({f"t{i}": numbers.normal(size=(16, 64)) for i in range(60 - n_alike)} for _ in "ab")
        moved = [{name: x + 0.01 * numbers.normal(size=x.shape) for name, x in alike.items()} for _ in "ab"]
        found = kinship(a | moved[0], b | moved[1])
        assert (found.p < 1e-4 and found.cosine > 0.15) == (n_alike > 0)
        assert found.verdict is False
        # Kin of little likeness are told from them: a cosine of .2, far beyond 1/√1008, the chance in a tensor.
        near = kinship(a | moved[0], {name: x + 0.2 * a[name] for name, x in b.items()} | moved[1])
        assert near.verdict is True


def test_checkpoints_of_one_training_are_kin_and_too_few_tensors_say_nothing():
    first, *_, last = walk(0, 8)
    assert kinship(first, last).verdict is True
    assert kinship(first, walk(1, 1)[0]).verdict is False
    few = kinship({name: first[name] for name in ("t0", "t1", "t2")}, last)
    assert few.cosine > 0.8
    assert few.verdict is None
    assert kinship({}, last).verdict is None


def test_kin_of_which_some_tensors_were_turned_stay_kin():
    numbers = np.random.default_rng(0)
    a = {f"t{i}": numbers.standard_normal((16, 64)) for i in range(12)}
    turned = {name: x if i < 8 else -x for i, (name, x) in enumerate(a.items())}
    found = kinship(a, turned)
    assert (found.cosine, found.median) == pytest.approx((1 / 3, 1))
    assert found.p > 1e-4
    assert found.verdict
    few = {name: x if i < 5 else numbers.standard_normal((16, 64)) for i, (name, x) in enumerate(a.items())}
    assert kinship(a, few).verdict is False


@pytest.mark.parametrize(
    ("n_equal", "n_drawn", "verdict", "cosine"),
    [(8, 8, False, 0), (24, 97, False, 0), (3, 3, None, 0), (9, 8, True, 9 / 17)],
)
def test_tensors_that_are_equal_are_evidence_only_where_most_are(n_equal, n_drawn, verdict, cosine):
    """As masks are in strangers, and frozen blocks in kin."""
    numbers = np.random.default_rng(0)
    masks = {f"mask{i}": np.tril(np.ones((16, 64))) for i in range(n_equal)}
    a, b = ({f"t{i}": numbers.normal(size=(16, 64)) for i in range(n_drawn)} | masks for _ in "ab")
    found = kinship(a, b)
    assert found.verdict is verdict
    assert found.cosine == pytest.approx(cosine, abs=0.05)


@pytest.mark.parametrize("n_equal", [1, 2, 3, 4])
def test_a_small_model_with_frozen_tensors_is_kin(n_equal):
    """Also where fewer tensors than the test needs have moved."""
    numbers = np.random.default_rng(0)
    a = {f"t{i}": numbers.normal(size=(16, 64)) for i in range(6)}
    b = {name: x if i < n_equal else x + 0.1 * numbers.normal(size=(16, 64)) for i, (name, x) in enumerate(a.items())}
    assert kinship(a, b).verdict is True


def test_a_step_is_judged_against_those_before_it_once_they_have_settled():
    # Per training step: 4, 2, 1, 1, and then three times as long, over gaps of one length.
    assert overshoot([4, 2, 1, 1, 3], [1] * 5) == pytest.approx(3)
    # Noise grows as the root of the time, and drift as the time: neither is a jump.
    assert overshoot([4, 2, 1, 1, 4], [1, 1, 1, 1, 4]) == pytest.approx(1)
    assert overshoot([8, 4, 2, 2, 1], [4, 4, 4, 4, 1]) == pytest.approx(1)
    # In a warm-up steps grow; of three steps nothing is known yet.
    assert np.isnan(overshoot([1, 2, 4, 8, 20], [1] * 5))
    assert np.isnan(overshoot([4, 2, 9], [1] * 3))
    assert overshoot([1, 1, 1, 2.5], [10] * 4) == pytest.approx(2.5)


def test_births_are_what_pairs_of_kin_hold_together():
    kin = np.eye(6, dtype=bool)
    for a, b in ((0, 2), (2, 4), (1, 5)):
        kin[a, b] = kin[b, a] = True
    assert births(kin) == [[0, 2, 4], [1, 5], [3]]


def test_the_shortest_path_is_the_order_of_training():
    found = mean_distances(squared_distances(walk(0, 9)))
    expected = np.array([abs(i - j) for i, j in np.ndindex(9, 9)]).reshape(9, 9)
    np.testing.assert_allclose(found**2, 0.15**2 * expected, rtol=0.35)
    order = list(range(9))
    for start in ([0, 5, 2, 3, 4, 1, 6, 7, 8], [8, 2, 5, 0, 1, 7, 3, 6, 4]):
        path = shortest_path(found, start)
        assert path in (order, order[::-1])
        assert is_shorter(path, start, found)
    assert shortest_path(found, order) == order
    assert not is_shorter(order, order[::-1], found)
    # Of the steps that one of them alone takes: 4.4 or 4.6 against 5.
    for last, shorter in ((1.4, True), (1.6, False)):
        d = np.full((4, 4), 1.0)
        d[0, 1] = d[1, 0] = d[2, 3] = d[3, 2] = 2.5
        d[1, 2] = d[2, 1] = 9
        d[0, 2] = d[2, 0] = 3
        d[1, 3] = d[3, 1] = last
        assert is_shorter([1, 3, 0, 2], [2, 3, 0, 1], d) == shorter


@pytest.mark.parametrize("n", [0, 1, 2, 60])
def test_without_labels_the_search_begins_at_an_order_that_is_nearly_right(n):
    """So that it has little left to do; it would take many times as long from an order by chance."""
    numbers = np.random.default_rng(0)
    shuffled = numbers.permutation(n)
    x_MN = np.cumsum(numbers.normal(size=(n, 300)), 0)[shuffled]
    distance_MM = np.linalg.norm(x_MN[:, None] - x_MN, axis=2)
    start = nearest_path(distance_MM)
    assert sorted(start) == [*range(n)]
    steps = np.abs(np.diff(shuffled[start]))
    assert n < 2 or np.median(steps) == 1
    found = shuffled[shortest_path(distance_MM, start)].tolist()
    assert found in ([*range(n)], [*range(n)][::-1])


def test_tails_are_heavier_than_a_normals_or_not():
    numbers = np.random.default_rng(0)
    assert tailedness({"t": numbers.normal(size=(100, 100))}) == pytest.approx(0, abs=0.1)
    assert tailedness({"t": numbers.uniform(size=(100, 100))}) == pytest.approx(-1.2, abs=0.1)
    assert tailedness({"t": numbers.laplace(size=(100, 100))}) == pytest.approx(3, abs=0.8)
