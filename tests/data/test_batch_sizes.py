"""Sizes of a batch that grows, against Megatron-LM's rule applied one step after the other."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birthmark.data.batch_sizes import BatchRamp, BatchSizes
from birthmark.errors import UsageError
from birthmark.trainer.config import RunConfig, TrainerConfig


@given(start=st.integers(1, 9), increment=st.integers(1, 7), growths=st.integers(1, 9), sequences=st.integers(1, 300))
def test_sizes_are_those_of_megatron(start, increment, growths, sequences):
    sizes = BatchSizes(start + growths * increment, BatchRamp(start, increment, sequences))
    consumed = 0
    for step in range(60):
        reached = sizes.global_batch_size
        if consumed < sequences:
            reached = start + int(consumed / Fraction(sequences, growths)) * increment
        assert (sizes.size(step), sizes.before(step)) == (reached, consumed)
        consumed += reached


def test_without_a_ramp_all_steps_are_alike():
    sizes = BatchSizes(6)
    assert [(sizes.size(step), sizes.before(step)) for step in (0, 1, 10**9)] == [(6, 0), (6, 6), (6, 6 * 10**9)]


@pytest.mark.parametrize(
    ("ramp", "expected"),
    [
        (BatchRamp(16, 1, 10), "start is 16: give at least 1 and less than trainer.global_batch_size 16"),
        (BatchRamp(4, 5, 10), "increment is 5: give a number that divides the 12 sequences from start"),
        (BatchRamp(4, 0, 10), "increment is 0: give a number that divides the 12"),
        (BatchRamp(4, 4, 0), "sequences is 0: give at least 1"),
        (BatchRamp(0, 4, 0), "increment is 4, but there is no ramp: give trainer.batch_ramp.start too"),
    ],
)
def test_an_impossible_ramp_is_refused(ramp, expected):
    with pytest.raises(UsageError, match=expected):
        RunConfig(trainer=TrainerConfig(batch_ramp=ramp))


def test_a_ramp_that_does_not_fit_the_processes_or_the_engine_is_refused():
    with pytest.raises(UsageError, match=r"trainer\.batch_ramp\.start 4 is less than 5 processes: give 5 or more"):
        TrainerConfig(batch_ramp=BatchRamp(4, 4, 10)).shared_by(5)
    with pytest.raises(UsageError, match="batch_ramp is given, but zero2 takes as many micro-batches at every step"):
        RunConfig(trainer=TrainerConfig(strategy="zero2", batch_ramp=BatchRamp(4, 4, 10)))
