"""Findings of order: the steps of the checkpoints of one birth against the path of their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from ..metrics.weight_kinship import (
    SHORTER,
    Steps,
    is_shorter,
    kinship,
    length_ratio,
    nearest_path,
    overshoot,
    shortest_path,
    tailedness,
)
from .checkpoint import Kind, Same
from .training_order import Chain, Direction, chains, find_direction, steps_of_chains

#: A step so many times as long as those before it let expect is none of the same training. Clean suites, over
#: optimizers, schedules and spacings, came to 1.1 at most where their steps had settled (research/log.md).
JUMP = 2.0
_OTHERWISE = "fine-tuned, trained on other data, or at a learning rate that was raised again"


class Curve:
    """The checkpoints of one birth, and the distances between their weights.

    Args:
        members: the checkpoints, those with the same weights together.
        distance_MM: between every two of them.
    """

    def __init__(self, members: Sequence[Same], distance_MM: np.ndarray) -> None:
        self.members = list(members)
        self.distance_MM = distance_MM
        self.direction: Direction | None = None
        """Direction of the order of the labels, or of the shortest path without labels; None for one checkpoint, and
        before `judge`.
        """

    def judge(self) -> list[Same]:
        """Report checkpoints that are not at the place of their step, and the places of those without one; return the
        order of the weights.
        """
        places = {i: same.place for i, same in enumerate(self.members) if same.place is not None}
        trainings = self._exchanged_between(chains(places, self.distance_MM))
        order = self._directed([i for training in trainings for i in self._order_within(training)])
        for training in trainings:
            self._say_jumps([i for i in training.own if not any(one.has("order") for one in self.members[i].members)])
        order = self._with_unlabelled(order) if order else self._by_weights_alone()
        for before, i in zip([None, *order], order, strict=False):
            cosine = kinship(self.members[order[0]].unshared_values, self.members[i].unshared_values).cosine
            for one in self.members[i].members:
                one.cosine_with_first = cosine
                one.distance_from_previous = np.nan if before is None else float(self.distance_MM[before, i])
        return [self.members[i] for i in order]

    def _exchanged_between(self, trainings: list[Chain]) -> list[Chain]:
        """Return the trainings without the exchange of two checkpoints, from different ones, that shortens them most;
        reports it.
        """
        steps_at: dict[int, set[frozenset[int]]] = defaultdict(set)
        for step in steps_of_chains(trainings):
            for i in step:
                steps_at[i].add(step)
        most, pair = 0.0, None
        for a, b in combinations(trainings, 2):
            for i, j in ((i, j) for i in a.own for j in b.own):
                touched = frozenset(steps_at[i] | steps_at[j])
                moved = frozenset(frozenset(_exchange(k, i, j) for k in step) for step in touched)
                saved = self._length(touched) - self._length(moved)
                if saved > most and length_ratio(moved, touched, self.distance_MM) < SHORTER:
                    most, pair = saved, (i, j)
        if pair is None:
            return trainings
        self._say_exchanged(*pair)
        return [
            Chain(
                one.stage,
                [_exchange(k, *pair) for k in one.own],
                None if one.begins_from is None else _exchange(one.begins_from, *pair),
            )
            for one in trainings
        ]

    def _length(self, steps: Steps) -> float:
        return sum(float(self.distance_MM[tuple(step)]) for step in steps)

    def _order_within(self, training: Chain) -> list[int]:
        """Return the order of the weights of one training; reports checkpoints that are not at the place of
        their step.
        """
        order = training.path
        if len(order) < 3:
            return training.own
        path = shortest_path(self.distance_MM, order)
        if not is_shorter(path, order, self.distance_MM):
            return training.own
        path = _as_labelled(path, order)
        self._say_misplaced(order, path)
        return [i for i in path if i in training.own]

    def _directed(self, order: list[int]) -> list[int]:
        """Return the order of the labels, reversed if training passed the other way; reports that."""
        if len(order) < 2:
            return order
        first, last = (self.members[order[end]] for end in (0, -1))
        self.direction = found = self._direction(order)
        if found.towards == "reversed":
            for said, own in zip(order, order[::-1], strict=True):
                if said != own:
                    where = f"lies on the curve where {self.members[said].label} should"
                    self._say(own, f"{where}: the suite runs backwards from {first.label} to {last.label}, {found.why}")
            return order[::-1]
        self._say_unknown(order)
        return order

    def _say_unknown(self, order: Sequence[int]) -> None:
        for one in [one for i in order for one in self.members[i].members]:
            one.may_be_reversed = self.direction is not None and self.direction.towards == "unknown"

    def _direction(self, order: Sequence[int]) -> Direction:
        first, last = (self.members[order[end]] for end in (0, -1))
        if first.is_drawn:
            return Direction("as labelled", "its birth was drawn again")
        return find_direction(first.spreads, last.spreads)

    def _say_misplaced(self, order: Sequence[int], path: Sequence[int]) -> None:
        """Report two exchanged checkpoints, or those outside the longest part of the path with rising steps."""
        apart = [(said, own) for said, own in zip(order, path, strict=True) if said != own]
        if len(apart) == 2:
            self._say_exchanged(*apart[0])
            return
        rank = {i: k for k, i in enumerate(order)}
        inside = _longest_rise([rank[i] for i in path])
        for k, i in enumerate(path):
            if rank[i] not in inside:
                self._say(i, f"breaks the curve: its weights lie {self._near(path, k - 1, k + 1)}")

    def _say_exchanged(self, i: int, j: int) -> None:
        for said, own in ((i, j), (j, i)):
            self._say(own, f"lies on the curve where {self.members[said].label} should: the two are exchanged")

    def _say(self, i: int, what: str, kind: Kind = "order") -> None:
        for one in self.members[i].members:
            one.found(kind, what)

    def _say_jumps(self, order: list[int]) -> None:
        """Report the checkpoint to which the weights jump: one fine-tuned on the way, or the first of another
        training.
        """
        on_curve = order[:4]
        for place, i in enumerate(order[4:], 4):
            ratio = self._overshoot([*on_curve, i])
            if not ratio >= JUMP:
                on_curve.append(i)
                continue
            before, behind = self.members[on_curve[-1]].label, order[place + 1 : place + 2]
            away = f"is kin, and off the curve: the step from {before} is {ratio:.1f} times as long as those before it"
            returns = any(self.distance_MM[on_curve[-1], k] < 0.75 * self.distance_MM[on_curve[-1], i] for k in behind)
            if returns:
                self._say(i, f"{away}, and {self.members[behind[0]].label} is back on it: {_OTHERWISE}", "continued")
                continue
            n = len(order) - place - 1
            rest = f", as the {n} behind it" if n else ""
            self._say(i, f"{away} let expect{rest}: {_OTHERWISE}", "continued")
            return

    def _overshoot(self, order: Sequence[int]) -> float:
        places = [self.members[i].place for i in order]
        gaps = [b.step - a.step for a, b in pairwise(places) if a is not None and b is not None]
        if min(gaps) <= 0:
            return np.nan
        return overshoot([float(self.distance_MM[a, b]) for a, b in pairwise(order)], gaps)

    def _near(self, order: Sequence[int], before: int, behind: int) -> str:
        if before < 0:
            return f"before {self.members[order[behind]].label}"
        if behind >= len(order):
            return f"behind {self.members[order[before]].label}"
        return f"between {self.members[order[before]].label} and {self.members[order[behind]].label}"

    def _by_weights_alone(self) -> list[int]:
        path = shortest_path(self.distance_MM, nearest_path(self.distance_MM))
        if len(path) > 1:
            self.direction = self._direction(path)
            # Weights that are trained for long have heavier tails, which is no evidence.
            tails = [tailedness(self.members[path[end]].unshared_values) for end in (0, -1)]
            if self.direction.towards == "reversed" or (self.direction.towards == "unknown" and tails[0] > tails[1]):
                path.reverse()
            self._say_unknown(path)
        for number, i in enumerate(path, 1):
            for one in self.members[i].members:
                one.notes.append(f"names no step: by its weights number {number} of {len(path)}")
        return path

    def _with_unlabelled(self, order: list[int]) -> list[int]:
        for i in [i for i in range(len(self.members)) if i not in order]:
            detours = []
            for at in range(len(order) + 1):
                near = [order[k] for k in (at - 1, at) if 0 <= k < len(order)]
                straight = float(self.distance_MM[near[0], near[1]]) if len(near) == 2 else 0.0
                detours.append(sum(float(self.distance_MM[k, i]) for k in near) - straight)
            at = int(np.argmin(detours))
            far = ""
            if at == len(order) > 2:
                # Names give no duration of a step; only the last step is there to compare with.
                ratio = float(self.distance_MM[order[-1], i] / max(self.distance_MM[order[-2], order[-1]], 1e-30))
                far = f", {ratio:.1f} times as far as the last step: {_OTHERWISE}" if ratio >= JUMP else ""
            for one in self.members[i].members:
                one.notes.append(f"names no step: by its weights {self._near(order, at - 1, at)}{far}")
            order = [*order[:at], i, *order[at:]]
        return order


def _exchange(k: int, i: int, j: int) -> int:
    return j if k == i else i if k == j else k


def _as_labelled(path: list[int], order: Sequence[int]) -> list[int]:
    """Orient a path in the direction of the labels."""
    rank = {i: k for k, i in enumerate(order)}
    return path if np.corrcoef(range(len(path)), [rank[i] for i in path])[0, 1] >= 0 else path[::-1]


def _longest_rise(ranks: Sequence[int]) -> set[int]:
    rises: list[list[int]] = []
    for rank in ranks:
        before = sorted((rise for rise in rises if rise[-1] < rank), key=len)
        rises.append([*(before[-1] if before else []), rank])
    return set(sorted(rises, key=len)[-1])
