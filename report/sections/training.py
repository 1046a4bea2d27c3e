"""Training itself: losses, times of steps, scores of tasks and bits per byte of texts."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ...findings.run_history import RunHistory
from ...metrics.quantities import LOGGED, SECTIONS
from .declared import Link
from .section import Section
from .training_view import AVERAGED, Curve, TrainingView, last_step, level_of, shown_of_runs

_BESIDE_LOSS = {
    "val/bits_per_byte": ("bits", "Validation text, per UTF-8 byte."),
    "val/loss_trigger": ("trigger", "Validation loss at trigger positions."),
    "train/z_loss": ("z_loss", "What the z-loss adds to what training minimises."),
    "train/load_balance": ("load_balance", "Load balance of the routers: 1 where all experts are used alike."),
    "train/grad_norm": ("norm", "Gradient norm before clipping."),
}
"""Quantities of the log that have a picture below the loss → its key and caption."""


def _loss_over_training(view: TrainingView, section: Section) -> None:
    if not any(run.birth or run.metrics for run in view.runs):
        return  # measured here, trained elsewhere
    for run in view.runs:
        for key in ("train/loss", "val/loss"):
            steps, values = run.series(key)
            bad = [step for step, value in zip(steps, values, strict=True) if not np.isfinite(value)]
            if bad:
                section.notes.append(
                    f"{run.name}: {key} is not a number in {len(bad)} lines, first at step {bad[0]:,}."
                )
    losses = view.logged(
        {"train/loss": "train", "val/loss": "validation", "ema/val/loss": f"validation, {AVERAGED}"},
    )
    entropies = {run.unigram_entropy for run in view.runs}
    levels = [
        level_of("unigram entropy", entropy, last_step(losses), "unigram_entropy")
        for entropy in sorted(entropies)
        if np.isfinite(entropy)
    ]
    if losses:
        caption = "Training and validation loss."
        view.add_curves(section, "loss", caption, losses, "loss (nats per token)", levels)
    else:
        section.notes.append("No losses are recorded yet.")
    for name, (key, caption) in _BESIDE_LOSS.items():
        if name != "train/grad_norm" or len(section.pictures) % 2:  # the last one fills a place that is free in the row
            view.add_curves(section, key, caption, view.logged({name: ""}), LOGGED[name].label)


LOSS = Link(
    "loss",
    "Loss",
    "Mean cross-entropy on training batches and on held-out windows. The unigram entropy is what a model reaches "
    "that knows nothing but how frequent each token is.",
    _loss_over_training,
    quantities=(
        *("train/loss", "val/loss"),
        *_BESIDE_LOSS,
    ),
    optional=True,
)


# ---------------------------------------------------------------- section on the speed of training
# Times of steps, and the time spent waiting.

_STEPS = {
    "train/step_p50_s": "median",
    "train/step_p99_s": "99 %",
    "train/slowest_rank_p50_s": "slowest rank",
}


def _speed_over_training(view: TrainingView, section: Section) -> None:
    steps = view.logged(_STEPS)
    view.add_curves(section, "steps", "Time of a step, without snapshots and checkpoints.", steps, "seconds per step")
    waited = view.logged({"train/data_wait": ""})
    view.add_curves(section, "data", "Share of the time in which steps waited for their data.", waited, "data wait")


SPEED = Link(
    "speed",
    "Speed",
    "How long steps took, and how much of that they waited for their data. Medians and 99 % are of rank 0.",
    _speed_over_training,
    quantities=(*_STEPS, "train/data_wait"),
    optional=True,
)


# ---------------------------------------------------------------- section on the abilities of the model
# Scores of tasks and bits per byte of texts, beside the sink at the same steps.

_BESIDE = ("chance", "_stderr")
_TOGETHER = ("acc", "acc_norm")
"""Scores that are two readings of one: they share a picture."""


def evaluated(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """Map each text and task on which any run was evaluated to its scores, without standard errors and chance."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key in run.metrics.names:
            prefix, _, rest = key.partition("/")
            name, slash, score = rest.partition("/")
            if prefix == "eval" and slash and not score.partition("/")[0].endswith(_BESIDE):
                found.setdefault(name, {})[score] = None
    return {name: list(scores) for name, scores in found.items()}


def in_words(score: str) -> str:
    """Return the name of a score as an axis label."""
    return {"acc": "accuracy", "acc_norm": "accuracy by length"}.get(score, score.replace("_", " "))


def _tasks_over_training(view: TrainingView, section: Section) -> None:
    for name, scores in evaluated(view.runs).items():
        together = [score for score in scores if score in _TOGETHER]
        groups = [together] if together else []
        for group in [*groups, *([score] for score in scores if score not in _TOGETHER)]:
            lines = {f"eval/{name}/{score}": in_words(score) if len(group) > 1 else "" for score in group}
            key = re.sub(r"[^a-z0-9]+", "-", f"{name} {group[0]}".lower()).strip("-")
            what = in_words(group[0])
            controls = _chance(view, name) if group is together else []
            curves = view.logged(lines)
            view.add_curves(section, key, f"{name}: {what}.", curves, what, controls)
    if section.pictures:
        sink = shown_of_runs(view.runs, SECTIONS["sink"].headline)
        caption = f"{sink.label.capitalize()} at the same steps."
        curves, before = view.by_probe(SECTIONS["sink"].headline, as_shares=True), len(section.pictures)
        view.add_curves(section, "sink", caption, curves, sink.axis_label, view.controls(sink, curves))
        # Beside the first of them.
        section.pictures[1:1] = [section.pictures.pop() for _ in range(len(section.pictures) - before)]


def _chance(view: TrainingView, name: str) -> list[Curve]:
    """Return the score that guessing reaches, as a control."""
    found = {value for run in view.runs for value in run.series(f"eval/{name}/chance")[1] if np.isfinite(value)}
    last = float(max((max(run.metrics, default=0) for run in view.runs), default=0))
    return [level_of("chance", level, last) for level in sorted(found)]


TASK_CURVES = Link(
    "evaluation",
    "Evaluation",
    "What the model can do as it trains, in scores of tasks and bits per byte of texts, and the sink beside it. The "
    "documents are the same at every step; chance is the accuracy of guessing.",
    _tasks_over_training,
    quantities=(
        "eval/TEXT/bits_per_byte",
        "eval/TASK/SCORE",
        "eval/TASK/chance",
        "eval/backcopy/copy_accuracy",
        "eval/backcopy/excess_loss",
    ),
    optional=True,
)
