"""The trainings of a suite as chains of checkpoints: each stage, and each ingredient of a stage, is one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..metrics.between.weight_kinship import Steps, steps_of
from .places import Place


class Chain(NamedTuple):
    """Checkpoints that one training passed through."""

    stage: int
    own: list[int]
    """In the order of their steps."""
    begins_from: int | None
    """The last checkpoint of the stage before, if the suite has one."""

    @property
    def path(self) -> list[int]:
        """The checkpoints, behind the one that the training began from."""
        return self.own if self.begins_from is None else [self.begins_from, *self.own]


def chains(places: Mapping[int, Place], distance_MM: np.ndarray) -> list[Chain]:
    """Divide checkpoints into chains, in the order of training.

    Where the stage before has several ends, a chain begins from the nearest.
    """
    by_training: dict[tuple[int, str, int, str], list[int]] = {}
    for i, place in sorted(places.items(), key=lambda item: (item[1], item[0])):
        by_training.setdefault(place.chain, []).append(i)
    found: list[Chain] = []
    for training, own in by_training.items():
        stage, _, _, beginning = training
        earlier = [chain for chain in found if chain.stage < stage]
        ends = [chain.own[-1] for chain in earlier if chain.stage == earlier[-1].stage]
        known = bool(ends) and not beginning
        found.append(Chain(stage, own, min(ends, key=lambda end: distance_MM[end, own[0]]) if known else None))
    return found


def steps_of_chains(found: Iterable[Chain]) -> Steps:
    """The steps of all chains as pairs of checkpoints."""
    return frozenset().union(*(steps_of(chain.path) for chain in found))
