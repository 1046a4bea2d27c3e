"""Alignments and pairings of the null ``matched``: against enumeration, loops, scipy, and planted changes."""

import itertools

import numpy as np
import pytest
from scipy import linalg, stats

from birthmark.metrics.matched_weights import (
    StreamWeights,
    block_cosines,
    compare_weights,
    cosine_matrix,
    pair_reordered_units,
    pair_units,
    rotation,
    signed_permutation,
    spread_rows,
)


def weights(seed, n=40, d=12, rows=60, blocks=2):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tables = {"embedding": draw(rows, d), "head": draw(rows, d)}
    return StreamWeights(tables, {f"b{i}": draw(n, 2, d) for i in range(blocks)})


def mapped(given, change):
    return StreamWeights(*({name: change(x) for name, x in part.items()} for part in (given.tables, given.units)))


def noisy(given, size, seed=9):
    rng = np.random.default_rng(seed)
    return mapped(given, lambda x: x + size * rng.standard_normal(x.shape).astype(np.float32))


def test_the_signed_permutation_is_the_best_of_all():
    a, b = (weights(seed, d=4, rows=20).tables for seed in (0, 1))
    found = signed_permutation(a, b)
    m = np.mean([np.corrcoef(a[t].T, b[t].T)[:4, 4:] for t in a], axis=0)
    best = max(itertools.permutations(range(4)), key=lambda order: sum(abs(m[i, order[i]]) for i in range(4)))
    signs = [np.sign(m[i, best[i]]) for i in range(4)]
    np.testing.assert_array_equal(found(np.arange(1.0, 5.0)), [signs[i] * (best[i] + 1) for i in range(4)])


def test_the_rotation_is_scipys():
    a, b = (weights(seed).tables for seed in (0, 1))
    stacked = [np.concatenate([(x - x.mean(0)) / np.linalg.norm(x - x.mean(0)) for x in t.values()]) for t in (a, b)]
    q, _ = linalg.orthogonal_procrustes(stacked[1].astype(float), stacked[0].astype(float))
    np.testing.assert_allclose(rotation(a, b)(np.eye(12, dtype=np.float32)), q, atol=1e-5)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_statistic_and_its_moments_are_those_of_every_pairing(by_channel):
    a, b = weights(0, n=4, d=5), weights(1, n=4, d=5)
    if by_channel:
        a_units, b_units = ([x / np.sqrt((x**2).sum(0)) for x in w.units.values()] for w in (a, b))
    else:
        a_units, b_units = (list(w.units.values()) for w in (a, b))

    def cosine(x, y):
        return np.mean([p @ q / np.linalg.norm(p) / np.linalg.norm(q) for p, q in zip(x, y, strict=True)])

    orders = list(itertools.permutations(range(4)))
    every = [
        np.mean([cosine(a_units[i][j], b_units[i][order[j]]) for i, order in enumerate(two) for j in range(4)])
        for two in itertools.product(orders, orders)
    ]
    found = pair_units(block_cosines(a, b, lambda x: x, by_channel=by_channel))
    assert found.statistic == pytest.approx(every[0], abs=1e-6)
    assert (found.mean, found.sd, found.k) == pytest.approx((np.mean(every), np.std(every), 8), abs=1e-6)


def test_a_map_that_is_zero_counts_as_zero():
    x = weights(0).units["b0"]
    half = x.copy()
    half[:, 1] = 0
    np.testing.assert_allclose(np.diag(cosine_matrix(half, half)), 0.5, atol=1e-6)


ORDER, SIGNS = np.random.default_rng(5).permutation(12), np.random.default_rng(6).choice([-1, 1], 12)
TURN = np.linalg.qr(np.random.default_rng(7).standard_normal((12, 12)))[0].astype(np.float32)
FACTORS = np.exp(np.random.default_rng(8).standard_normal(12)).astype(np.float32)


@pytest.mark.parametrize(
    ("change", "alignment"),
    [
        (lambda x: x, None),
        (lambda x: x[..., ORDER], None),
        (lambda x: (x * SIGNS).astype(np.float32), None),
        (lambda x: -x, None),
        (lambda x: (x * FACTORS)[..., ORDER], "permutation"),
        (lambda x: x @ TURN, "rotation"),
    ],
    ids=["same", "order", "signs", "negation", "factors", "rotation"],
)
def test_kin_are_kin_and_strangers_strangers_whatever_became_of_the_channels(change, alignment):
    own, other = weights(0), weights(1)
    found, strange = (compare_weights(own, mapped(noisy(x, 0.3), change)) for x in (own, other))
    assert (found.verdict, strange.verdict) == ("kin", "stranger")
    assert found.z > 15
    assert alignment in (None, found.alignment)
    assert found.statistic > 0.7
    assert (found.k, found.n_inputs, found.null) == (80, 60, "matched")
    assert compare_weights(own, mapped(own, lambda x: x)).alignment


def test_units_in_another_order_are_strangers():
    own = weights(0)
    order = np.random.default_rng(0).permutation(40)
    shuffled = StreamWeights(own.tables, {name: x[order] for name, x in own.units.items()})
    found = compare_weights(own, mapped(noisy(shuffled, 0.2), lambda x: x @ TURN))
    assert found.verdict == "stranger"
    assert "hints at kin whose hidden units stand in another order" in found.warnings[0]
    # Strangers whose maps are independent are not hinted at, and their z is one of random pairings.
    z = [pair_reordered_units(block_cosines(weights(i), weights(i + 1), lambda x: x)).z for i in range(0, 80, 2)]
    assert abs(np.mean(z)) < 3.5 / np.sqrt(40)
    assert 0.7 < np.std(z) < 1.3
    assert all(compare_weights(weights(i), weights(i + 1)).warnings == () for i in range(0, 80, 2))


def test_reordered_units_are_paired_by_one_half_and_compared_by_the_other():
    a, b = weights(0, n=4, blocks=1), weights(1, n=4, blocks=1)
    first, second = (cosine_matrix(a.units["b0"][:, [m]], b.units["b0"][:, [m]]) for m in (0, 1))
    best = max(itertools.permutations(range(4)), key=lambda order: first[range(4), order].sum())
    found = pair_reordered_units(block_cosines(a, b, lambda x: x))
    assert found.statistic == pytest.approx(second[range(4), best].mean(), abs=1e-6)
    assert found.mean == pytest.approx(second.mean(), abs=1e-6)


def test_of_three_maps_two_are_read_and_one_is_written():
    """As in gated MLPs."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((4, 3, 12)).astype(np.float32) for _ in "ab")
    read, written = cosine_matrix(a[:, :2], b[:, :2]), cosine_matrix(a[:, 2:], b[:, 2:])
    best = max(itertools.permutations(range(4)), key=lambda order: read[range(4), order].sum())
    blocks = block_cosines(StreamWeights({}, {"b": a}), StreamWeights({}, {"b": b}), lambda x: x)
    assert pair_reordered_units(blocks).statistic == pytest.approx(written[range(4), best].mean(), abs=1e-6)
    assert pair_units(blocks).statistic == pytest.approx(cosine_matrix(a, b).trace() / 4, abs=1e-6)


def test_strangers_that_share_what_their_channels_and_tokens_are_for_stay_strangers():
    """As training on the same text does: directions of tokens, sizes of channels, and what units like to read."""
    rng = np.random.default_rng(0)
    tokens, sizes = rng.standard_normal((60, 3)), np.exp(rng.standard_normal(12))
    p = []
    for pair in range(100):
        models = []
        for seed in (2 * pair, 2 * pair + 1):
            drawn = weights(100 + seed)
            common = np.random.default_rng(100 + seed).standard_normal((3, 12))  # where a model puts what it learnt
            tables = {name: (x + 3 * tokens @ common) * sizes for name, x in drawn.tables.items()}
            units = {
                name: (x + rng.standard_normal((40, 2, 3)) @ (3 * common) + 2 * common[0]) * sizes
                for name, x in drawn.units.items()
            }
            models.append(mapped(StreamWeights(tables, units), lambda x: x.astype(np.float32)))
        p.append(compare_weights(*models).p)
    # p of the better of two tests, doubled: below 2α no more often than α of each.
    assert np.mean(np.array(p) < 0.1) < 0.18
    assert np.mean(np.array(p) < 0.01) < 0.04


def test_what_cannot_be_tested_says_why():
    own = weights(0)
    nan = mapped(own, lambda x: x * np.float32(np.nan))
    assert "NaN or inf" in compare_weights(own, nan).reason
    unknown = StreamWeights(own.tables, {})
    assert "units of this model's blocks are not known" in compare_weights(own, unknown).reason
    assert "no block of one has units as many" in compare_weights(own, weights(1, n=30)).reason
    flat = mapped(own, np.zeros_like)
    assert "alike" in compare_weights(own, StreamWeights(own.tables, flat.units)).reason
    with pytest.raises(ValueError, match="different shapes"):
        compare_weights(own, weights(0, rows=70))
    assert "rough below 30" in compare_weights(weights(0, n=29, blocks=1), weights(1, n=29, blocks=1)).warnings[0]
    assert compare_weights(weights(0, n=30, blocks=1), weights(1, n=30, blocks=1)).warnings == ()
    # Units of one map cannot be paired by one half of their maps and compared by the other.
    single = [StreamWeights(w.tables, {name: x[:, :1] for name, x in w.units.items()}) for w in (own, weights(1))]
    assert (found := compare_weights(*single)).verdict == "stranger"
    assert found.warnings == ()
    tied = StreamWeights({"embedding": own.tables["embedding"]}, own.units)
    assert compare_weights(own, tied).verdict == "kin"


def test_p_is_that_of_the_better_alignment_doubled():
    a, b = weights(0), weights(1)
    z = []
    for aligned, by_channel in ((signed_permutation, True), (rotation, False)):
        found = pair_units(block_cosines(a, b, aligned(a.tables, b.tables), by_channel=by_channel))
        z.append((found.statistic - found.mean) / found.sd)
    assert compare_weights(a, b).p == pytest.approx(min(1, 2 * stats.norm.sf(max(z))), rel=1e-6)


def test_spread_rows_reach_from_the_first_to_the_last():
    assert spread_rows(5, 9).tolist() == [0, 1, 2, 3, 4]
    found = spread_rows(1000, 7)
    assert (found[0], found[-1], len(set(found.tolist()))) == (0, 999, 7)
