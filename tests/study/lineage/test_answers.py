"""Answers in one sentence: with their control, and never stronger than the tests behind them."""

import math
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from birthmark.metrics.seedprint import Fingerprint
from birthmark.study.lineage.answer import answer_of_models, answer_of_seeds
from birthmark.study.lineage.comparison import ModelPair


def made(z, *, verdict=None, reason=""):
    """A test with this z, judged as the metric does."""
    if math.isnan(z):
        return Fingerprint("dimensions", "undefined", z, z, z, 0, 100, reason or "5 inputs: at least 10 are needed")
    log10_p = -(z**2) / (2 * math.log(10)) if z > 0 else -0.1
    return Fingerprint("dimensions", verdict or ("kin" if log10_p < -2 else "stranger"), 0.1, z, log10_p, 32, 100)


def pairs_of(zs, n):
    return [ModelPair(a, b, made(z)) for (a, b), z in zip(combinations(range(n), 2), zs, strict=True)]


@pytest.mark.parametrize(
    ("z", "strangers", "sentence"),
    [
        (38.1, [1.2, 2.4], "b shares its birth with a: z 38.1, p < 10⁻³¹⁵, against strangers at most 2.4."),
        (38.1, [], "b shares its birth with a: z 38.1, p < 10⁻³¹⁵, without strangers as a control."),
        (1.2, [0.3],
         "a and b are strangers, as far as this test can see: z 1.2, p 0.487, against strangers at most 0.3."),
        (-57.2, [0.3],
         "a and b are no plain strangers: z -57.2, p 0.795, against strangers at most 0.3; z this far below 0 hints "
         "at kin with signs flipped, which --null matched undoes."),
        (math.nan, [0.3], "Whether b shares its birth with a cannot be told: 5 inputs: at least 10 are needed."),
        (4.2, [2.9],
         "Whether b shares its birth with a cannot be told: strangers do nearly as well (z 4.2, p < 10⁻³, against "
         "strangers at most 2.9)."),
    ],
)  # fmt: skip
def test_two_models(z, strangers, sentence):
    assert answer_of_models(["a", "b"], pairs_of([z], 2), [made(s) for s in strangers]) == sentence


@pytest.mark.parametrize(
    ("zs", "words"),
    [
        ([40, 30, 35], "All 3 models share one birth: kin have z 30.0 or more, against strangers at most 1.0."),
        ([40, 1, 0.5], "A birth is shared by a and b: kin have z 40.0 or more, against strangers at most 1.0, other"),
        ([1, 0.5, -1], "None of the 3 models is seen to share a birth with another: z at most 1.0, against strangers"),
        ([math.nan] * 3, "no test was possible; 3 of 3 pairs cannot be told."),
        ([40, math.nan, 0.5], "other pairs at most 0.5; 1 of 3 pairs cannot be told."),
    ],
)
def test_several_models(zs, words):
    assert words in answer_of_models(["a", "b", "c"], pairs_of(zs, 3), [made(1.0)])


def test_strangers_without_a_control_are_a_family_no_more_often_than_the_level_says():
    """20 models: 190 tests, of which the best is below .01 in 85 of 100 suites."""
    numbers, names = np.random.default_rng(0), [f"m{i}" for i in range(20)]
    said = []
    for z_P in numbers.normal(size=(60, 190)):
        log10_p_P = stats.norm.logsf(z_P) / math.log(10)
        tests = [replace(made(z), log10_p=p, verdict="kin" if p < -2 else "stranger")
                 for z, p in zip(z_P, log10_p_P, strict=True)]  # fmt: skip
        pairs = [ModelPair(a, b, test) for (a, b), test in zip(combinations(range(20), 2), tests, strict=True)]
        said.append(answer_of_models(names, pairs, []))
    families = [sentence for sentence in said if not sentence.startswith("None of the 20 models")]
    # Three standard deviations of a binomial share.
    assert len(families) <= 60 * (0.01 + 3 * (0.01 * 0.99 / 60) ** 0.5)
    assert all(" for 190 pairs, without strangers as a control" in sentence for sentence in said)
    many = answer_of_models(names[:3], pairs_of([40, 1, 0.5], 3), [])
    assert "kin have z 40.0 or more, p < 10⁻³⁴⁶ for 3 pairs, without strangers as a control, other pairs" in many


NAN = st.just(math.nan)


@given(st.lists(st.floats(-4, 60) | NAN, min_size=6, max_size=6), st.lists(st.floats(-4, 8) | NAN, max_size=4))
def test_only_models_that_a_clear_test_connects_share_a_birth(zs, control):
    pairs = pairs_of(zs, 4)
    sentence = answer_of_models(["aa", "bb", "cc", "dd"], pairs, [made(z) for z in control])
    most = max((z for z in control if not math.isnan(z)), default=-math.inf)
    # Without a control the chance of any of six pairs counts.
    least = most + 3.3 if most > -math.inf else math.sqrt(2 * math.log(600))
    clear = {(p.a, p.b) for p in pairs if p.fingerprint.verdict == "kin" and p.fingerprint.z >= least}
    named = {i for i, name in enumerate(("aa", "bb", "cc", "dd")) if name in sentence}
    shared = set(range(4)) if sentence.startswith("All") else named
    assert shared == {i for edge in clear for i in edge}
    assert ("without strangers" in sentence) == (most == -math.inf) or "no test was possible" in sentence


@pytest.mark.parametrize(
    ("zs", "words"),
    [
        ([34, 1.9, -1], "runs/a was born from seed 0: z 34.0, p < 10⁻²⁵¹ for 3 candidates, the other 2 at most 1.9."),
        ([5, 4.5], "Which seed runs/a was born from cannot be told: 0 has z 5.0"),
        ([1.2, 0.3], "None of 2 seeds is seen in runs/a: the best, 0, has z 1.2"),
        ([34], "for 1 candidate, without another to compare with."),
        ([1.2], "Seed 0 is not seen in runs/a: it has z 1.2"),
        ([math.nan], "Which seed runs/a was born from cannot be told: 5 inputs"),
    ],
)
def test_seeds(zs, words):
    sentence = answer_of_seeds("runs/a", [(seed, made(z)) for seed, z in enumerate(zs)])
    assert words in sentence
    assert not re.search(r"\bnan\b", sentence)
