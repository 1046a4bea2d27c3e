"""Section on the speed of training: times of steps, and the time spent waiting."""

from __future__ import annotations

from ...pictures.style import DASHED, FAINT, SOLID
from ..link import Link
from ..section import Section
from ..training_view import TrainingView

_STEPS = {
    "train/step_p50_s": ("median", SOLID),
    "train/step_p99_s": ("99 %", FAINT),
    "train/slowest_rank_p50_s": ("slowest rank", DASHED),
}


def _over_training(view: TrainingView, section: Section) -> None:
    steps = view.logged(_STEPS)
    view.add_curves(section, "steps", "Time of a step, without snapshots and checkpoints.", steps, "seconds per step")
    waited = view.logged({"train/data_wait": ("", SOLID)})
    view.add_curves(section, "data", "Share of the time in which steps waited for their data.", waited, "data wait")


SPEED = Link(
    "speed",
    "Speed",
    "How long steps took, and how much of that they waited for their data. Medians and 99 % are of rank 0.",
    _over_training,
    quantities=(*_STEPS, "train/data_wait"),
    optional=True,
)
