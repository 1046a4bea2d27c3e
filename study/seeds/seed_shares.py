"""Shares of a variance that two crossed seeds make: two random factors, one run for each pair.

`y[i, j] = μ + a[i] + b[j] + e[i, j]`, all three random and independent; `e` is the remainder, the interaction of the
two seeds and everything else that differs between two runs. The components are estimated by the moments of the analysis
of variance (Searle, Casella and McCulloch, Variance Components, 1992, ch. 4). Their shares have generalised confidence
intervals (Weerahandi, J. Am. Stat. Assoc. 88, 1993), which Burdick, Borror and Montgomery (Design and Analysis of Gauge
R&R Studies, 2005) recommend for this very design; no exact interval of a share of the total is known.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats

#: Draws of an interval; their own error is well below that of an interval from a few seeds.
_DRAWS = 20_000


class Share(NamedTuple):
    """A share of the total variance, from 0 to 1."""

    value: float
    low: float
    high: float


class Shares(NamedTuple):
    """Shares of the sources of a variance."""

    init: Share
    data: Share
    rest: Share
    """Share of the interaction, and of everything that neither seed decides."""
    p_init: float
    """Chance of an F as large without any effect of the birth; exact for normal effects."""
    p_data: float


class Squares(NamedTuple):
    """Mean squares of the two-way analysis of variance, with their degrees of freedom."""

    init: float
    data: float
    rest: float
    n: int
    """Births."""
    m: int
    """Orders of the data."""

    @property
    def freedom(self) -> tuple[int, int, int]:
        """Degrees of freedom of the births, the orders and the rest."""
        return self.n - 1, self.m - 1, (self.n - 1) * (self.m - 1)


def mean_squares(values_NM: np.ndarray) -> Squares:
    """Compute mean squares of ``[births, orders]``, at least two of each, all finite; those of rounding alone are 0.

    Raises:
        ValueError: there are fewer, or one is not finite.
    """
    n, m = values_NM.shape
    if n < 2 or m < 2 or not np.isfinite(values_NM).all():
        raise ValueError(f"{n} × {m} values: needs two of each at least, all finite")
    # A common offset would cost digits.
    centred = values_NM - values_NM.mean()
    by_init, by_data = centred.mean(1), centred.mean(0)
    rest = centred - by_init[:, None] - by_data[None, :]
    rounding = (1e-12 * float(np.abs(values_NM).max())) ** 2

    def per_freedom(squares: float, freedom: int) -> float:
        return squares / freedom if squares / freedom > rounding else 0.0

    return Squares(
        init=per_freedom(float(m * (by_init**2).sum()), n - 1),
        data=per_freedom(float(n * (by_data**2).sum()), m - 1),
        rest=per_freedom(float((rest**2).sum()), (n - 1) * (m - 1)),
        n=n,
        m=m,
    )


def variance_shares(values_NM: np.ndarray, confidence: float = 0.95, draws: int = _DRAWS) -> Shares | None:
    """Estimate the shares of ``[births, orders]``; None if all values are the same.

    A component below 0 counts 0. The draws of the intervals are the same at every call.

    Args:
        values_NM: one figure of every run.
        confidence: confidence of each interval, two-sided.
        draws: number of draws of the pivotal quantities.

    Raises:
        ValueError: see :func:`mean_squares`.
    """
    found = mean_squares(values_NM)
    components = _components(np.array(found.init), np.array(found.data), np.array(found.rest), found)
    total = float(components.sum())
    if total == 0:
        return None
    rng = np.random.Generator(np.random.Philox(key=0))
    squares = (found.init, found.data, found.rest)
    init, data, rest = (ms * df / rng.chisquare(df, draws) for ms, df in zip(squares, found.freedom, strict=True))
    pivots = _components(init, data, rest, found)
    sums = pivots.sum(0)
    tail = (1 - confidence) / 2
    low, high = np.quantile(pivots / np.where(sums > 0, sums, 1.0), [tail, 1 - tail], axis=1)
    of_init, of_data, of_rest = (
        Share(float(component) / total, float(a), float(b))
        for component, a, b in zip(components, low, high, strict=True)
    )
    return Shares(of_init, of_data, of_rest, _p(found.init, found, 0), _p(found.data, found, 1))


def _components(init: np.ndarray, data: np.ndarray, rest: np.ndarray, of: Squares) -> np.ndarray:
    """Compute the variances ``[3, …]`` that have these mean squares as their expectations, none below 0."""
    return np.stack([np.maximum((init - rest) / of.m, 0.0), np.maximum((data - rest) / of.n, 0.0), rest])


def _p(square: float, found: Squares, factor: int) -> float:
    """Return p of the F test of a factor."""
    if found.rest == 0:
        return 0.0 if square > 0 else 1.0
    return float(stats.f.sf(square / found.rest, found.freedom[factor], found.freedom[2]))
