import math

import pytest

from birthmark.trainer.config import OptimConfig
from birthmark.trainer.lr_schedule import lr_share


def shares(max_steps=101, **settings):
    config = OptimConfig(**{"warmup_steps": 10, "min_lr_ratio": 0.1, **settings})
    return [lr_share(config, max_steps, step) for step in range(max_steps)]


def test_warm_up_rises_linearly_to_the_peak():
    assert shares()[:10] == pytest.approx([0.1 * i for i in range(1, 11)])


def test_cosine_is_half_a_cosine_that_ends_at_its_floor():
    after = shares()[10:]
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(91)]
    assert after == pytest.approx(expected)
    assert after[-1] == pytest.approx(0.1)


def test_wsd_stays_and_then_falls_linearly_over_its_share():
    after = shares(schedule="wsd", decay_ratio=0.5)[10:]
    assert after[:46] == [1.0] * 46
    assert after[45:] == pytest.approx([1 - 0.9 * i / 45 for i in range(46)])


def test_wsd_without_decay_is_constant():
    assert shares(schedule="wsd", decay_ratio=0.0) == shares(schedule="constant")


def test_constant_stays():
    assert set(shares(schedule="constant")[10:]) == {1.0}


def test_no_warm_up_starts_at_the_peak():
    assert shares(warmup_steps=0)[0] == 1.0


def test_a_run_shorter_than_its_warm_up_never_leaves_it():
    assert shares(max_steps=5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
