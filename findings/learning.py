"""Verdicts on the measurements of a run, and on its learning."""

from __future__ import annotations

from math import isfinite, isnan, log, nan

from .formatting import in_prose
from .run_history import RunHistory
from .thresholds import threshold
from .verdict import Tone, Verdict


def missing_quantities(history: RunHistory) -> Verdict | None:
    """Name the measurements that are missing before training can be judged; None if there are enough."""
    if history.last is not None:
        return None
    there = "There is no snapshot yet" if history.first is None else "Only the birth is measured yet"
    return Verdict("snapshots", f"{there}: what training does is not known.", "unclear", [], [], None, "")


def skipped_in_words(history: RunHistory) -> str | None:
    """Count the steps that were skipped, "8 of 10 steps"; None if none was."""
    skipped = (_skipped(history)[1] or [0])[-1]
    return f"{skipped:,.0f} of {max(history.metrics):,} steps" if skipped > 0 else None


def _skipped(history: RunHistory) -> tuple[list[int], list[float]]:
    return history.series("train/skipped_steps")


def skipped_steps(history: RunHistory) -> Verdict | None:
    """Say how many steps were skipped; None if none was."""
    counted = skipped_in_words(history)
    if counted is None:
        return None
    sentence = f"Training skipped {counted}: their loss or gradient was not finite."
    return Verdict("skipped_steps", sentence, "unclear", *_skipped(history), None, "loss")


def loss(history: RunHistory) -> Verdict | None:
    """Judge by its validation loss if the model learned: one that started from a model is judged against its start."""
    steps, losses = history.series("val/loss")
    if not steps:
        return None
    entropy = history.unigram_entropy
    control = [entropy] * len(steps) if isfinite(entropy) else None
    if history.birth.get("init_from"):
        control = [losses[0]] * len(steps) if steps[0] == 0 and isfinite(losses[0]) else None
        sentence, tone = _against_its_start(losses, control is not None, entropy)
    else:
        sentence, tone = _against_its_data(history, losses, entropy)
    if isnan(losses[-1]):
        sentence, tone = f"The validation loss is not a number at step {steps[-1]:,}.", "unclear"
    return Verdict("loss", sentence, tone, steps, losses, control, "loss")


def _against_its_data(history: RunHistory, losses: list[float], entropy: float) -> tuple[str, Tone]:
    learned = knows_its_data(history)
    fell = f"validation loss {in_prose(losses[0], 2)} → {in_prose(losses[-1], 2)} nats"
    tone: Tone = "present" if learned else "absent"
    if learned is None or len(losses) == 1:
        return f"The validation loss is {in_prose(losses[-1], 2)} nats; before, it is not known.", "unclear"
    if losses[-1] >= (even := _even_guess(history)):
        return f"The model has not learned: {fell}, above the {in_prose(even, 2)} of guessing evenly.", tone
    if isnan(entropy):
        return f"The model has {'' if learned else 'not '}learned: {fell}.", tone
    if learned:
        return f"The model has learned: {fell}, below the {in_prose(entropy, 2)} of token frequencies.", tone
    return f"The model has learned no more than token frequencies ({in_prose(entropy, 2)}): {fell}.", tone


def _against_its_start(losses: list[float], knows_start: bool, entropy: float) -> tuple[str, Tone]:
    """Judge a training that starts from another model: did its validation loss move from that model's?"""
    now = f"{in_prose(losses[-1], 2)} nats"
    if not knows_start or len(losses) == 1:
        return f"The validation loss is {now}; that of the model it started from is not known.", "unclear"
    fell = losses[0] - losses[-1]
    beside = f"; token frequencies alone give {in_prose(entropy, 2)}" if isfinite(entropy) else ""
    numbers = f"validation loss {in_prose(losses[0], 2)} → {now}{beside}"
    if abs(fell) < threshold("learned"):
        return f"Training has hardly changed how well the model it started from predicts: {numbers}.", "absent"
    if fell < 0:
        return f"Training has made the model it started from worse: {numbers}.", "absent"
    return f"Training has improved the model it started from: {numbers}.", "present"


def _even_guess(history: RunHistory) -> float:
    """Return the loss of giving every token of the vocabulary the same probability; NaN if that is unknown."""
    newest = history.last or history.first
    n_tokens = (history.birth.get("data") or {}).get("vocab_size") or (newest and newest.summary.get("vocab_size"))
    return log(n_tokens) if n_tokens else nan


def knows_its_data(history: RunHistory) -> bool | None:
    """Judge by the validation loss if the model learned its data, in this training or before; None if that is
    unclear.
    """
    steps, losses = history.series("val/loss")
    if not steps or isnan(losses[-1]):
        return None
    entropy = history.unigram_entropy
    if isnan(entropy) and history.birth.get("init_from"):
        return None  # a small step from its start says nothing of what the model knew before
    reference = entropy if isfinite(entropy) else losses[0] if len(steps) > 1 else nan
    if isnan(reference):
        return None
    return losses[-1] <= reference - threshold("learned") and not losses[-1] >= _even_guess(history)
