"""Places of the names of points, so that none lies on another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ANGLES = np.deg2rad([0, 45, -45, 180, 135, -135, 90, -90, 22, -22, 158, -158, 67, -67, 113, -113])
_RADII = (1.0, 1.8, 2.8, 4.0, 5.5, 7.5, 10.0, 13.0)


def place_labels(
    points: np.ndarray, sizes: np.ndarray, box: Sequence[float], gap: float, taken: np.ndarray | None = None
) -> np.ndarray:
    """Return the lower left corners ``[N, 2]`` of ``N`` labels, each as near to its point as the others allow.

    Crowded points choose first. If no place is free, the one with the least overlap is taken.

    Args:
        points: ``[N, 2]`` x and y; labels keep clear of all of them.
        sizes: ``[N, 2]`` width and height of each label, in the same unit.
        box: left, bottom, right, top, which labels stay within.
        gap: distance of a label from its point at the nearest.
        taken: ``[M, 4]`` rectangles that labels keep clear of too.
    """
    n = len(points)
    corners = np.zeros((n, 2))
    # Rectangles as left, bottom, right, top.
    dots = np.concatenate([points - gap / 2, points + gap / 2], axis=1)
    placed = dots if taken is None else np.concatenate([dots, taken])
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    crowd = np.exp(-distance / (10 * gap)).sum(1)
    for i in np.argsort(-crowd, kind="stable"):
        candidates = _around(points[i], sizes[i], gap)
        rectangles = np.concatenate([candidates, candidates + sizes[i]], axis=1)
        outside = (
            np.maximum(0, np.array(box[:2]) - rectangles[:, :2]) + np.maximum(0, rectangles[:, 2:] - np.array(box[2:]))
        ).sum(1)
        cost = _overlap(rectangles, placed).sum(1) + outside * sizes[i].sum()
        corners[i] = candidates[cost.argmin()]  # the first of the best: the nearest
        placed = np.concatenate([placed, rectangles[cost.argmin()][None]])
    return corners


def spread_apart(places: np.ndarray, gap: float, low: float, high: float) -> np.ndarray:
    """Return heights ``[N]`` as near to ``places`` as a distance of ``gap`` between any two and the bounds allow.

    The order stays; if the bounds are too narrow, the distance is smaller than ``gap``.
    """
    from scipy.optimize import isotonic_regression

    n = len(places)
    if not n:
        return np.zeros(0)
    gap = min(gap, (high - low) / max(n - 1, 1))
    order = np.argsort(places, kind="stable")
    # Without the gaps it is isotonic regression: neighbours in the wrong order share their mean.
    even = isotonic_regression(places[order] - gap * np.arange(n)).x
    found = np.empty(n)
    found[order] = np.clip(even, low, high - gap * (n - 1)) + gap * np.arange(n)
    return found


def _around(point: np.ndarray, size: np.ndarray, gap: float) -> np.ndarray:
    """Return corners of a label around a point, near ones first."""
    directions = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], axis=1)
    # The side of the label that faces the point lies on the circle.
    anchors = -(1 - directions) / 2 * size
    return np.concatenate([point + radius * gap * directions + anchors for radius in _RADII])


def _overlap(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compute the areas that rectangles ``[A, 4]`` share with rectangles ``[B, 4]``: ``[A, B]``."""
    low = np.maximum(some[:, None, :2], others[None, :, :2])
    high = np.minimum(some[:, None, 2:], others[None, :, 2:])
    return np.prod(np.maximum(0, high - low), axis=-1)
