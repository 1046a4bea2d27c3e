"""Standard error of a mean over sequences, and interval of a share of pairs."""

from __future__ import annotations

import numpy as np


def standard_error(values_N: np.ndarray) -> np.ndarray:
    """Compute the standard error of the mean over the first axis ``[N, …]``, from the spread of its entries; NaN for a
    single one.
    """
    n = len(values_N)
    return values_N.std(0, ddof=1) / n**0.5 if n > 1 else np.full(values_N.shape[1:], np.nan)


def mean_and_error(values_N: np.ndarray) -> tuple[float, float]:
    """Compute the mean of ``[N]`` and its standard error."""
    return float(values_N.mean()), float(standard_error(values_N))


def share_interval(k: int, n: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share, seen as ``k`` of ``n`` (Clopper & Pearson 1934); NaN if n is 0."""
    from scipy import stats

    if not n:
        return float("nan"), float("nan")
    found = stats.binomtest(k, n).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)
