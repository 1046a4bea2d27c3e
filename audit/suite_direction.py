"""Which end of a path of checkpoints is the earlier one.

A path through weights is as short from its end as from its beginning. What only a birth has tells the ends apart: there
every gain is 1 and every bias 0, so that the vectors of a model are constant, and the first steps of training make them
vary. Later they vary more and more, unless weight decay holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

#: The vectors of the later end must vary so many times as much as those of the earlier one, median over vectors.
GROWTH = 2.0


class Direction(NamedTuple):
    """Of a path, from what its first and its last checkpoint are."""

    towards: Literal["as labelled", "reversed", "unknown"]
    why: str
    """The evidence in a sentence."""


def find_direction(first: Mapping[str, float], last: Mapping[str, float]) -> Direction:
    """Whether training passed from the first checkpoint to the last.

    Only a constant vector is evidence for "reversed": what varies less and less may be held by weight decay.

    Args:
        first: tensor of one axis → standard deviation of its values, exactly 0 where all are alike.
        last: the same of the other end.
    """
    names = first.keys() & last.keys()
    begin, end = (sum(a[name] == 0 < b[name] for name in names) for a, b in ((first, last), (last, first)))
    if bool(begin) != bool(end):
        born, other = ("first", "last") if begin else ("last", "first")
        why = (
            f"{begin or end} of {len(names)} vectors of gains and biases are constant at the {born} checkpoint, "
            f"as at birth, and not at the {other}"
        )
        return Direction("as labelled" if begin else "reversed", why)
    grown = [last[name] / first[name] for name in names if first[name] > 0]
    if grown and (growth := float(np.median(grown))) >= GROWTH:
        why = f"gains and biases vary {growth:.1f} times as much at the last checkpoint as at the first"
        return Direction("as labelled", why)
    why = "at neither end are gains and biases constant, as at birth, and they do not grow"
    return Direction("unknown", why if names else "the model has no gains or biases, which are constant at birth")
