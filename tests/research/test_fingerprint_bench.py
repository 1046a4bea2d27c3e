"""The bench of fingerprints: its pairs, thresholds, rates, and tables."""

import math
from importlib import import_module

import numpy as np
import pytest
from scipy import stats

from birthmark.measure.hidden_states import FingerprintProbe


@pytest.fixture(scope="module")
def bench():
    """``bench(name)``: a module of ``research/fingerprints``."""
    return lambda name: import_module(f"birthmark.research.fingerprints.{name}")


def test_a_hundredth_of_strangers_passes_the_threshold_of_the_others(bench):
    threshold = bench("results").held_out_threshold
    scores = np.random.default_rng(0).standard_cauchy(300).tolist()
    passed = [x > threshold(scores[:i] + scores[i + 1 :], 0.01) for i, x in enumerate(scores)]
    assert sum(passed) == 3
    assert threshold(scores[:98], 0.01) == math.inf
    assert threshold(scores[:99], 0.01) == max(scores[:99])


def test_intervals_and_areas_by_their_definitions(bench):
    rates = bench("results")
    low, high = rates.Rate(3, 20).interval
    assert low == pytest.approx(stats.beta.ppf(0.025, 3, 18))
    assert high == pytest.approx(stats.beta.ppf(0.975, 4, 17))
    assert str(rates.Rate(3, 20)) == f"15 ({100 * low:.1f}–{100 * high:.1f})"
    assert str(rates.Rate(0, 0)) == "–"
    kin, strangers = [1.0, 2.0, 2.0, 5.0], [0.0, 2.0, 3.0]
    pairs = [(x > y) + (x == y) / 2 for x in kin for y in strangers]
    assert rates.area(kin, strangers) == pytest.approx(sum(pairs) / 12)
    assert math.isnan(rates.area(kin, []))


def planted(results, method, own_rule):
    """400 strangers with scores 0 … 399, every 20th called kin; kin in two groups, one of them without a test."""
    called = [i % 20 == 0 if own_rule else None for i in range(400)]
    rows = [results.Row(method, "strangers", "births", "f", float(i), own, 1.0) for i, own in enumerate(called)]
    kin = [(395.0, False), (397.0, False), (500.0, True)]
    rows += [results.Row(method, "kin", "trained", "f", x, own if own_rule else None, 3.0) for x, own in kin]
    return rows + [results.Row(method, "kin", "rotated", "f", None, None, 0.0)] * 2


def test_a_summary_counts_what_was_planted(bench):
    results = rates = bench("results")
    found = results.summary(planted(results, "m", own_rule=True))
    assert found.tested_kin == rates.Rate(3, 5)
    assert (found.own_power, found.own_false) == (rates.Rate(1, 3), rates.Rate(20, 400))
    # Every other stranger decides: 0, 2, … 398, of which the second largest is 396.
    assert found.threshold == 396
    assert found.power == rates.Rate(2, 3)
    assert found.false == rates.Rate(2, 200)
    assert found.power_of == {"trained": rates.Rate(2, 3), "rotated": rates.Rate(0, 0)}
    assert found.ms == pytest.approx(409 / 403)
    assert results.summary(planted(results, "m", own_rule=False)).own_power is None


def test_tables_say_where_there_is_no_rule_and_no_test(bench, tmp_path):
    results, page = bench("results"), bench("page")
    rows = planted(results, "with", own_rule=True) + planted(results, "without", own_rule=False)
    found = results.summaries(rows)
    with_rule, without = page.main_table(found)[2:]
    assert with_rule.startswith("| with | 60 | 33.3 (")
    assert "| no rule | no rule | 66.7 (" in without
    assert page.group_table(found, "power_of")[2:] == ["| trained | 3 | 67 | 67 |", "| rotated | 0 | – | – |"]
    assert page.group_table(found, "own_power_of")[0] == "| group | pairs | with |"
    assert page.cost_table(found, [bench("page").Cost("with", 1.25, None)])[2] == "| with | 1.0 | 1.25 | – |"
    page.draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def life(bench):
    """A newborn model of ours in the place of a trained one, and the probe."""
    models = pairs = bench("pairs")
    probe = FingerprintProbe(n_inputs=12, seq_len=4)
    births = [models.FAMILIES["ours, swiglu"](models.seed_of("ours, swiglu", i)) for i in range(2)]
    evidence = [bench("evidence").gather("birth", model, probe) for model in births]
    return [pairs.Life(e, e, e, model, 0.0) for e, model in zip(evidence, births, strict=True)], probe


def test_changed_models_meet_the_methods_that_undo_the_change(bench, life):
    (one, other), probe = life
    pairs, compare = bench("pairs"), bench("method").compare
    methods = {method.name: method for method in bench("methods").METHODS}
    found = {kind: pairs.changed(one, kind, other, 0, probe) for kind in pairs.CHANGES}
    assert all(found.values())

    def score(method, kind):
        return compare(methods[method], one.trained, found[kind]).score

    np.testing.assert_allclose(found["units permuted"].final.x_ND, one.trained.final.x_ND, atol=1e-5)
    np.testing.assert_allclose(found["all permuted"].final.x_ND, found["channels permuted"].final.x_ND, atol=1e-5)
    for kind in ("units permuted", "channels permuted", "both permuted", "all permuted"):
        assert score("HuRef, ICS", kind) == pytest.approx(1, abs=1e-5)
    for kind in ("channels permuted", "signs flipped", "units permuted"):
        assert score("AWM", kind) == pytest.approx(1, abs=1e-5)
    assert score("match", "both permuted") > 100 > score("csh", "both permuted")
    # Without the channels of values, `matched` finds the birth by them.
    assert score("`matched`", "both permuted") > 10 > score("`matched`", "all permuted")
    assert score("match", "rotated") > 100
    for kind in ("channels permuted", "signs flipped", "rotated"):
        assert score("`matched`", kind) > 10 > score("`dimensions`", kind)
    assert abs(score("HuRef, PCS", "channels permuted")) < 0.5 < score("HuRef, PCS", "int8")
    assert compare(methods["csu"], one.trained, found["block dropped"]) == bench("method").NoTest("blocks: 4 and 3")


def test_seeds_of_families_are_apart(bench):
    models = bench("pairs")
    most = 1000 + 2 * models.FULL.n_births
    seeds = [{models.seed_of(family, i) for i in range(most)} for family in models.FAMILIES]
    assert len(set().union(*seeds)) == most * len(seeds)


def test_training_lowers_the_loss_of_its_language(bench):
    models = bench("pairs")
    model = models.FAMILIES["ours, gelu"](1)
    first, later = (models.train(model, 0, start, 5) for start in (0, 5))
    assert later < first
