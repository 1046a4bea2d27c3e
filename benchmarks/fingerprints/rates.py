"""Error rates of methods: thresholds from held-out strangers, rates with intervals, areas under curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, nan

import numpy as np
from scipy import stats

from birthmark.measure.next_tokens import share_interval


@dataclass(frozen=True)
class Rate:
    """``k`` of ``n``, with its 95 % interval."""

    k: int
    n: int

    @property
    def share(self) -> float:
        """``k / n``; NaN if ``n`` is 0."""
        return self.k / self.n if self.n else nan

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end; NaN where there are none."""
        return share_interval(self.k, self.n)

    def __str__(self) -> str:
        """Format the share and its interval as percentages."""
        if not self.n:
            return "–"
        low, high = self.interval
        return f"{_per_cent(self.share)} ({_per_cent(low)}–{_per_cent(high)})"


def _per_cent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0")


def held_out_threshold(strangers: Sequence[float], level: float) -> float:
    """Return the score above which at most a share ``level`` of further strangers is expected.

    The share of n + 1 exchangeable strangers that score as much as a new one is its p; it is at most ``level`` above
    the ``⌊level·(n + 1)⌋``-th largest of n. With too few strangers for that the threshold is infinite.
    """
    k = floor(level * (len(strangers) + 1) + 1e-9)
    return inf if k < 1 else float(np.sort(np.asarray(strangers, float))[-k])


def rate_above(scores: Sequence[float], threshold: float) -> Rate:
    """Count the scores above a threshold."""
    return Rate(int(sum(score > threshold for score in scores)), len(scores))


def area(kin: Sequence[float], strangers: Sequence[float]) -> float:
    """Estimate the chance that a pair of kin scores higher than one of strangers, ties counted half (area under the ROC
    curve); NaN without scores.
    """
    if not kin or not strangers:
        return nan
    return float(stats.mannwhitneyu(kin, strangers).statistic / (len(kin) * len(strangers)))
