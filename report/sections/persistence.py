"""Rank persistence: how far the newborn model's order of tokens still stands [BB, SP]."""

from __future__ import annotations

from ..pictures.style import DASHED, DOTTED, SOLID
from .link import Link
from .section import Section
from .training_view import TrainingView


def _over_training(view: TrainingView, section: Section) -> None:
    curves = view.measured({"rank_persistence": ("Spearman ρ", SOLID), "kendall_tau": ("Kendall τ-b", DASHED)})
    band = view.control("rank_persistence_stranger", "strangers, largest |ρ|")
    caption = "Rank correlation of p̄ with birth, over the whole vocabulary."
    view.add_curves(section, "correlation", caption, curves, "rank correlation", band)
    # Where the vocabulary has only k tokens, the top k of any two models overlap entirely.
    smallest = min((s.summary.get("vocab_size", 0) for run in view.runs for s in run.snapshots), default=0)
    styles = {10: DOTTED, 100: DASHED, 1000: SOLID}
    roles = {f"overlap_{k}": (f"top {k:,}", style) for k, style in styles.items() if k < smallest}
    caption = "Overlap of the k most preferred tokens with birth's."
    view.add_curves(section, "overlap", caption, view.measured(roles), "overlap@k")


PERSISTENCE = Link(
    "persistence",
    "Rank persistence",
    "How far the order in which the newborn model preferred tokens still stands, "
    "beside the order of strangers, births of the same config from other seeds.",
    _over_training,
    quantities=(
        "rank_persistence", "rank_persistence_stranger", "kendall_tau", "overlap_10", "overlap_100", "overlap_1000",
        "rbo",
    ),
)  # fmt: skip
