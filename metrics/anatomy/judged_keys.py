"""Keys of a sequence that can count as sinks."""

from __future__ import annotations


def n_judged_keys(n_positions: int) -> int:
    """Return the number of keys, from the first, that at least a quarter of all queries see.

    The importance of the last keys is a mean of few weights: a head that looks at the token itself would make a sink of
    each of them.
    """
    return n_positions - -(-n_positions // 4) + 1
