"""Contraction along depth: degree to which all states share one direction [BB]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..csv_files import LabelledArray
from ..pictures.later import later
from ..pictures.layers import draw_contraction
from ..run_history import RunHistory
from .link import Link
from .section import Drawing, Section
from .snapshot_view import Arrays, SnapshotView
from .training_view import TrainingView, arrays_at

#: Kinds of contraction, and the captions of their pictures.
_KINDS = {
    "inter": "Inter: across sequences, at the last position.",
    "intra": "Intra: across positions of one sequence.",
}


def _over_training(view: TrainingView, section: Section) -> None:
    for kind, caption in _KINDS.items():

        def draw(run: RunHistory, prefix: str, kind: str = kind) -> Drawing | None:
            found = arrays_at(run, prefix, f"{kind}_attention", f"{kind}_mlp")
            if not found:
                return None
            profiles = [(title, arrays[f"{kind}_attention"], arrays[f"{kind}_mlp"]) for title, _, arrays in found]
            numbers = [array for _, step, arrays in found for array in _numbers(kind, arrays, step)]
            return later(draw_contraction, profiles, run=run.index), numbers

        view.add_per_probe(section, kind, caption, draw)


def _in_snapshot(view: SnapshotView, section: Section) -> None:
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
    _over_training,
    in_snapshot=_in_snapshot,
    quantities=tuple(f"{kind}{site}" for kind in _KINDS for site in ("", "_mlp", "_attention")),
)
