"""The attention sink, and the links of the chain that leads to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan, nan

import numpy as np

from ..measure.records import Snapshot
from ..metrics.quantities import MEASURED
from .history import RunHistory
from .learning import has_learned
from .thresholds import threshold
from .verdict import Group, Tone, Verdict, at_step, is_measured, over_training, over_training_beside_level, scalar
from .wording import in_prose


def leading_group(snapshot: Snapshot | None) -> Group:
    """The probe that leads for sinks: text where it was measured."""
    return "bias_text" if snapshot is not None and "sink_mass" in snapshot.summary.get("bias_text", {}) else "bias"


@dataclass(frozen=True)
class SinkReading:
    """The numbers that say whether there is a sink: of one probe, on position 0 or where documents begin."""

    group: Group
    of_documents: bool
    """Documents see themselves alone: queries of later ones give position 0 nothing, so each document's own first token
    is what may be a sink (definitions §5)."""

    @classmethod
    def on(cls, snapshot: Snapshot | None, group: Group) -> SinkReading:
        """What a snapshot is judged by on one probe."""
        if snapshot is None:
            return cls(group, False)
        attention = (snapshot.summary.get("model") or {}).get("attention")
        apart = isinstance(attention, Mapping) and bool(attention.get("documents"))
        return cls(group, apart and "document_sink_mass" in (snapshot.summary.get(group) or {}))

    @classmethod
    def leading(cls, snapshot: Snapshot | None) -> SinkReading:
        """That of the probe that leads."""
        return cls.on(snapshot, leading_group(snapshot))

    @property
    def mass(self) -> str:
        """The scalar that is judged."""
        return "document_sink_mass" if self.of_documents else "sink_mass"

    @property
    def uniform(self) -> str:
        """The scalar that it is judged against."""
        return "document_sink_uniform" if self.of_documents else "sink_uniform"

    @property
    def place(self) -> str:
        """Where the sink may be, in words."""
        return "the first token of a document" if self.of_documents else "the first position"

    def largest(self, snapshot: Snapshot | None, name: str) -> float:
        """``name`` in the head that has most of it; NaN where that was not recorded."""
        if not self.of_documents:
            return scalar(snapshot, f"{name}_max", self.group)
        # Of documents there is the array of all heads alone.
        array_LH = None if snapshot is None else snapshot.arrays.get(f"text.{name}")
        known = np.zeros(0) if array_LH is None else array_LH[np.isfinite(array_LH)]
        return float(known.max()) if known.size else nan


@dataclass(frozen=True)
class _Sink:
    """The sink of one snapshot on one probe."""

    mean: float
    """Sink mass, mean over heads."""
    most: float
    """That of the largest head; where it is not recorded, the mean, which it reaches at least."""
    uniform: float
    epsilon: float
    knows_heads: bool = True
    """Whether ``most`` is that of the largest head."""

    @classmethod
    def of(cls, snapshot: Snapshot | None, reading: SinkReading, name: str) -> _Sink:
        """Of the numbers of one probe; ``name`` is the reading's mass, or that of normalised rows."""
        mean, uniform, epsilon = (
            scalar(snapshot, key, reading.group) for key in (name, reading.uniform, "sink_epsilon")
        )
        most = reading.largest(snapshot, name)
        if reading.of_documents and isnan(most):
            return cls(mean, mean, uniform, epsilon, knows_heads=False)
        return cls(mean, most, uniform, epsilon)

    @property
    def times(self) -> float:
        """The largest head's share over the uniform one; NaN where a number is missing."""
        known = self.uniform > 0 and not isnan(self.mean + self.epsilon)
        return self.most / self.uniform if known else nan

    @property
    def is_there(self) -> bool:
        """Whether the largest head has a sink."""
        return self.times >= threshold("sink") and self.most > self.epsilon

    def share(self) -> str:
        """What the first position gets, in words."""
        if self.mean >= threshold("sink") * self.uniform:
            return f"{in_prose(self.mean)} of the attention"
        times = self.mean / self.uniform
        return f"{in_prose(times, 1)} times its uniform share" if times >= 0.1 else "under a tenth of its uniform share"


def sink(history: RunHistory) -> Verdict | None:
    """Whether heads spend their attention on position 0, or where their document begins: on text where measured."""
    now = history.last or history.first
    reading = SinkReading.leading(now)
    group = reading.group
    if now is None or not is_measured(history, "sink_mass", group):
        return None
    rows = "_normalised" if is_measured(history, f"{reading.mass}_normalised", group) else ""
    name = reading.mass + rows
    now_sink, before = _Sink.of(now, reading, name), _Sink.of(history.first, reading, name)
    on = "on text" if group == "bias_text" else "on random tokens"
    if isnan(now_sink.times):
        tone: Tone = "unclear"
        sentence = f"Whether there is a sink {on} is not known: its mass is not a number {at_step(now)}."
    else:
        what, tone = _sink_in_words(history, now_sink, before, reading.place)
        beside = _sink_beside(now, now_sink, group, f"sink_mass{rows}")
        sentence = f"{what} {on}: {reading.place} gets {now_sink.share()}{beside}."
        sentence += "" if group == "bias_text" else " Text was not measured, where it may be larger."
    return Verdict("sink", sentence, tone, *over_training(history, name, reading.uniform, group), "sink")


def _sink_in_words(history: RunHistory, sink: _Sink, before: _Sink, place: str) -> tuple[str, Tone]:
    if not sink.is_there and not sink.knows_heads:
        return "No sink in the mean over heads, of which the largest is not recorded,", "unclear"
    if history.last is None:
        return ("A sink at birth", "present") if sink.is_there else ("No sink at birth", "absent")
    if sink.is_there:
        return ("A sink stands" if before.is_there or isnan(before.times) else "A sink forms"), "present"
    if before.is_there:
        return "The sink of the start has faded", "weak" if sink.times >= threshold("no_sink") else "absent"
    if sink.times >= threshold("no_sink"):
        return f"A pull towards {place}, short of a sink,", "weak"
    if has_learned(history) is False:
        return "No sink yet, but the model has not learned either,", "unclear"
    return "No sink forms", "absent"


def _sink_beside(now: Snapshot, sink: _Sink, group: Group, name: str) -> str:
    """What the mean over heads leaves out: the largest head, the uniform share, the other probe."""
    heads = "" if sink.most == sink.mean else f"largest head {in_prose(sink.most)}, "
    random = scalar(now, name) if group == "bias_text" else nan
    also = f"; on random tokens {in_prose(random)}" if isfinite(random) else ""
    return f" ({heads}uniform {in_prose(sink.uniform)}{also})"


def aggregation(history: RunHistory) -> Verdict | None:
    """Whether values of position 0 vary more than later ones: on random tokens, since a fixed first token has none."""
    name, now = "variance_discrepancy", history.last or history.first
    if now is None or not is_measured(history, name):
        return None
    value, least = scalar(now, name), threshold("variance")
    times = f"σ²(0) is {in_prose(value, 2)} times σ² of later positions; 1 is equal variance"
    sentence, tone = _graded(
        value / least,
        "The variance of the first position",
        f"The variance of the first position stands out: {times}.",
        f"The variance of the first position does not stand out: {times}.",
    )
    return Verdict(
        "aggregation", sentence, tone, *over_training_beside_level(history, name, "bias"), "aggregation", headline=False
    )


def neurons(history: RunHistory) -> Verdict | None:
    """Whether hidden units fire at position 0 alone."""
    now = history.last or history.first
    if now is None or not is_measured(history, "super_neurons"):
        return None
    count = scalar(now, "super_neurons")
    one = f"{count:,.0f} super neuron fires" if count == 1 else f"{count:,.0f} super neurons fire"
    absent = "No hidden unit is a super neuron."
    sentence, tone = _graded(count, "The number of super neurons", f"{one} at the first position.", absent)
    steps, values, _ = over_training(history, "super_neurons", "super_neurons")
    return Verdict("neurons", sentence, tone, steps, values, None, "neurons", headline=False)


def dominance(history: RunHistory) -> Verdict | None:
    """Whether one channel dominates the state of position 0."""
    now = history.last or history.first
    if now is None or not is_measured(history, "dominance_first"):
        return None
    first, median = (scalar(now, f"dominance_{place}") for place in ("first", "median"))
    numbers = f"max over mean {in_prose(first, 1)}, {in_prose(median, 1)} at the median position"
    sentence, tone = _graded(
        first / median / threshold("dominance") if median > 0 else nan,
        "Which channels dominate the first position",
        f"One channel dominates the first position: {numbers}.",
        f"No channel dominates the first position: {numbers}.",
    )
    series = over_training(history, "dominance_first", "dominance_median")
    return Verdict("dominance", sentence, tone, *series, "dominance", headline=False)


def lock(history: RunHistory) -> Verdict | None:
    """Whether the key of position 0 lies along the queries' direction."""
    now = history.last or history.first
    if now is None or not is_measured(history, "qk_cosine"):
        return None
    value, chance = scalar(now, "qk_cosine"), MEASURED["qk_cosine"].level(now.summary)
    numbers = f"mean |cosine| {in_prose(value)}, chance {in_prose(chance)}"
    sentence, tone = _graded(
        value / chance / threshold("lock") if chance > 0 else nan,
        "Whether the first key is locked",
        f"The first key is locked onto the queries' direction: {numbers}.",
        f"The first key is not locked onto the queries' direction: {numbers}.",
    )
    return Verdict(
        "lock", sentence, tone, *over_training_beside_level(history, "qk_cosine", "bias"), "lock", headline=False
    )


def _graded(over_threshold: float, subject: str, present: str, absent: str) -> tuple[str, Tone]:
    """The sentence and tone of a value as a multiple of its threshold."""
    if isnan(over_threshold):
        return f"{subject}: not a number at the newest snapshot.", "unclear"
    return (present, "present") if over_threshold >= 1 else (absent, "absent")
