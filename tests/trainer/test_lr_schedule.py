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


@pytest.mark.parametrize("warmup_steps", [0, 10, 60])
@pytest.mark.parametrize("decay_ratio", [0.01, 0.2, 0.4, 0.5])
def test_wsd_stays_and_then_falls_in_equal_parts_over_its_share_of_the_run(warmup_steps, decay_ratio):
    found = shares(100, schedule="wsd", decay_ratio=decay_ratio, warmup_steps=warmup_steps)
    n_decay = min(round(100 * decay_ratio), 100 - 1 - warmup_steps)
    rate, expected = 1.0, []
    for step in range(warmup_steps, 100):
        if step >= 100 - n_decay:
            rate -= 0.9 / n_decay
        expected.append(rate)
    assert found[warmup_steps:] == pytest.approx(expected)
    assert found[-1] == pytest.approx(0.1)


def test_wsd_that_decays_all_along_is_a_straight_line_from_the_end_of_the_warm_up():
    after = shares(schedule="wsd", decay_ratio=1.0)[10:]
    assert after == pytest.approx([1 - 0.9 * i / 90 for i in range(91)])


def test_wsd_without_decay_is_constant():
    assert shares(schedule="wsd", decay_ratio=0.0) == shares(schedule="constant")


def test_constant_stays():
    assert set(shares(schedule="constant")[10:]) == {1.0}


def test_no_warm_up_starts_at_the_peak():
    assert shares(warmup_steps=0)[0] == 1.0


def test_a_run_shorter_than_its_warm_up_never_leaves_it():
    assert shares(max_steps=5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
