"""The attention sink, and the links of the chain that leads to it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan, nan

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
class _Sink:
    """The sink on position 0 in one snapshot on one probe."""

    mean: float
    """Sink mass, mean over heads."""
    most: float
    """That of the largest head."""
    uniform: float
    epsilon: float

    @classmethod
    def of(cls, snapshot: Snapshot | None, group: Group, name: str) -> _Sink:
        """Of the scalars of one probe; ``name`` is ``sink_mass``, or that of normalised rows."""
        read = (name, f"{name}_max", "sink_uniform", "sink_epsilon")
        return cls(*(scalar(snapshot, key, group) for key in read))

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
        """What position 0 gets, in words."""
        if self.mean >= threshold("sink") * self.uniform:
            return f"{in_prose(self.mean)} of the attention"
        times = self.mean / self.uniform
        return f"{in_prose(times, 1)} times its uniform share" if times >= 0.1 else "under a tenth of its uniform share"


def sink(history: RunHistory) -> Verdict | None:
    """Whether heads spend their attention on position 0: on text where it was measured."""
    now = history.last or history.first
    group = leading_group(now)
    if now is None or not is_measured(history, "sink_mass", group):
        return None
    name = "sink_mass_normalised" if is_measured(history, "sink_mass_normalised", group) else "sink_mass"
    now_sink, before = _Sink.of(now, group, name), _Sink.of(history.first, group, name)
    on = "on text" if group == "bias_text" else "on random tokens"
    if isnan(now_sink.times):
        tone: Tone = "unclear"
        sentence = f"Whether there is a sink {on} is not known: its mass is not a number {at_step(now)}."
    else:
        what, tone = _sink_in_words(history, now_sink, before)
        sentence = f"{what} {on}: the first position gets {now_sink.share()}{_sink_beside(now, now_sink, group, name)}."
        sentence += "" if group == "bias_text" else " Text was not measured, where it may be larger."
    return Verdict("sink", sentence, tone, *over_training(history, name, "sink_uniform", group), "sink")


def _sink_in_words(history: RunHistory, sink: _Sink, before: _Sink) -> tuple[str, Tone]:
    if history.last is None:
        return ("A sink at birth", "present") if sink.is_there else ("No sink at birth", "absent")
    if sink.is_there:
        return ("A sink stands" if before.is_there or isnan(before.times) else "A sink forms"), "present"
    if before.is_there:
        return "The sink of the start has faded", "weak" if sink.times >= threshold("no_sink") else "absent"
    if sink.times >= threshold("no_sink"):
        return "A pull towards the first position, short of a sink,", "weak"
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
