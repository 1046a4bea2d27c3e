"""The attention sink: in which blocks heads park on one position, beside what, and what tells position from token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, isnan, nan

import numpy as np

from ..measure.records import Snapshot
from ..metrics.quantities import shown_name
from .formatting import in_prose
from .learning import knows_its_data
from .quantities_by_block import Profile, blocks_in_words
from .run_history import RunHistory
from .thresholds import threshold
from .verdict import Group, Tone, Verdict, array_of, at_step, is_measured, over_training, scalar

#: Groups that may lead for sinks, in words.
ON_PROBE: Mapping[Group, str] = {
    "bias": "on random tokens",
    "bias_bos": "on random tokens behind BOS",
    "bias_text": "on text",
}


def leading_group(snapshot: Snapshot | None) -> Group:
    """Return the probe that leads for sinks: text if measured; otherwise random tokens, behind BOS if the tokenizer
    puts it before texts.
    """
    summary = {} if snapshot is None else snapshot.summary
    if "sink_mass" in summary.get("bias_text", {}):
        return "bias_text"
    adds_bos = (summary.get("probe_bos") or {}).get("is_added") and "sink_mass" in summary.get("bias_bos", {})
    return "bias_bos" if adds_bos else "bias"


@dataclass(frozen=True)
class SinkReading:
    """Names of the numbers that decide on a sink: on one probe, at position 0 or where documents begin."""

    group: Group
    of_documents: bool
    """True if documents see only themselves: queries of later documents give position 0 nothing, so each document's
    first token is its possible sink (definitions §5).
    """

    @classmethod
    def on(cls, snapshot: Snapshot | None, group: Group) -> SinkReading:
        """Choose the numbers by which a snapshot is judged on one probe."""
        if snapshot is None:
            return cls(group, False)
        attention = (snapshot.summary.get("model") or {}).get("attention")
        apart = isinstance(attention, Mapping) and bool(attention.get("documents"))
        return cls(group, apart and "document_sink_mass" in (snapshot.summary.get(group) or {}))

    @classmethod
    def leading(cls, snapshot: Snapshot | None) -> SinkReading:
        """Return the reading on the probe that leads."""
        return cls.on(snapshot, leading_group(snapshot))

    @property
    def mass(self) -> str:
        """Name of the judged scalar."""
        return "document_sink_mass" if self.of_documents else "sink_mass"

    @property
    def uniform(self) -> str:
        """Name of the scalar that it is compared with."""
        return "document_sink_uniform" if self.of_documents else "sink_uniform"

    @property
    def place(self) -> str:
        """Possible place of the sink, in words."""
        return "the first token of a document" if self.of_documents else "the first position"

    def largest(self, snapshot: Snapshot | None, name: str) -> float:
        """Return ``name`` in the head that has most of it; NaN if not recorded."""
        if not self.of_documents:
            return scalar(snapshot, f"{name}_max", self.group)
        # For documents only the array of all heads exists.
        array_LH = self.of_heads(snapshot, name)
        known = np.zeros(0) if array_LH is None else array_LH[np.isfinite(array_LH)]
        return float(known.max()) if known.size else nan

    def of_heads(self, snapshot: Snapshot | None, name: str) -> np.ndarray | None:
        """Return ``name`` of every head, ``[blocks, heads]``; None if not recorded."""
        return array_of(snapshot, name, self.group)


def chain_group(snapshot: Snapshot | None) -> Group:
    """Return the probe on which the causes of a sink are judged: random tokens, or the leading probe if only that one
    has a sink.

    Such a sink depends on a token that texts begin with.
    """
    leading = leading_group(snapshot)
    with_token, random = (Sink.of(snapshot, SinkReading.on(snapshot, group)) for group in (leading, _RANDOM))
    return leading if with_token.exists and not random.exists else _RANDOM


_RANDOM: Group = "bias"


@dataclass(frozen=True)
class Sink:
    """The sink of one snapshot on one probe."""

    mean: float
    """Sink mass, mean over heads."""
    most: float
    """Mass in the largest head; if not recorded, the mean, which is a lower bound."""
    uniform: float
    epsilon: float
    knows_heads: bool = True
    """True if ``most`` is the value of the largest head."""
    means: Profile | None = None
    """Mean over heads beside the uniform share, by block; None where blocks were not recorded."""
    largest: Profile | None = None
    """The same of the largest head of each block."""

    @classmethod
    def of(cls, snapshot: Snapshot | None, reading: SinkReading, name: str = "") -> Sink:
        """Read the numbers of one probe.

        Args:
            snapshot: source of the numbers; None gives NaN.
            reading: reading of the probe.
            name: the scalar that is judged; by default the reading's mass, as a share of the row.
        """
        name = name or shown_name(reading.mass, (snapshot.summary.get(reading.group) or {}) if snapshot else ())
        mean, uniform, epsilon = (
            scalar(snapshot, key, reading.group) for key in (name, reading.uniform, "sink_epsilon")
        )
        most, array_LH = reading.largest(snapshot, name), reading.of_heads(snapshot, name)
        if reading.of_documents and isnan(most):
            return cls(mean, mean, uniform, epsilon, knows_heads=False)
        if array_LH is None or array_LH.ndim != 2 or not np.isfinite(array_LH).any():
            return cls(mean, most, uniform, epsilon)
        level_L = np.full(len(array_LH), uniform)
        means, largest = (Profile(values_L, level_L) for values_L in (array_LH.mean(1), array_LH.max(1)))
        return cls(mean, most, uniform, epsilon, means=means, largest=largest)

    @property
    def times(self) -> float:
        """The largest head's share over the uniform one; NaN if a number is missing."""
        known = self.uniform > 0 and not isnan(self.mean + self.epsilon)
        return self.most / self.uniform if known else nan

    @property
    def exists(self) -> bool:
        """True if the largest head has a sink."""
        return self.times >= threshold("sink") and self.most > self.epsilon

    @property
    def blocks(self) -> np.ndarray | None:
        """Mask ``[blocks]`` of those with a sink; None without a sink, or if blocks are unknown.

        A stretch begins where a head has a sink, and lasts while one is at least drawn to the position.
        """
        if self.largest is None:
            return None
        begins = self.largest.at_least(threshold("sink")) & (self.largest.values > self.epsilon)
        lasts = self.largest.at_least(threshold("no_sink"))
        found = begins.copy()
        for before, block in pairwise(np.flatnonzero(self.largest.is_seen)):
            found[block] |= found[before] and lasts[block]
        return found if found.any() else None

    def share(self) -> str:
        """Describe the share of the first position: in the blocks with a sink, if blocks are known."""
        blocks, mean, there = self.blocks, self.mean, ""
        if blocks is not None and self.means is not None:
            mean = float(self.means.values[blocks].mean())
            there = "" if blocks[self.means.is_seen].all() else " there"
        if mean >= threshold("sink") * self.uniform:
            return f"{in_prose(mean)} of the attention{there}"
        times = mean / self.uniform
        return (
            f"{in_prose(times, 1)} times its uniform share{there}"
            if times >= 0.1
            else "under a tenth of its uniform share"
        )


def sink(history: RunHistory) -> Verdict | None:
    """Judge if heads spend their attention on position 0, or on the first token of their document; on text if
    measured.
    """
    now = history.last or history.first
    reading = SinkReading.leading(now)
    group = reading.group
    if now is None or not is_measured(history, "sink_mass", group):
        return None
    name = history.shown_scalar(reading.mass, group)
    now_sink, before = Sink.of(now, reading, name), Sink.of(history.first, reading, name)
    on = ON_PROBE[group]
    if isnan(now_sink.times):
        tone: Tone = "unclear"
        sentence = f"Whether there is a sink {on} is not known: its mass is not a number {at_step(now)}."
    else:
        what, tone = _sink_in_words(history, now_sink, before, reading.place)
        beside = _sink_beside(now, now_sink, group, history.shown_scalar("sink_mass", group))
        sentence = f"{what} {on}: {reading.place} gets {now_sink.share()}{beside}."
        sentence += _without(now_sink) + _before(history, before, now_sink)
        sentence += "" if group == "bias_text" else " Text was not measured, where it may be larger."
    return Verdict("sink", sentence, tone, *over_training(history, name, reading.uniform, group), "sink")


def _sink_in_words(history: RunHistory, sink: Sink, before: Sink, place: str) -> tuple[str, Tone]:
    start = history.start
    if not sink.exists and not sink.knows_heads:
        return "No sink in the mean over heads, of which the largest is not recorded,", "unclear"
    if sink.exists:
        depth = "stands" if before.exists or isnan(before.times) else "forms"
        if sink.largest is not None and sink.blocks is not None and len(sink.blocks) > 1:
            depth = f"{sink.largest.story(sink.blocks)},"
        return f"{f'{start.at.capitalize()} a' if history.last is None else 'A'} sink {depth}", "present"
    if history.last is None:
        return f"No sink {start.at}", "absent"
    if before.exists:
        return f"The sink of {start.noun} has faded", "weak" if sink.times >= threshold("no_sink") else "absent"
    if sink.times >= threshold("no_sink"):
        pulled = None if sink.largest is None else sink.largest.at_least(threshold("no_sink"))
        depth = "" if sink.largest is None or pulled is None else f" {sink.largest.where(pulled)}"
        return f"A pull towards {place}{depth}, short of a sink,", "weak"
    if knows_its_data(history) is False:
        return "No sink yet, but the model has not learned either,", "unclear"
    return "No sink forms" + ("" if sink.largest is None else " in any block"), "absent"


def _without(sink: Sink) -> str:
    """Name the blocks without a sink, if others have one."""
    if sink.blocks is None or sink.largest is None:
        return ""
    without = sink.largest.ratio < threshold("no_sink")
    if not without.any():
        return ""
    found = blocks_in_words(sink.largest.blocks[without])
    return f" {found[0].upper()}{found[1:]} {'has' if without.sum() == 1 else 'have'} none."


def _before(history: RunHistory, before: Sink, now: Sink) -> str:
    """Say if a present sink existed before training."""
    if history.last is None or not now.exists or isnan(before.times):
        return ""
    at = history.start.at
    if before.exists:
        return f" It was there {at}."
    return f" There was none {at}."


def _sink_beside(now: Snapshot, sink: Sink, group: Group, name: str) -> str:
    """Add facts that the mean over heads hides: the largest head, the uniform share, the other probe."""
    heads = "" if sink.most == sink.mean else f"largest head {in_prose(sink.most)}, "
    random = nan if group == "bias" else scalar(now, name)
    alone = " alone" if group == "bias_bos" else ""
    also = f"; on random tokens{alone} {in_prose(random)}" if isfinite(random) else ""
    return f" ({heads}uniform {in_prose(sink.uniform)}{also})"


# ---------------------------------------------------------------- position or token
# Controls that separate a sink on the first position from one on the token there.

KEY = "position_or_token"


@dataclass(frozen=True)
class _Pair:
    """Sinks of the same tokens with BOS before them and without it."""

    tokens: str
    """Name them in words."""
    behind_bos: Sink
    without: Sink

    @classmethod
    def of(cls, now: Snapshot, tokens: str, behind_bos: Group, without: Group, name: str) -> _Pair:
        """Read them from two groups of scalars of a snapshot."""
        return cls(tokens, *(Sink.of(now, SinkReading(group, False), name) for group in (behind_bos, without)))

    @property
    def share(self) -> float:
        """The mass without BOS over that behind it, means over heads."""
        return self.without.mean / self.behind_bos.mean if self.behind_bos.mean else inf

    def in_words(self) -> str:
        """Write its two numbers."""
        return f"{in_prose(self.behind_bos.mean)} with BOS before {self.tokens}, {in_prose(self.without.mean)} without"


def position_or_token(history: RunHistory) -> Verdict | None:
    """Judge if the sink belongs to the first position, whatever its token, or to BOS."""
    now = history.last or history.first
    if now is None or not is_measured(history, "sink_mass") or SinkReading.leading(now).of_documents:
        return None
    name = history.shown_scalar("sink_mass")
    pairs = [
        _Pair.of(now, tokens, behind_bos, without, name)
        for tokens, behind_bos, without in _PAIRS
        if all(isfinite(scalar(now, name, group)) for group in (behind_bos, without))
    ]
    answer = _by_controls(now, pairs) if pairs else _without_bos(now, name)
    if answer is None:
        return None
    sentence, tone = answer
    values, control = ([scalar(s, name, group) for s in history.dated] for group in ("bias", "bias_bos"))
    return Verdict(KEY, sentence, tone, [s.step for s in history.dated], values, control if pairs else None, "sink")


#: Tokens in words, with their scalars behind BOS and without it; text comes first, since models are made for text.
_PAIRS: tuple[tuple[str, Group, Group], ...] = (
    ("text", "bias_text", "bias_text_without_bos"),
    ("random tokens", "bias_bos", "bias"),
)


def _by_controls(now: Snapshot, pairs: list[_Pair]) -> tuple[str, Tone]:
    pair = pairs[0]
    token = (now.summary.get("probe_bos") or {}).get("text", "BOS")
    numbers = f"the first token gets {' and '.join(one.in_words() for one in pairs)}"
    numbers += f" (BOS is {token}, uniform {in_prose(pair.without.uniform)})"
    if not pair.behind_bos.exists and not pair.without.exists:
        return f"No sink, with BOS or without: {numbers}.", "absent"
    if pair.without.exists and not pair.share < threshold("position"):
        return f"The sink hangs on the position and not on BOS: {numbers}.", "present"
    if pair.behind_bos.exists and pair.share <= threshold("token"):
        return f"The sink hangs on the token BOS and not on the position: {numbers}.", "present"
    return f"The sink hangs on both the position and BOS: {numbers}.", "weak"


def _without_bos(now: Snapshot, name: str) -> tuple[str, Tone] | None:
    """Judge the same if BOS is unknown: the first random token is arbitrary."""
    random, text = (Sink.of(now, SinkReading(group, False), name) for group in ("bias", "bias_text"))
    mean, uniform = in_prose(random.mean), in_prose(random.uniform)
    if random.exists and not random.mean < threshold("position") * text.mean:
        on_text_too = text.exists or isnan(text.times)
        what = "The sink hangs on the position" if on_text_too else "A sink on random tokens alone"
        return f"{what}: random first tokens get {mean} of the attention (uniform {uniform}).", "present"
    if text.exists:
        return (
            "It cannot be told whether the sink on text hangs on the position or on its first token: the first of "
            f"random tokens gets {mean} of the attention, and BOS before them was not measured."
        ), "unclear"
    return None
