"""The loss barrier on the straight line between two models (definitions, between models)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Barrier(NamedTuple):
    """Largest rise of the loss above the straight line between its ends."""

    height: float
    """Nats; 0 where the loss is nowhere above that line: the two are linearly connected."""
    alpha: float
    """Position of the highest point; 0 is the first model."""


def loss_barrier(alphas: Sequence[float], losses: Sequence[float]) -> Barrier:
    """Return ``max_α L(α) − ((1 − α)·L(0) + α·L(1))``, over the measured points (Frankle et al., arXiv 1912.05671; the
    baseline of Entezari et al., arXiv 2110.06296).

    Args:
        alphas: rising from 0 to 1.
        losses: the loss at each.
    """
    a, found = np.asarray(alphas, np.float64), np.asarray(losses, np.float64)
    excess = found - ((1 - a) * found[0] + a * found[-1])
    at = int(excess.argmax())
    return Barrier(float(excess[at]), float(a[at]))
