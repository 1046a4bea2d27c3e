"""Links of the chain with nothing to show: quantities that stayed at their control in every snapshot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..files import finite_or_nan
from ..measure.records import Snapshot
from ..metrics.quantities import MEASURED, shown_name
from .attention_sink import SinkReading
from .formatting import in_prose
from .massive_channel import dominance_by_block
from .quantities_by_block import Profile
from .run_history import RunHistory
from .thresholds import threshold
from .verdict import Group


def why_inactive(runs: Sequence[RunHistory], section: str) -> str:
    """Return the reason why a section may be folded to one line; "" if it has something to show, or nothing was
    measured.
    """
    test = _TESTS.get(section)
    return test(runs) if test else ""


def _all(runs: Sequence[RunHistory], name: str) -> list[tuple[float, float]]:
    """Return (value, control) of a scalar in every snapshot, birth included, on every probe."""
    found = []
    for run in runs:
        for snapshot in run.dated:
            for group in ("bias", "bias_text"):
                scalars = snapshot.summary.get(group) or {}
                value = finite_or_nan(scalars.get(shown_name(name, scalars)))
                if math.isfinite(value):
                    found.append((value, MEASURED[name].level(snapshot.summary, group)))
    return found


def _by_block(runs: Sequence[RunHistory], read: Callable[[Snapshot, Group], Profile | None]) -> Iterator[np.ndarray]:
    """Yield the values over their controls in the blocks that show any, for every snapshot and probe."""
    groups: tuple[Group, ...] = ("bias", "bias_text")
    for snapshot in (snapshot for run in runs for snapshot in run.dated):
        for group in groups:
            if (found := read(snapshot, group)) is not None:
                yield found.ratio[found.is_seen]


def _profile(name: str) -> Callable[[Snapshot, Group], Profile | None]:
    return lambda snapshot, group: Profile.of(snapshot, name, group)


def _sink(runs: Sequence[RunHistory]) -> str:
    masses = (_all(runs, "sink_mass_max") or _all(runs, "sink_mass")) + _of_documents(runs)
    rates = _all(runs, "sink_rate")
    if not masses or any(rate > threshold("no_sink_rate") for rate, _ in rates):
        return ""
    if any(not mass <= threshold("no_sink") * level for mass, level in masses):
        return ""
    most, level = max(masses)
    return f"no head above {in_prose(most)}; uniform attention gives {in_prose(level)}"


def _of_documents(runs: Sequence[RunHistory]) -> list[tuple[float, float]]:
    """Return (value, control) for sinks where documents begin, in the largest head; NaN if unknown."""
    found = []
    for run in runs:
        for snapshot in run.dated:
            if (reading := SinkReading.on(snapshot, "bias_text")).of_documents:
                level = MEASURED[reading.mass].level(snapshot.summary, reading.group)
                mass = shown_name(reading.mass, snapshot.summary[reading.group])
                found.append((reading.largest(snapshot, mass), level))
    return found


def _neurons(runs: Sequence[RunHistory]) -> str:
    counts = _all(runs, "super_neurons")
    return "no super neuron in any block" if counts and all(count == 0 for count, _ in counts) else ""


def _dominance(runs: Sequence[RunHistory]) -> str:
    first, median, most = _all(runs, "dominance_first"), _all(runs, "dominance_median"), threshold("alike")
    alike = len(first) == len(median) and all(a <= most * b for (a, _), (b, _) in zip(first, median, strict=True))
    alike = alike and all((ratio <= most).all() for ratio in _by_block(runs, dominance_by_block))
    return "position 0 is like the median position" if first and alike else ""


def _lock(runs: Sequence[RunHistory]) -> str:
    cosines, factor = _all(runs, "qk_cosine"), threshold("no_lock")
    if not cosines or any(not cosine <= factor * chance for cosine, chance in cosines):
        return ""
    if any((ratio > factor).any() for ratio in _by_block(runs, _profile("qk_cosine"))):
        return ""
    most, chance = max(cosines)
    return f"at most {in_prose(most)}; chance is {in_prose(chance)}"


def _aggregation(runs: Sequence[RunHistory]) -> str:
    ratios, most = _all(runs, "variance_discrepancy"), threshold("alike")
    alike = all(1 / most <= ratio <= most for ratio, _ in ratios)
    for ratio in _by_block(runs, _profile("variance_discrepancy")):
        alike = alike and bool(((ratio >= 1 / most) & (ratio <= most)).all())
    return "the variance is the same at all positions" if ratios and alike else ""


def _contraction(runs: Sequence[RunHistory]) -> str:
    cosines = _all(runs, "inter") + _all(runs, "intra")
    least = threshold("contraction")
    is_folded = cosines and all(abs(cosine) < least for cosine, _ in cosines)
    return f"no cosine above {least:g}" if is_folded else ""


_TESTS: dict[str, Callable[[Sequence[RunHistory]], str]] = {
    "sink": _sink,
    "neurons": _neurons,
    "dominance": _dominance,
    "lock": _lock,
    "aggregation": _aggregation,
    "contraction": _contraction,
}
