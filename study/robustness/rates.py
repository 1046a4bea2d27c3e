"""Rates at which each change keeps kin kin and strangers strangers, and makes a model partly another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..lineage.calibration import KinRate
from .results import ChangedTest, Reference, SecondRole


@dataclass(frozen=True)
class ZRange:
    """z of some pairs that could be tested."""

    rate: KinRate
    """Rate of pairs called kin."""
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of z; NaN without any."""
        return median(self.values) if self.values else float("nan")

    @property
    def least(self) -> float:
        """The smallest z; NaN without any."""
        return min(self.values, default=float("nan"))

    @property
    def most(self) -> float:
        """The largest z; NaN without any."""
        return max(self.values, default=float("nan"))


@dataclass(frozen=True)
class ChangeRates:
    """Rates of one change under one test."""

    change: str
    role: SecondRole
    """Role of the other model for the changed one, if one was used."""
    trained: ZRange
    """Range of z against the end of the run of its own birth."""
    birth: ZRange
    """Range of z against its own birth."""
    strangers: ZRange
    """Range of z against ends and births of all models that did not go into it."""
    second: ZRange
    """Range of z against the end of the run of the other model, if one went into it."""
    partly: KinRate
    """Rate of changed models that are partly of each of two strangers: kin of the ends of both. Empty for changes
    without another model.
    """


def change_rates(results: Sequence[ChangedTest], test: str) -> list[ChangeRates]:
    """Compute the rates of every change under one test, in the order of the file."""
    found = [result for result in results if result.test == test]
    return [
        _rates(change, [r for r in found if r.change == change]) for change in dict.fromkeys(r.change for r in found)
    ]


def _rates(change: str, found: Sequence[ChangedTest]) -> ChangeRates:
    def of(group: str, reference: Reference | None) -> ZRange:
        return _range([r for r in found if r.group == group and reference in (None, r.reference)])

    return ChangeRates(
        change,
        found[0].role,
        of("own", "trained"),
        of("own", "birth"),
        of("stranger", None),
        of("second", "trained"),
        _partly(found),
    )


def _range(found: Sequence[ChangedTest]) -> ZRange:
    z = tuple(r.found.z for r in found if r.found.verdict != "undefined")
    n_kin = sum(r.found.verdict == "kin" for r in found)
    return ZRange(KinRate(len(found), len(found) - len(z), n_kin, float("nan")), z)


def _partly(found: Sequence[ChangedTest]) -> KinRate:
    verdicts: dict[int, list[str]] = {}
    for r in found:
        if r.second is not None and r.reference == "trained" and r.group != "stranger":
            verdicts.setdefault(r.own, []).append(r.found.verdict)
    undefined = sum("undefined" in pair for pair in verdicts.values())
    return KinRate(len(verdicts), undefined, sum(pair == ["kin", "kin"] for pair in verdicts.values()), float("nan"))


def strangers_of_all(results: Sequence[ChangedTest], test: str) -> ZRange:
    """Return z of all pairs of strangers under one test, over all changes."""
    return _range([r for r in results if r.test == test and r.group == "stranger"])
