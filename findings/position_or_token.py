"""Controls that separate a sink on the first position from one on the token there."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from ..measure.records import Snapshot
from .history import RunHistory
from .sink_chain import Sink, SinkReading
from .thresholds import threshold
from .verdict import Group, Tone, Verdict, is_measured, scalar
from .wording import in_prose

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
    name = "sink_mass_normalised" if is_measured(history, "sink_mass_normalised") else "sink_mass"
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
    if not pair.behind_bos.is_there and not pair.without.is_there:
        return f"No sink, with BOS or without: {numbers}.", "absent"
    if pair.without.is_there and not pair.share < threshold("position"):
        return f"The sink hangs on the position and not on BOS: {numbers}.", "present"
    if pair.behind_bos.is_there and pair.share <= threshold("token"):
        return f"The sink hangs on the token BOS and not on the position: {numbers}.", "present"
    return f"The sink hangs on both the position and BOS: {numbers}.", "weak"


def _without_bos(now: Snapshot, name: str) -> tuple[str, Tone] | None:
    """Judge the same if BOS is unknown: the first random token is arbitrary."""
    random, text = (Sink.of(now, SinkReading(group, False), name) for group in ("bias", "bias_text"))
    mean, uniform = in_prose(random.mean), in_prose(random.uniform)
    if random.is_there and not random.mean < threshold("position") * text.mean:
        return (
            f"The sink hangs on the position: random first tokens get {mean} of the attention (uniform {uniform}).",
            "present",
        )
    if text.is_there:
        return (
            "It cannot be told whether the sink on text hangs on the position or on its first token: the first of "
            f"random tokens gets {mean} of the attention, and BOS before them was not measured."
        ), "unclear"
    return None
