"""Cache of values that are computed for many samples at once, for the samples that follow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NEAR = 1 << 14
"""Samples that are looked at together: to find eight costs as much as to find a thousand."""


class Nearby:
    """Arrays of samples by their number, computed `NEAR` at a time; the last two lots are kept."""

    def __init__(self) -> None:
        self._lots: dict[int, tuple[np.ndarray, ...]] = {}

    def between(
        self, first: int, last: int, find: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    ) -> tuple[np.ndarray, ...]:
        """Return the arrays of samples ``first`` to ``last``, exclusive: each ``[last - first, ...]``.

        Args:
            first: first sample.
            last: one past them, above ``first``.
            find: function from sample numbers, int64 ``[n]``, to arrays; always the same function.
        """
        found = []
        for number in range(first // NEAR, -(-last // NEAR)):
            if number not in self._lots:
                if len(self._lots) > 1:
                    self._lots.clear()
                self._lots[number] = find(np.arange(number * NEAR, (number + 1) * NEAR, dtype=np.int64))
            here = slice(max(first - number * NEAR, 0), last - number * NEAR)
            found.append([array[here] for array in self._lots[number]])
        return tuple(parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*found, strict=True))
