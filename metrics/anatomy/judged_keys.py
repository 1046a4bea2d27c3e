"""Which keys of a sequence can be called sinks."""

from __future__ import annotations


def n_judged_keys(n_positions: int) -> int:
    """How many keys, from the first, at least a quarter of all queries see.

    The importance of the last keys is a mean of few weights: a head that looks at the token itself would make a sink of
    each of them.
    """
    return n_positions - -(-n_positions // 4) + 1
