"""Quantities of an evaluation in the training log; the name of a text or task comes in the middle."""

from __future__ import annotations

from functools import partial

from .unlisted import unlisted

_evaluated = partial(unlisted, section="evaluation", format=".3f")

EVALUATION = (
    _evaluated(
        "eval/TEXT/bits_per_byte",
        label="bits per byte of a text",
        definition="Summed −log₂ p of the tokens of a text over its UTF-8 bytes.",
        unit="bits per UTF-8 byte",
        when="`eval.texts` has TEXT",
    ),
    _evaluated(
        "eval/TASK/SCORE",
        label="score of a task",
        definition="A score of lm-eval, by its name there; of a filter of its own, `SCORE/FILTER`. `SCORE_stderr` is "
        "the standard error of one that is a mean over documents.",
        when="`eval.tasks` has TASK",
    ),
    _evaluated(
        "eval/TASK/chance",
        label="chance",
        definition="Accuracy of guessing: the mean of 1 / choices over the documents.",
        format="percent",
        when="`eval.tasks` has TASK, of multiple choice",
    ),
    _evaluated(
        "eval/backcopy/copy_accuracy",
        label="copy accuracy",
        definition="Share of triggers after which the copy is the likeliest token.",
        format="percent",
        when="`eval.tasks` has `backcopy`",
    ),
    _evaluated(
        "eval/backcopy/excess_loss",
        label="excess loss",
        definition="Loss above that of a perfect model on the same samples.",
        unit="nats per token",
        when="`eval.tasks` has `backcopy`",
    ),
)
"""Quantities of ``eval/…``."""
