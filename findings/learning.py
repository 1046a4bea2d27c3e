"""What was measured at all, and whether the model learned."""

from __future__ import annotations

from math import isfinite, isnan, nan

from ..files import finite_or_nan
from .history import RunHistory
from .thresholds import threshold
from .verdict import Tone, Verdict
from .wording import in_prose


def what_is_missing(history: RunHistory) -> Verdict | None:
    """What has to be measured before training can be judged; nothing where it can be."""
    if history.last is not None:
        return None
    there = "There is no snapshot yet" if history.first is None else "Only the birth is measured yet"
    return Verdict("snapshots", f"{there}: what training does is not known.", "unclear", [], [], None, "")


def loss(history: RunHistory) -> Verdict | None:
    """Whether the model learned, by its validation loss."""
    steps, losses = history.series("val/loss")
    if not steps:
        return None
    entropy, learned = _unigram_entropy(history), has_learned(history)
    fell = f"validation loss {in_prose(losses[0], 2)} → {in_prose(losses[-1], 2)} nats"
    tone: Tone = "unclear" if learned is None else "present" if learned else "absent"
    if isnan(losses[-1]):
        sentence = f"The validation loss is not a number at step {steps[-1]:,}."
    elif learned is None or len(steps) == 1:
        sentence, tone = f"The validation loss is {in_prose(losses[-1], 2)} nats; before, it is not known.", "unclear"
    elif isnan(entropy):
        sentence = f"The model has {'' if learned else 'not '}learned: {fell}."
    elif learned:
        sentence = f"The model has learned: {fell}, below the {in_prose(entropy, 2)} of token frequencies."
    else:
        sentence = f"The model has learned no more than token frequencies ({in_prose(entropy, 2)}): {fell}."
    control = [entropy] * len(steps) if isfinite(entropy) else None
    return Verdict("loss", sentence, tone, steps, losses, control, "loss")


def has_learned(history: RunHistory) -> bool | None:
    """Whether the validation loss says that the model learned its data; None where it does not say."""
    steps, losses = history.series("val/loss")
    if not steps or isnan(losses[-1]):
        return None
    entropy = _unigram_entropy(history)
    reference = entropy if isfinite(entropy) else losses[0] if len(steps) > 1 else nan
    return None if isnan(reference) else losses[-1] <= reference - threshold("learned")


def _unigram_entropy(history: RunHistory) -> float:
    """Entropy of the corpus' token frequencies, nats; NaN where it is not known."""
    return finite_or_nan((history.birth.get("data") or {}).get("unigram_entropy"))
