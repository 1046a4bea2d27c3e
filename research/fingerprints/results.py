"""Findings of the bench: a row for every pair and method, and a summary of each method."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf, nan
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from birthmark.measure.next_tokens import share_interval
from birthmark.metrics.seedprint import LEVEL

from .method import Finding, Method, compare
from .pairs import KIN_GROUPS, STRANGER_GROUPS, Pair, Relation


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


# ---------------------------------------------------------------- findings of the bench
# A row for every pair and method, and a summary of each method.

_ORDER = (*KIN_GROUPS, *STRANGER_GROUPS)


class Row(NamedTuple):
    """Result of one method on one pair."""

    method: str
    relation: Relation
    group: str
    family: str
    score: float | None
    """None: no test."""
    kin: bool | None
    """The method's own verdict; None where it has no rule, or there was no test."""
    ms: float
    """Processor time of the test, without the pass."""


def rows_of(pairs: Iterable[Pair], methods: Sequence[Method]) -> Iterator[Row]:
    """Test every pair by every method."""
    for pair in pairs:
        for method in methods:
            start = time.process_time()
            found = compare(method, pair.a, pair.b)
            ms = 1e3 * (time.process_time() - start)
            score, kin = (round(found.score, 6), found.kin) if isinstance(found, Finding) else (None, None)
            yield Row(method.name, pair.relation, pair.group, pair.family, score, kin, round(ms, 3))


class Summary(NamedTuple):
    """Summary of one method on the whole bench."""

    tested_kin: Rate
    """Pairs of kin that it could test."""
    own_power: Rate | None
    """Kin called kin, of the tested ones, by its own rule; None where it has none."""
    own_false: Rate | None
    """Strangers called kin by it."""
    threshold: float
    """The score above which a hundredth of strangers is expected, from every other pair of strangers; infinite where
    fewer than 99 of those could be tested."""
    power: Rate
    """Kin above that threshold."""
    false: Rate
    """The other half of the strangers above it."""
    area: float
    """Area under the ROC curve."""
    ms: float
    """Mean processor time of a test."""
    power_of: Mapping[str, Rate]
    """Group of kin → those above the threshold."""
    own_power_of: Mapping[str, Rate]
    """Group of kin → those called kin by its own rule; empty where it has none."""
    own_false_of: Mapping[str, Rate]
    """Group of strangers → those called kin by its own rule; empty where it has none."""
    false_of: Mapping[str, Rate]
    """Group of strangers → those above the threshold, of the half that did not decide it."""


def summary(rows: Iterable[Row]) -> Summary:
    """Summarise the rows of one method, in the order of the bench."""
    rows = list(rows)
    every_kin, every_stranger = ([row for row in rows if row.relation == which] for which in ("kin", "strangers"))
    kin, strangers = ([row for row in every if row.score is not None] for every in (every_kin, every_stranger))
    halves: tuple[list[Row], list[Row]] = ([], [])
    for group in _groups(every_stranger):
        for i, row in enumerate(_in(strangers, group)):
            halves[i % 2].append(row)
    threshold = held_out_threshold(_scores(halves[0]), LEVEL)
    has_rule = any(row.kin is not None for row in rows)
    tested = [row for row in rows if row.score is not None]

    def above(chosen: list[Row]) -> Rate:
        # Too few strangers give no threshold, and no rate.
        return Rate(0, 0) if threshold == inf else rate_above(_scores(chosen), threshold)

    return Summary(
        tested_kin=Rate(len(kin), len(every_kin)),
        own_power=_called(kin) if has_rule else None,
        own_false=_called(strangers) if has_rule else None,
        threshold=threshold,
        power=above(kin),
        false=above(halves[1]),
        area=area(_scores(kin), _scores(strangers)),
        ms=sum(row.ms for row in tested) / len(tested) if tested else float("nan"),
        power_of={group: above(_in(kin, group)) for group in _groups(every_kin)},
        own_power_of={group: _called(_in(kin, group)) for group in _groups(every_kin)} if has_rule else {},
        own_false_of={group: _called(_in(strangers, group)) for group in _groups(every_stranger)} if has_rule else {},
        false_of={group: above(_in(halves[1], group)) for group in _groups(every_stranger)},
    )


def summaries(rows: Sequence[Row]) -> dict[str, Summary]:
    """Summarise each method, in the order of the rows."""
    names = dict.fromkeys(row.method for row in rows)
    return {name: summary(row for row in rows if row.method == name) for name in names}


def _groups(rows: Sequence[Row]) -> list[str]:
    found = list(dict.fromkeys(row.group for row in rows))
    return sorted(found, key=lambda group: _ORDER.index(group) if group in _ORDER else len(_ORDER))


def _in(rows: Sequence[Row], group: str) -> list[Row]:
    return [row for row in rows if row.group == group]


def _scores(rows: Sequence[Row]) -> list[float]:
    return [row.score for row in rows if row.score is not None]


def _called(rows: Sequence[Row]) -> Rate:
    return Rate(sum(bool(row.kin) for row in rows), len(rows))


def as_json(rows: Sequence[Row]) -> list[list[Any]]:
    """Return the rows as lists, in the order of `Row`."""
    return [list(row) for row in rows]
