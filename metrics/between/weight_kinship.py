"""Which of some weights descend from one birth, and in which order training passed through them.

Both from the same sampled values of every checkpoint; no model is run. At birth two seeds share nothing, and training
moves weights slowly: between checkpoints of one run the cosine of every tensor stays positive, between two runs it is
0 on average, whatever they have learned, because no direction of the residual stream is special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

#: What kin must reach: the mean cosine over tensors, and the chance of it among strangers.
LEAST_COSINE, LARGEST_P = 0.1, 1e-4
#: A cosine that no tensor of a stranger comes near, of 1,000 values or more: where half of the tensors reach it, they
#: are kin, however much the others were turned and p suffers from it.
CLEAR_COSINE = 0.4
#: Tensors that the test needs.
FEWEST_TENSORS = 4
#: Another order than that of the labels must be so much shorter, where the two differ, to be believed.
SHORTER = 0.9

Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Kinship:
    """Of two checkpoints."""

    cosine: float
    """Mean over tensors of the cosine of their values, each run of values centred; NaN without tensors."""
    p: float
    """One-sided chance of it among strangers: Student's t over the tensors; NaN for fewer than `FEWEST_TENSORS`."""
    median: float = np.nan
    """Of the tensors' cosines."""

    @property
    def verdict(self) -> bool | None:
        """Whether they are kin; None where no test was possible."""
        if np.isnan(self.p):
            return None
        return bool((self.cosine >= LEAST_COSINE and self.p < LARGEST_P) or self.median >= CLEAR_COSINE)


def kinship(a: Values, b: Values) -> Kinship:
    """Test two checkpoints.

    Args:
        a: tensor → sampled values ``[runs, length]``.
        b: the same places; tensors that only one has, or of another shape, are left out.
    """
    from scipy import stats

    cosines = []
    for name in sorted(a.keys() & b.keys()):
        if a[name].shape != b[name].shape:
            continue
        x, y = (v[name].astype(np.float64) for v in (a, b))
        x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
        if (norm := float(np.linalg.norm(x) * np.linalg.norm(y))) > 0 and np.isfinite(norm):
            cosines.append(float((x * y).sum()) / norm)
    if len(cosines) < FEWEST_TENSORS:
        return Kinship(float(np.mean(cosines)) if cosines else np.nan, np.nan)
    spread = max(float(np.std(cosines, ddof=1)), 1e-12) / len(cosines) ** 0.5
    mean = float(np.mean(cosines))
    return Kinship(mean, float(stats.t.sf(mean / spread, len(cosines) - 1)), float(np.median(cosines)))


def births(kin_MM: np.ndarray) -> list[list[int]]:
    """Groups that pairs of kin hold together, the largest first; of equal ones that of the first member.

    Args:
        kin_MM: bool, symmetric.
    """
    left, found = set(range(len(kin_MM))), []
    while left:
        group, new = set(), {min(left)}
        while new:
            group |= new
            new = {int(j) for i in new for j in np.flatnonzero(kin_MM[i])} - group
        left -= group
        found.append(sorted(group))
    return sorted(found, key=len, reverse=True)


def distances(values: Sequence[Values]) -> np.ndarray:
    """Distance between every two checkpoints ``[M, M]``: root mean over tensors of ``‖a − b‖² / (‖a‖·‖b‖)``."""
    n = len(values)
    found_MM = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1, n):
            shares = []
            for name in values[i].keys() & values[j].keys():
                x, y = (values[k][name].astype(np.float64) for k in (i, j))
                if x.shape == y.shape and (scale := np.linalg.norm(x) * np.linalg.norm(y)) > 0:
                    shares.append(float(np.linalg.norm(x - y) ** 2 / scale))
            found_MM[i, j] = found_MM[j, i] = np.mean(shares) ** 0.5 if shares else np.nan
    return found_MM


def path_length(order: Sequence[int], distance_MM: np.ndarray) -> float:
    """Along a path through all of ``order``."""
    return float(sum(distance_MM[a, b] for a, b in pairwise(order)))


def shortest_path(distance_MM: np.ndarray, start: Sequence[int]) -> list[int]:
    """An order of all checkpoints with a short path through them, improved from ``start`` until nothing helps: parts of
    up to three are moved elsewhere, parts of any length turned round, and two exchanged. Training passes through its
    checkpoints on a path that hardly turns back, so that the path is shortest in their order."""
    best, length = list(start), path_length(start, distance_MM)
    improved = True
    while improved:
        improved = False
        for order in _neighbours(best):
            if (new := path_length(order, distance_MM)) < length - 1e-12:
                best, length, improved = order, new, True
                break
    return best


def _neighbours(order: list[int]) -> Iterator[list[int]]:
    n = len(order)
    for i in range(n):
        for j in range(i + 1, n):
            yield [*order[:i], *order[i : j + 1][::-1], *order[j + 1 :]]
            exchanged = list(order)
            exchanged[i], exchanged[j] = exchanged[j], exchanged[i]
            yield exchanged
        for size in (1, 2, 3):
            part, rest = order[i : i + size], [*order[:i], *order[i + size :]]
            yield from ([*rest[:j], *part, *rest[j:]] for j in range(len(rest) + 1) if j != i)


def is_shorter(other: Sequence[int], order: Sequence[int], distance_MM: np.ndarray) -> bool:
    """Whether a path is clearly shorter than that of ``order`` in the steps that only one of them takes."""
    a, b = ({frozenset(step) for step in pairwise(path)} for path in (other, order))
    ours, theirs = (sum(float(distance_MM[tuple(step)]) for step in steps) for steps in (a - b, b - a))
    return bool(theirs > 0 and ours < SHORTER * theirs)


def tailedness(values: Values) -> float:
    """Mean over tensors of the excess kurtosis: of drawn weights 0 or less, and training makes it grow."""
    found = []
    for x in values.values():
        centred = x.astype(np.float64).ravel() - x.mean(dtype=np.float64)
        if (variance := float((centred**2).mean())) > 0:
            found.append(float((centred**4).mean()) / variance**2 - 3)
    return float(np.mean(found)) if found else np.nan


def overshoot(sizes: Sequence[float], gaps: Sequence[int]) -> float:
    """How many times the last step of a curve is as long as the two before it let expect; NaN where that is not known.

    Weights that are trained on move at most as far as the time since the last checkpoint, and noise at least as its
    root, so each of the two is taken at the larger. A falling learning rate makes steps shorter. At the start of a
    training they grow, so nothing is said before steps have become shorter, or have been of one length for a while.

    Args:
        sizes: distances between neighbouring checkpoints (`distances`), at least one.
        gaps: the training steps between them, positive.
    """
    *before, last = (size / gap for size, gap in zip(sizes, gaps, strict=True))
    if len(before) < 3 or not all(np.isfinite([*before, last])) or min(before[-3:]) <= 0:
        return np.nan
    has_settled = before[-1] <= 0.8 * max(before) or max(before[-3:]) <= 1.5 * min(before[-3:])
    ratios = [gaps[-1] / gap for gap in gaps[-3:-1]]
    expected = max(size * max(ratio, ratio**0.5) for size, ratio in zip(sizes[-3:-1], ratios, strict=True))
    return sizes[-1] / expected if has_settled else np.nan
