"""Lineage: evidence in hidden states of the birth that the model comes from [SP]."""

from __future__ import annotations

from ..pictures.curves import Control
from ..pictures.style import DASHED, SOLID
from .link import Link
from .section import Section
from .training_view import TrainingView


def _over_training(view: TrainingView, section: Section) -> None:
    curves = view.logged(
        {"seedprint/z": (view.start.says("own birth"), SOLID), "seedprint/z_stranger": ("strangers, largest", DASHED)}
    )
    view.add_curves(section, "z", "z of the lineage test.", curves, "z")
    weights = view.logged(
        {
            "seedprint/weights": (view.start.says("own birth"), SOLID),
            "seedprint/weights_stranger": ("stranger, largest", DASHED),
        }
    )
    view.add_curves(section, "weights", "Mean cosine of the weights' matrices.", weights, "cosine")
    p = view.logged({"seedprint/log10_p": ("", SOLID)})
    caption = "Chance of as large a z between strangers, as a power of ten; below −2 it is the same lineage."
    if p:
        last = max(max(curve.steps) for curve in p)
        level = Control("p = 0.01", [0.0, last], [-2.0, -2.0], quantity="level")
        view.add_curves(section, "p", caption, p, "log₁₀ p", [level])


LINEAGE = Link(
    "lineage",
    "Lineage",
    "Whether hidden states on random inputs still show which birth the model comes from: z of the lineage test "
    "(dimension permutation) against its own birth, and the cosine of its weights with it, which training changes far "
    "more slowly. A stranger's z has a standard deviation of 1, its cosine is 0.",
    _over_training,
    quantities=(
        "seedprint/z",
        "seedprint/z_stranger",
        "seedprint/log10_p",
        "seedprint/weights",
        "seedprint/weights_stranger",
    ),
    optional=True,
)
