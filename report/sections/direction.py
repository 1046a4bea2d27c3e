"""The seed direction: remainder of the direction in which the newborn model sent every input [BB]."""

from __future__ import annotations

import numpy as np

from ..pictures.curves import Control
from ..pictures.style import DASHED, SOLID
from ..text import finite_or_nan
from .link import Link
from .section import Drawing, Section
from .snapshot_view import Arrays, SnapshotView, draw_by_block
from .training_view import TrainingView

_STRANGERS = "strangers, largest |cosine|"


def _over_training(view: TrainingView, section: Section) -> None:
    band = view.control("alignment_stranger", _STRANGERS)
    curves = view.measured({"alignment": ("", SOLID)})
    caption = "Alignment. Grey: the same states against seed directions of other seeds."
    view.add_curves(section, "alignment", caption, curves, "alignment (cosine)", band)
    drift = view.measured({"drift": ("", SOLID)})
    view.add_curves(section, "drift", "Drift; 1 is birth.", drift, "drift (cosine)")


def _in_snapshot(view: SnapshotView, section: Section) -> None:
    caption = "Alignment with the seed direction, and drift, by block."
    view.add(section, "alignment", caption, ["alignment"], _draw_alignment)

    def energy(arrays: Arrays) -> Drawing | None:
        share = arrays["energy_share"]
        chance = finite_or_nan(view.snapshot.bias.get("energy_share_chance"))
        level = [Control("chance, 1/d", [0, len(share) - 1], [chance, chance], quantity="energy_share_chance")]
        controls = level if np.isfinite(chance) else []
        roles = {"energy_share": ("", SOLID)}
        return draw_by_block({"energy_share": share}, roles, "share of energy", 0, controls, from_zero=True)

    view.add(section, "energy", "Share of the energy along the seed direction, by block.", ["energy_share"], energy)


def _draw_alignment(arrays: Arrays) -> Drawing | None:
    controls = []
    if (strangers := arrays.get("alignment_stranger")) is not None and len(strangers):
        largest = np.abs(strangers).max(0)
        controls = [Control(_STRANGERS, range(len(largest)), largest.tolist(), True, "alignment_stranger")]
    names = {"alignment": ("alignment", SOLID), "drift": ("drift", DASHED)}
    found = {name: arrays[name] for name in names if name in arrays}
    return draw_by_block(found, names, "cosine", 0, controls, from_zero=True)


DIRECTION = Link(
    "direction",
    "Seed direction",
    "The seed direction is the mean direction in which random inputs leave the last block at birth. Alignment is "
    "the mean cosine of today's hidden states with it; drift is the cosine of today's mean direction with it.",
    _over_training,
    "The seed direction of a block is the mean direction in which random inputs leave it at birth. Alignment: mean "
    "cosine of the states with it. Drift: cosine of the mean direction with it. Energy share: how much of the "
    "squared norm lies along it.",
    _in_snapshot,
    quantities=(
        "alignment", "alignment_stranger", "drift", "energy_share", "energy_share_chance", "mean_direction",
        "stranger_direction",
    ),
)  # fmt: skip
