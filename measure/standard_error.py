"""How sure a mean over sequences is."""

from __future__ import annotations

import numpy as np


def standard_error(values_N: np.ndarray) -> np.ndarray:
    """Of the mean over the first axis ``[N, …]``, from the spread of its entries; NaN of a single one."""
    n = len(values_N)
    return values_N.std(0, ddof=1) / n**0.5 if n > 1 else np.full(values_N.shape[1:], np.nan)


def mean_and_error(values_N: np.ndarray) -> tuple[float, float]:
    """Mean of ``[N]`` and its standard error."""
    return float(values_N.mean()), float(standard_error(values_N))
