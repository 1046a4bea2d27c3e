"""Spikes against the definition, written out slowly with scipy."""

import math

import numpy as np
from scipy.stats import median_abs_deviation

from birthmark.callbacks.training import Spikes


def slow(values):
    found = []
    for i, value in enumerate(values):
        before = [v for v in values[:i] if math.isfinite(v)][-128:]
        if not math.isfinite(value) or len(before) < 32 or value <= max(before):
            continue
        spread = median_abs_deviation(before, scale="normal")
        if (value - np.median(before)) / spread > 6:
            found.append(i)
    return found


def test_spikes_are_those_of_the_definition_however_often_one_looks_and_after_a_pause():
    values = np.random.default_rng(0).normal(3, 0.1, 400)
    values[[5, 40, 200, 201, 202, 399]] += [0.2, 1, 2, 0.8, 2.5, 5]
    values[300] = math.nan
    expected = slow(values.tolist())
    assert {40, 200, 202, 399} <= set(expected)
    spikes, found = Spikes(), []
    for part in np.array_split(np.arange(400), 7):
        found += spikes.take(part.tolist(), values[part].tolist())
        state, spikes = spikes.state(), Spikes()
        spikes.load(state)
    assert [spike.step for spike in found] == expected
    assert spikes.count == len(expected)


def test_a_falling_loss_a_constant_one_and_a_new_level_are_no_series_of_spikes():
    falling = Spikes()
    assert not falling.take(range(200), [5 * 0.98**i for i in range(200)])
    constant = Spikes()
    assert not constant.take(range(200), [1.0] * 200)
    step_up = [1.0 + 0.01 * (i % 7) for i in range(100)] + [2.0 + 0.01 * (i % 7) for i in range(100)]
    assert [spike.step for spike in Spikes().take(range(200), step_up)][:1] == [100]
    assert Spikes().take(range(200), step_up)[-1].step < 110
