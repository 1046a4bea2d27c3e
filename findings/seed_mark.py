"""The seed's mark: the bias at birth, its remainder, and evidence of lineage."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, isnan, nan, sqrt

from ..files import finite_or_nan
from ..measure.records import Snapshot
from ..messages import one_line
from ..metrics.weight_kinship import LEAST_COSINE
from .formatting import in_prose, p_in_prose
from .run_history import RunHistory
from .thresholds import threshold
from .verdict import Tone, Verdict, at_step, is_measured, over_training, scalar


def birth_bias(history: RunHistory) -> Verdict | None:
    """Judge the bias of the newborn model; None unless it is known to be drawn from a seed."""
    first = history.first
    inter, kl, ratio = (scalar(first, name) for name in ("inter", "kl_uniform", "preference_ratio"))
    if first is None or not history.start.is_birth or isnan(inter) or isnan(kl) or isnan(ratio):
        return None
    numbers = (
        f"outputs for different inputs have a mean cosine of {in_prose(inter)}, and the favourite token gets "
        f"{in_prose(ratio, 1)} times its even share (KL {in_prose(kl)} nats)"
    )
    directed, prefers = inter >= threshold("contraction"), kl >= threshold("preference")
    outcomes: dict[tuple[bool, bool], tuple[str, Tone]] = {
        (True, True): ("Born biased", "present"),
        (True, False): ("Born with a direction but hardly a preference", "weak"),
        (False, True): ("Born with a preference but hardly a direction", "weak"),
        (False, False): ("Born almost without bias", "absent"),
    }
    what, tone = outcomes[directed, prefers]
    steps, values, _ = over_training(history, "inter", "inter")
    return Verdict("birth", f"{what}: {numbers}.", tone, steps, values, None, "contraction")


@dataclass(frozen=True)
class _Mark:
    """A property of the newborn model whose remainder is judged."""

    key: str
    section: str
    scalar: str
    strangers: str
    subject: str
    """Subject of the sentence; ``{whose}`` and ``{start}`` are replaced by the words of the start."""

    def deviations(self, snapshot: Snapshot) -> float:
        """Return the distance of today's value from chance in standard deviations."""
        if self.scalar == "rank_persistence":
            size = finite_or_nan(snapshot.summary.get("vocab_size"))
            return abs(scalar(snapshot, self.scalar)) * sqrt(size - 1) if size > 1 else nan
        share = scalar(snapshot, "energy_share_chance")
        return abs(scalar(snapshot, "drift")) / sqrt(share) if share > 0 else nan


_DIRECTION = _Mark("direction", "direction", "alignment", "alignment_stranger", "{whose} direction")
_RANKING = _Mark(
    "ranking", "persistence", "rank_persistence", "rank_persistence_stranger", "The ranking of tokens {start}"
)


def direction(history: RunHistory) -> Verdict | None:
    """Judge the remainder of the seed direction."""
    return _mark(history, _DIRECTION)


def ranking(history: RunHistory) -> Verdict | None:
    """Judge the remainder of the newborn model's order of preferred tokens."""
    return _mark(history, _RANKING)


def _mark(history: RunHistory, mark: _Mark) -> Verdict | None:
    now = history.last
    if now is None or not is_measured(history, mark.scalar):
        return None
    steps, values, control = over_training(history, mark.scalar, mark.strangers)
    sentence, tone = _remaining_mark(history, mark, now)
    return Verdict(mark.key, sentence, tone, steps, values, control, mark.section)


def _remaining_mark(history: RunHistory, mark: _Mark, now: Snapshot) -> tuple[str, Tone]:
    """Judge the value against strangers, against chance, and against birth."""
    value, at_birth = scalar(now, mark.scalar), scalar(history.first, mark.scalar)
    most, inter = abs(scalar(now, mark.strangers)), scalar(history.first, "inter")
    start, whose = history.start.at, history.start.whose
    subject = mark.subject.format(start=start, whose=whose)
    asked = subject[0].lower() + subject[1:]
    if isnan(value):
        return f"{subject}: not a number {at_step(now)}.", "unclear"
    if mark is _DIRECTION and inter < threshold("contraction"):
        hardly = f"{start} the outputs for different inputs had hardly one (mean cosine {in_prose(inter)})"
        return f"{subject} says little: {hardly}; the alignment is {in_prose(value)}.", "unclear"
    if isnan(most):
        return f"{subject}: {in_prose(value)}; no strangers were measured to say how much of it is chance.", "unclear"
    control = f"{in_prose(value)} against {_strangers(now, mark.strangers, most)}"
    above, deviations = abs(value) > most, mark.deviations(now)
    beyond, share = deviations >= threshold("chance"), value / at_birth if at_birth > 0 else nan
    if above and beyond:
        return _survives(subject, control, start, value, at_birth)
    # A value that is neither beyond chance nor sizeable is not a trace, even if it exceeds a few strangers.
    if deviations < threshold("chance") and (not above or abs(share) < threshold("trace")):
        chance = "; chance alone may give as much" if above else ""
        return f"{subject} is gone: {control}{chance}.", "absent"
    why = "strangers have as much" if not above else "what chance gives is not known"
    why = why if not above or isnan(deviations) else "chance alone may give as much"
    return f"Whether {asked} survives cannot be told: {control}; {why}.", "unclear"


def _survives(subject: str, control: str, start: str, value: float, at_birth: float) -> tuple[str, Tone]:
    """Describe the share of the value at birth that remains, for a value beyond chance."""
    if value < 0:
        return f"{subject} is turned round: {control}.", "present"
    if not at_birth > 0:
        return f"{subject} survives: {control}; the value {start} is not known.", "present"
    share, beside = value / at_birth, f"{control}; {in_prose(at_birth)} {start}."
    if share >= threshold("persists"):
        return f"{subject} persists: {beside}", "present"
    if share >= threshold("trace"):
        return f"{subject} survives, weakened: {beside}", "present"
    return f"{subject} has left a trace: {beside}", "weak"


def _strangers(snapshot: Snapshot, name: str, most: float) -> str:
    """Describe the largest value of strangers, and their number."""
    array = snapshot.arrays.get(name)
    if array is None:
        return f"at most {in_prose(most)} for strangers"
    return (
        f"at most {in_prose(most)} for {len(array)} strangers"
        if len(array) > 1
        else f"{in_prose(most)} for one stranger"
    )


def lineage(history: RunHistory) -> Verdict | None:
    """Judge if hidden states still show the birth that the model comes from."""
    steps, zs = history.series("seedprint/z")
    if not steps:
        return None
    logged = history.metrics[steps[-1]]
    z, log10_p = zs[-1], finite_or_nan(logged.get("seedprint/log10_p"))
    stranger = finite_or_nan(logged.get("seedprint/z_stranger"))
    is_seed = history.start.is_birth and "init_seed" in history.birth
    seed = f"seed {history.birth['init_seed']}" if is_seed else history.start.noun
    control = f"strangers at most {in_prose(stranger, 1)}" if isfinite(stranger) else "no stranger was tested"
    test = "The lineage test" if steps[-1] else f"{history.start.at.capitalize()} the lineage test"
    tone: Tone
    found, tone = f"could not be made at step {steps[-1]:,}", "unclear"
    if not isnan(z + log10_p):
        found, tone = _lineage_in_words(seed, z, log10_p, stranger)
        found += f": z {in_prose(z, 1)}, {p_in_prose(log10_p)}"
    weights = finite_or_nan(logged.get("seedprint/weights"))
    strange = finite_or_nan(logged.get("seedprint/weights_stranger"))
    if tone != "present" and weights >= LEAST_COSINE and not weights <= abs(strange):
        # Training changes hidden states beyond recognition long before it does weights.
        beside = f", strangers' at most {in_prose(abs(strange))}" if isfinite(strange) else ""
        control += f". Its weights still show it: their mean cosine with {seed} is {in_prose(weights)}{beside}"
        tone = "present"
    controls = [finite_or_nan(history.metrics[step].get("seedprint/z_stranger")) for step in steps]
    known = controls if any(map(isfinite, controls)) else None
    return Verdict("lineage", f"{test} {found}; {control}.", tone, steps, zs, known, "lineage")


def _lineage_in_words(seed: str, z: float, log10_p: float, stranger: float) -> tuple[str, Tone]:
    """Describe the outcome of a test; ``stranger`` is the largest z of one, or NaN."""
    if not (z > 0 and log10_p < threshold("lineage")):
        return f"does not find {seed}", "absent"
    if z < stranger + threshold("lineage_margin"):
        return f"cannot tell {seed} from strangers", "unclear"
    return f"finds {seed}", "present"


def preference(history: RunHistory) -> Verdict | None:
    """Name the token that the model favours for any input; None if the verdict on its birth says as much."""
    now = history.last or history.first
    kl, ratio = (scalar(now, name) for name in ("kl_uniform", "preference_ratio"))
    if now is None or not is_measured(history, "preference_ratio") or (now.step == 0 and history.start.is_birth):
        return None
    steps, values, _ = over_training(history, "preference_ratio", "preference_ratio")
    tokens = now.summary.get("top_tokens") or [{}]
    favourite = one_line(tokens[0].get("text", ""), 24)
    named = f"the favourite token{favourite and f' “{favourite}”'}"
    numbers = f"{named} gets {in_prose(ratio, 1)} times its even share on random tokens"
    control = f"1 is none; KL {in_prose(kl)} nats from uniform"
    tone: Tone = "unclear"
    if isnan(kl + ratio):
        sentence = f"Which tokens the model favours is not known: p̄ is not a number {at_step(now)}."
    elif kl >= threshold("preference"):
        sentence, tone = f"The model favours some tokens whatever it reads: {numbers} ({control}).", "present"
    else:
        sentence, tone = f"The model hardly favours any token: {numbers} ({control}).", "absent"
    return Verdict("preference", sentence, tone, steps, values, [1.0] * len(steps), "preference", headline=False)
