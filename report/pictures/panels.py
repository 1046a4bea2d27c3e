"""Choices that pictures of deep models make: the blocks, and the points of a line, that are drawn."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_PANELS = 12
"""Largest number of panels in small multiples; for more blocks `blocks_of_change` picks those that are drawn."""


def evenly_spaced(n: int, most: int = MAX_PANELS) -> list[int]:
    """Choose at most ``most`` of ``n`` indices, evenly, always with the first and the last."""
    return sorted({round(i) for i in np.linspace(0, n - 1, min(n, most))})


def blocks_of_change(profiles: Iterable[np.ndarray], n_blocks: int, most: int = MAX_PANELS) -> list[int]:
    """Choose the indices of at most ``most`` blocks: the first, the last, and both sides of the largest changes along
    depth.

    A change is the root mean square difference between neighbouring blocks, as a share of its profile's largest one.
    Ties go to the earlier block. Evenly spaced blocks fill the rest if nothing else changes.

    Args:
        profiles: quantities along the blocks, ``[L]`` or ``[L, X]`` each; logarithms if ratios count. A
            difference that is not finite is no change.
        n_blocks: L.
        most: blocks to pick, at least two.
    """
    largest = np.zeros(max(n_blocks - 1, 0))
    for profile in profiles:
        with np.errstate(invalid="ignore"):
            steps = np.diff(np.asarray(profile, dtype=float).reshape(n_blocks, -1), axis=0)
        change = np.sqrt(np.square(np.where(np.isfinite(steps), steps, 0.0)).mean(axis=1))
        if change.any():
            largest = np.maximum(largest, change / change.max())
    order = [int(i) for i in np.argsort(-largest, kind="stable") if largest[i] > 0]
    # Behind a change the new state stands, so that side comes first where one place is left.
    wanted = [0, n_blocks - 1, *(block for i in order for block in (i + 1, i)), *evenly_spaced(n_blocks, most)]
    return sorted(list(dict.fromkeys([*wanted, *range(n_blocks)]))[:most]) if n_blocks else []


def least_and_greatest(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of the least and the greatest of each group of neighbours: fewer points, without losing a
    peak.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    n_groups = limit // 2
    size, n_longer = divmod(len(values), n_groups)
    number = np.arange(n_groups + 1)
    starts = number * size + np.minimum(number, n_longer)
    places = starts[:-1, None] + np.arange(size + (n_longer > 0))
    inside, places = places < starts[1:, None], np.minimum(places, len(values) - 1)
    low, high = (np.where(np.isnan(values), worst, values) for worst in (np.inf, -np.inf))
    least = np.where(inside, low[places], np.inf).argmin(1)
    greatest = np.where(inside, high[places], -np.inf).argmax(1)
    return np.unique([0, *(starts[:-1] + least), *(starts[:-1] + greatest), len(values) - 1])
