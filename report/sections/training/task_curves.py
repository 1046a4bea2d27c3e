"""Section on the abilities of the model: scores of tasks and bits per byte of texts, beside the sink at the
same steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from ...pictures.curves import Control
from ...pictures.style import DASHED, SOLID
from ...run_history import RunHistory
from ..link import Link
from ..section import Section
from ..training_view import TrainingView

_BESIDE = ("chance", "_stderr")
_TOGETHER = {"acc": SOLID, "acc_norm": DASHED}
"""Scores that are two readings of one: they share a picture."""


def evaluated(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """Map each text and task on which any run was evaluated to its scores, without standard errors and chance."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for record in run.metrics.values():
            for key in record:
                prefix, _, rest = key.partition("/")
                name, slash, score = rest.partition("/")
                if prefix == "eval" and slash and not score.partition("/")[0].endswith(_BESIDE):
                    found.setdefault(name, {})[score] = None
    return {name: list(scores) for name, scores in found.items()}


def in_words(score: str) -> str:
    """Return the name of a score as an axis label."""
    return {"acc": "accuracy", "acc_norm": "accuracy by length"}.get(score, score.replace("_", " "))


def _over_training(view: TrainingView, section: Section) -> None:
    for name, scores in evaluated(view.runs).items():
        together = [score for score in scores if score in _TOGETHER]
        groups = [together] if together else []
        for group in [*groups, *([score] for score in scores if score not in _TOGETHER)]:
            lines = {
                f"eval/{name}/{score}": (in_words(score) if len(group) > 1 else "", _TOGETHER.get(score, SOLID))
                for score in group
            }
            key = re.sub(r"[^a-z0-9]+", "-", f"{name} {group[0]}".lower()).strip("-")
            what = in_words(group[0])
            controls = _chance(view, name) if group is together else []
            curves = view.logged(lines)
            view.add_curves(section, key, f"{name}: {what}.", curves, what, controls, from_zero=bool(controls))
    if section.pictures:
        caption = "Sink mass at the same steps."
        sink = view.control("sink_uniform", "uniform", band=False)
        before = len(section.pictures)
        view.add_curves(section, "sink", caption, view.by_probe("sink_mass"), "sink mass", sink)
        # Beside the first of them.
        section.pictures[1:1] = [section.pictures.pop() for _ in range(len(section.pictures) - before)]


def _chance(view: TrainingView, name: str) -> list[Control]:
    """Return the score that guessing reaches, as a control."""
    found = {value for run in view.runs for value in run.series(f"eval/{name}/chance")[1] if np.isfinite(value)}
    reach = [0.0, float(max((max(run.metrics, default=0) for run in view.runs), default=0))]
    return [Control("chance", reach, [level, level], quantity="level") for level in sorted(found)]


TASK_CURVES = Link(
    "evaluation",
    "Evaluation",
    "What the model can do as it trains, in scores of tasks and bits per byte of texts, and the sink beside it. The "
    "documents are the same at every step; chance is the accuracy of guessing.",
    _over_training,
    quantities=(
        "eval/TEXT/bits_per_byte",
        "eval/TASK/SCORE",
        "eval/TASK/chance",
        "eval/backcopy/copy_accuracy",
        "eval/backcopy/excess_loss",
    ),
    optional=True,
)
