"""Kinship and order of weights, on walks whose order is known."""

from itertools import pairwise, permutations

import numpy as np
import pytest
from scipy import stats

from birthmark.metrics import weight_kinship
from birthmark.metrics.weight_kinship import (
    births,
    is_shorter,
    kinship,
    kinships,
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
    assert (none := kinship({}, last)).verdict is None
    assert np.isnan(none.cosine)


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


def length(path, distance_MM):
    return sum(distance_MM[a, b] for a, b in pairwise(path))


def slow_moves(path):
    """Every move of the search, built as a list."""
    n = len(path)
    for i in range(n):
        for j in range(i + 1, n):
            yield [*path[:i], *path[i : j + 1][::-1], *path[j + 1 :]]
            yield [*path[:i], path[j], *path[i + 1 : j], path[i], *path[j + 1 :]]
        for size in (1, 2, 3):
            part, rest = path[i : i + size], [*path[:i], *path[i + size :]]
            yield from ([*rest[:j], *part, *rest[j:]] for j in range(len(rest) + 1))


def slow_search(distance_MM, start):
    """Take the first move that shortens the path, its whole length summed, until none does."""
    better = list(start)
    while better:
        path = better
        least = length(path, distance_MM) - 1e-12
        better = next((new for new in slow_moves(path) if length(new, distance_MM) < least), None)
    return path


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7])
def test_a_small_suite_in_any_order_has_the_shortest_of_all_paths(n):
    for seed in range(6):
        numbers = np.random.default_rng(seed)
        x_MN = np.cumsum(numbers.normal(size=(n, 40)), 0)
        distance_MM = np.linalg.norm(x_MN[:, None] - x_MN, axis=2)
        found = shortest_path(distance_MM, numbers.permutation(n).tolist())
        shortest = min(length(path, distance_MM) for path in permutations(range(n)))
        assert length(found, distance_MM) == pytest.approx(shortest, rel=1e-12)


def test_the_search_leaves_no_move_that_helps_and_finds_as_short_paths_as_the_sum_of_every_path_does():
    lengths = {"walk": [], "points": []}
    for seed in range(12):
        numbers = np.random.default_rng(seed)
        walk_MN, points_MN = np.cumsum(numbers.normal(size=(12, 40)), 0), numbers.normal(size=(12, 2))
        for kind, x_MN in (("walk", walk_MN), ("points", points_MN)):
            distance_MM, start = np.linalg.norm(x_MN[:, None] - x_MN, axis=2), numbers.permutation(12).tolist()
            found = shortest_path(distance_MM, start)
            assert sorted(found) == [*range(12)]
            assert min(length(path, distance_MM) for path in slow_moves(found)) >= length(found, distance_MM) - 1e-9
            lengths[kind].append([length(path, distance_MM) for path in (found, slow_search(distance_MM, start))])
    walks, points = (np.array(lengths[kind]) for kind in ("walk", "points"))
    assert (walks[:, 0] <= walks[:, 1] + 1e-9).all()
    # Points without an order have many paths that no move shortens; on average the search ends at none longer.
    assert points[:, 0].mean() <= points[:, 1].mean()


def test_a_suite_of_154_in_no_order_is_sorted_in_few_sums(monkeypatch):
    """By the changes of all moves at once: fewer than one pass over the moves for each checkpoint."""
    passes, changes = [], weight_kinship._changes
    monkeypatch.setattr(weight_kinship, "_changes", lambda d_PP: passes.append(1) or changes(d_PP))
    numbers = np.random.default_rng(0)
    x_MN = np.cumsum(numbers.normal(size=(154, 300)), 0)
    square_M = (x_MN**2).sum(1)
    distance_MM = np.sqrt(np.maximum(square_M[:, None] + square_M - 2 * x_MN @ x_MN.T, 0))
    found = shortest_path(distance_MM, numbers.permutation(154).tolist())
    assert found in ([*range(154)], [*range(154)][::-1])
    assert len(passes) < 154


def test_many_pairs_have_the_chances_of_each_alone(monkeypatch):
    """By Student's t and a normal, pair by pair; scipy is asked once for all, and gives NaN where tensors are few."""
    suite = [*walk(0, 4), *walk(1, 2), {"t0": walk(0, 1)[0]["t0"]}]
    asked, sf = [], stats.t.sf
    monkeypatch.setattr(stats.t, "sf", lambda *of: asked.append(1) or sf(*of))
    tests = kinships(suite)
    assert len(asked) == 1
    for a, b in permutations(range(7), 2):
        if 6 in (a, b):
            assert tests[a][b].verdict is None
            continue
        x, y = ([one[f"t{i}"] - one[f"t{i}"].mean(1, keepdims=True) for i in range(8)] for one in (suite[a], suite[b]))
        cosines = [float((u * v).sum() / np.linalg.norm(u) / np.linalg.norm(v)) for u, v in zip(x, y, strict=True)]
        expected = stats.ttest_1samp(cosines, 0, alternative="greater").pvalue
        assert tests[a][b].p == pytest.approx(expected, rel=1e-4)
        # Each of four runs of 64 is centred.
        assert tests[a][b].median_p == pytest.approx(stats.norm.sf(np.median(cosines) * (4 * 63) ** 0.5), rel=1e-4)


@pytest.mark.parametrize("n", [0, 1, 2, 60])
def test_without_labels_the_search_begins_at_an_order_that_is_nearly_right(n):
    """So that it has little left to do."""
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
