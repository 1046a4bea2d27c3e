import math

import pytest

from birthmark.trainer.config import OptimConfig
from birthmark.trainer.lr_schedule import LearningRate


def shares(max_steps=101, **settings):
    config = OptimConfig(**{"warmup_steps": 10, "min_lr_ratio": 0.1, **settings})
    rate = LearningRate(config, max_steps, lambda step: 7 * step)
    return [rate.share(step) for step in range(max_steps)]


RISE = [0.1 * i for i in range(1, 11)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, RISE + [0.1 + 0.9 * (1 + math.cos(math.pi * i / 90)) / 2 for i in range(91)]),
        ({"schedule": "wsd", "decay_ratio": 1.0}, RISE + [1 - 0.9 * i / 90 for i in range(91)]),
        ({"schedule": "wsd", "decay_ratio": 0.0}, RISE + 91 * [1.0]),
        ({"schedule": "constant"}, RISE + 91 * [1.0]),
        ({"schedule": "constant", "warmup_steps": 0}, 101 * [1.0]),
        # A run shorter than its warm-up never leaves it.
        ({"max_steps": 5}, RISE[:5]),
    ],
    ids=str,
)
def test_a_schedule_is_its_formula_step_by_step(settings, expected):
    assert shares(**settings) == pytest.approx(expected)


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


@pytest.mark.parametrize("tokens", [60, 50])
def test_warm_up_by_tokens_follows_the_tokens_seen(tokens):
    """Steps of 10, 10, 20, 20, 20 … tokens; the peak is reached by the step with the last token, and not passed."""
    config = OptimConfig(warmup_tokens=tokens, schedule="constant")
    rate = LearningRate(config, 7, lambda step: 10 * step if step < 2 else 20 * (step - 1))
    rise = [10 / tokens, 20 / tokens, 40 / tokens]
    assert [rate.share(step) for step in range(7)] == pytest.approx([*rise, 1, 1, 1, 1])
    assert rate.warmup_steps == 4


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_by_tokens_is_that_by_steps_where_all_steps_are_alike(schedule):
    by_steps = LearningRate(OptimConfig(warmup_steps=8, schedule=schedule), 30, lambda step: 5 * step)
    by_tokens = LearningRate(OptimConfig(warmup_tokens=40, schedule=schedule), 30, lambda step: 5 * step)
    assert [by_tokens.share(step) for step in range(30)] == [by_steps.share(step) for step in range(30)]


def test_a_warm_up_is_given_in_steps_or_tokens():
    expected = "optim.warmup_tokens is 60, and optim.warmup_steps 10: give one of them"
    assert OptimConfig(warmup_tokens=60, warmup_steps=10).problems() == [expected]
    assert not OptimConfig(warmup_tokens=60).problems()
    assert "optim.warmup_tokens is -1" in OptimConfig(warmup_tokens=-1).problems()[0]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize(("field", "value"), [("min_lr_ratio", 0.3), ("decay_ratio", 0.5)])
def test_a_field_that_changes_no_learning_rate_is_refused(schedule, field, value):
    plain, changed = OptimConfig(schedule=schedule), OptimConfig(**{"schedule": schedule, field: value})
    rates = [LearningRate(config, 101, lambda step: step) for config in (plain, changed)]
    without_effect = all(rates[0].share(step) == rates[1].share(step) for step in range(101))
    line = f"optim.{field} is {value}, which schedule {schedule} does not read: remove it"
    assert [problem.startswith(line) for problem in changed.problems()] == [True] * without_effect
