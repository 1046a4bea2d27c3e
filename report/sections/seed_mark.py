"""The seed's mark in hidden states: the seed direction, contraction along depth, lineage [BB, SP]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...files import finite_or_nan
from ...findings.run_history import RunHistory
from ..charts.specs import Drawn
from ..csv_files import LabelledArray
from .declared import Link
from .section import Section
from .snapshot_view import Arrays, SnapshotView, draw_by_block, levels
from .training_view import AVERAGED, TrainingView, arrays_at, last_step, level_of

_STRANGERS = "strangers, largest |cosine|"


def _direction_over_training(view: TrainingView, section: Section) -> None:
    band = view.measured({"alignment_stranger": _STRANGERS})
    averaged = view.logged({"ema/bias/alignment": AVERAGED})
    curves = [*view.measured({"alignment": "trained weights" if averaged else ""}), *averaged]
    caption = "Alignment. Grey: the same states against seed directions of other seeds."
    view.add_curves(section, "alignment", caption, curves, "alignment (cosine)", band)
    drift = view.measured({"drift": ""})
    view.add_curves(section, "drift", "Drift; 1 is birth.", drift, "drift (cosine)")


def _direction_in_snapshot(view: SnapshotView, section: Section) -> None:
    caption = "Alignment with the seed direction, and drift, by block."
    view.add(section, "alignment", caption, ["alignment"], _draw_alignment)

    def energy(arrays: Arrays) -> Drawn | None:
        share = arrays["energy_share"]
        chance = finite_or_nan(view.snapshot.bias.get("energy_share_chance"))
        level = levels("energy_share_chance", [chance, chance], [0, len(share) - 1])
        names = {"energy_share": "", level.quantity: "chance, 1/d"}
        shown = [level] if np.isfinite(chance) else []
        return draw_by_block({"energy_share": share}, "share of energy", 0, shown, names)

    view.add(section, "energy", "Share of the energy along the seed direction, by block.", ["energy_share"], energy)


def _draw_alignment(arrays: Arrays) -> Drawn | None:
    controls = []
    if (strangers := arrays.get("alignment_stranger")) is not None and len(strangers):
        largest = np.abs(strangers).max(0)
        controls = [levels("alignment_stranger", largest.tolist(), range(len(largest)))]
    found = {name: arrays[name] for name in ("alignment", "drift") if name in arrays}
    return draw_by_block(found, "cosine", 0, controls, {"alignment_stranger": _STRANGERS})


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

        def draw(run: RunHistory, prefix: str, kind: str = kind) -> Drawn | None:
            found = arrays_at(run, prefix, f"{kind}_attention", f"{kind}_mlp")
            numbers = [array for _, step, arrays in found for array in _numbers(kind, arrays, step)]
            return _contraction(kind, numbers) if numbers else None

        view.add_per_probe(section, kind, caption, draw)


def _contraction_in_snapshot(view: SnapshotView, section: Section) -> None:
    for kind, caption in _KINDS.items():
        names = [f"{kind}_attention", f"{kind}_mlp"]

        def draw(arrays: Arrays, kind: str = kind) -> Drawn:
            return _contraction(kind, _numbers(kind, arrays, view.snapshot.step))

        view.add(section, kind, caption, names, draw)


def _numbers(kind: str, arrays: Mapping[str, np.ndarray], step: int) -> list[LabelledArray]:
    """Return the numbers of the picture of one kind of contraction of one snapshot."""
    return [
        LabelledArray(name, arrays[name], [{"layer": range(start, len(arrays[name]) + start)}], {"step": step})
        for name, start in ((f"{kind}_attention", 1), (f"{kind}_mlp", 0))
    ]


def _contraction(kind: str, numbers: Sequence[LabelledArray]) -> Drawn:
    return Drawn(
        numbers,
        names={f"{kind}_attention": "after attention", f"{kind}_mlp": "after MLP"},
        unit="mean cosine",
        span=(0, 1),
    )


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
    birth = view.start.says("own birth")
    curves = view.logged({"seedprint/z": birth, "seedprint/z_stranger": "strangers, largest"})
    view.add_curves(section, "z", "z of the lineage test.", curves, "z")
    weights = view.logged({"seedprint/weights": birth, "seedprint/weights_stranger": "stranger, largest"})
    view.add_curves(section, "weights", "Mean cosine of the weights' matrices.", weights, "cosine")
    p = view.logged({"seedprint/log10_p": ""})
    caption = "Chance of as large a z between strangers, as a power of ten; below −2 it is the same lineage."
    if p:
        view.add_curves(section, "p", caption, p, "log₁₀ p", [level_of("p = 0.01", -2.0, last_step(p))])


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
