"""Config of changes in the shares of sources during a run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightChange:
    """The weights of a mixture from a step on."""

    step: int
    """Optimizer steps before it: the next batch is the first with these weights."""

    weights: dict[str, float]
    """Shares of the training tokens by the sources' names, relative to each other; a source that is left out is not
    read."""

    @property
    def given(self) -> set[str]:
        """Weights of the sources that are read."""
        return {name for name, weight in self.weights.items() if weight}


def schedule_problems(schedule: Sequence[WeightChange], names: Iterable[str]) -> list[str]:
    """List everything that makes changes of the weights of these sources impossible, one line each, with the remedy."""
    names, found, before = list(names), [], 0
    if schedule and not names:
        return ["data.schedule: changes the weights of data.sources, and there are none; leave it out"]
    for i, change in enumerate(schedule):
        place = f"data.schedule[{i}]"
        if not before < change.step <= 10**10:
            found.append(f"{place}.step: {change.step} is not above {before}, where the weights before it begin")
        before = max(before, change.step)
        for name, weight in change.weights.items():
            if name not in names:
                found.append(f"{place}.weights: {name!r} is none of data.sources; they are {', '.join(names)}")
            if not 0 <= weight < math.inf:
                found.append(f"{place}.weights: {weight} of {name!r} is not a number of at least 0")
        if not change.given:
            found.append(f"{place}.weights: none is positive; give a source that is read")
    return found
