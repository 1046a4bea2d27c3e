"""The seed's mark in hidden states: the seed direction, contraction along depth, lineage [BB, SP]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..csv_files import LabelledArray
from ..pictures.curves import Control
from ..pictures.layers_and_heads import draw_contraction
from ..pictures.saving import later
from ..pictures.style import DASHED, SOLID
from ..run_history import RunHistory
from ..text import finite_or_nan
from .declared import Link
from .section import Drawing, Section
from .snapshot_view import Arrays, SnapshotView, draw_by_block
from .training_view import AVERAGED, TrainingView, arrays_at

_STRANGERS = "strangers, largest |cosine|"


def _direction_over_training(view: TrainingView, section: Section) -> None:
    band = view.control("alignment_stranger", _STRANGERS)
    averaged = view.logged({"ema/bias/alignment": (AVERAGED, DASHED)})
    curves = [*view.measured({"alignment": ("trained weights" if averaged else "", SOLID)}), *averaged]
    caption = "Alignment. Grey: the same states against seed directions of other seeds."
    view.add_curves(section, "alignment", caption, curves, "alignment (cosine)", band)
    drift = view.measured({"drift": ("", SOLID)})
    view.add_curves(section, "drift", "Drift; 1 is birth.", drift, "drift (cosine)")


def _direction_in_snapshot(view: SnapshotView, section: Section) -> None:
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
    _direction_over_training,
    "The seed direction of a block is the mean direction in which random inputs leave it at birth. Alignment: mean "
    "cosine of the states with it. Drift: cosine of the mean direction with it. Energy share: how much of the "
    "squared norm lies along it.",
    _direction_in_snapshot,
    quantities=(
        "alignment", "alignment_stranger", "drift", "energy_share", "energy_share_chance", "mean_direction",
        "stranger_direction",
    ),
)  # fmt: skip


# ---------------------------------------------------------------- contraction along depth
# Degree to which all states share one direction [BB].

#: Kinds of contraction, and the captions of their pictures.
_KINDS = {
    "inter": "Inter: across sequences, at the last position.",
    "intra": "Intra: across positions of one sequence.",
}


def _contraction_over_training(view: TrainingView, section: Section) -> None:
    for kind, caption in _KINDS.items():

        def draw(run: RunHistory, prefix: str, kind: str = kind) -> Drawing | None:
            found = arrays_at(run, prefix, f"{kind}_attention", f"{kind}_mlp")
            if not found:
                return None
            profiles = [(title, arrays[f"{kind}_attention"], arrays[f"{kind}_mlp"]) for title, _, arrays in found]
            numbers = [array for _, step, arrays in found for array in _numbers(kind, arrays, step)]
            return later(draw_contraction, profiles, run=run.index), numbers

        view.add_per_probe(section, kind, caption, draw)


def _contraction_in_snapshot(view: SnapshotView, section: Section) -> None:
    for kind, caption in _KINDS.items():
        names = [f"{kind}_attention", f"{kind}_mlp"]

        def draw(arrays: Arrays, kind: str = kind, names: Sequence[str] = names) -> Drawing:
            figure = later(draw_contraction, [("", arrays[names[0]], arrays[names[1]])], run=0)
            return figure, _numbers(kind, arrays, view.snapshot.step)

        view.add(section, kind, caption, names, draw)


def _numbers(kind: str, arrays: Mapping[str, np.ndarray], step: int) -> list[LabelledArray]:
    """Return the numbers of the picture of one kind of contraction of one snapshot."""
    return [
        LabelledArray(name, arrays[name], [{"layer": range(start, len(arrays[name]) + start)}], {"step": step})
        for name, start in ((f"{kind}_attention", 1), (f"{kind}_mlp", 0))
    ]


CONTRACTION = Link(
    "contraction",
    "Contraction along depth",
    "The mean cosine between hidden states of different inputs (inter) and of different positions of one input "
    "(intra): near 1, all inputs have become one direction.",
    _contraction_over_training,
    in_snapshot=_contraction_in_snapshot,
    quantities=tuple(f"{kind}{site}" for kind in _KINDS for site in ("", "_mlp", "_attention")),
)


# ---------------------------------------------------------------- lineage
# Evidence in hidden states of the birth that the model comes from [SP].


def _lineage_over_training(view: TrainingView, section: Section) -> None:
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
    _lineage_over_training,
    quantities=(
        "seedprint/z",
        "seedprint/z_stranger",
        "seedprint/log10_p",
        "seedprint/weights",
        "seedprint/weights_stranger",
    ),
    optional=True,
)
