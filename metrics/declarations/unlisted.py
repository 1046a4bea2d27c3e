"""A quantity that appears in no table unless it asks to, and the conditions that declarations name for a quantity."""

from __future__ import annotations

from functools import partial

from ..quantity import Quantity

unlisted = partial(Quantity, over_training=None, by_block=None)
"""A quantity that stands in no table."""

BIRTH_KNOWN = "the model's birth is known"
STRANGERS_MEASURED = "births of other seeds are measured"
ROWS_NOT_ONE = "rows of weights need not sum to 1"
