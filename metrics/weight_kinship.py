"""Descent of weights from a common birth, and the order in which training passed through checkpoints.

Both are read from the same sampled values of every checkpoint; no model is run. At birth two seeds share nothing, and
training moves weights slowly. So between checkpoints of one run the cosine of every tensor stays positive; between two
runs it is 0 on average, whatever they have learned, because no direction of the residual stream is special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

#: Requirements for kin: the least mean cosine over tensors, and the largest chance of it among strangers.
LEAST_COSINE, LARGEST_P = 0.1, 1e-4
#: The least median. Tensors that every seed draws alike, such as Mamba's `A_log`, carry the mean and its p, not this.
LEAST_MEDIAN = LEAST_COSINE / 2
#: A cosine that no tensor of a stranger comes near, of 1,000 values or more: where half of the tensors reach it, they
#: are kin, however much the others were turned and p suffers from it.
CLEAR_COSINE = 0.4
#: Tensors that the test needs.
FEWEST_TENSORS = 4
#: Another order than that of the labels must be so much shorter, where the two differ, to be believed.
SHORTER = 0.9

Values = Mapping[str, np.ndarray]
Steps = frozenset[frozenset[int]]


@dataclass(frozen=True)
class Kinship:
    """Result of the test of two checkpoints.

    A tensor that both hold to the bit is evidence only where most are. Masks and tables of positions are the same in
    all models of an architecture, and never most of its tensors; those of a model of which a part was trained are.
    """

    cosine: float
    """Mean over tensors of the cosine of their values, each run of values centred; NaN without tensors."""
    p: float
    """One-sided chance of it among strangers: Student's t over the tensors; NaN for fewer than `FEWEST_TENSORS`."""
    median: float = np.nan
    """Median of the tensors' cosines."""
    median_p: float = np.nan
    """One-sided chance that a stranger's tensor gets as far as the middle one, in standard deviations of its size."""

    @property
    def verdict(self) -> bool | None:
        """True if the two are kin; None if no test was possible."""
        if np.isnan(self.p):
            return None
        stands_out = self.cosine >= LEAST_COSINE and self.p < LARGEST_P
        median_stands_out = self.median >= LEAST_MEDIAN and self.median_p < LARGEST_P
        return bool((stands_out and median_stands_out) or self.median >= CLEAR_COSINE)


def kinship(a: Values, b: Values) -> Kinship:
    """Test two checkpoints.

    Args:
        a: tensor → sampled values ``[runs, length]``.
        b: the same places; tensors that only one has, or whose shapes differ, are left out.
    """
    return kinships([a, b])[0][1]


def kinships(values: Sequence[Values]) -> list[list[Kinship]]:
    """Test every checkpoint against every other with `kinship`, ``[M][M]``; each is kin of itself."""
    from scipy import stats

    n_models = len(values)
    if not values:
        return []
    tests_TMM = [(_cosines(x_MRL), _are_equal(x_MRL), x_MRL[0].size - len(x_MRL[0])) for x_MRL in _by_tensor(values)]
    # A model may have no tensor at all.
    cosines_MMT = np.array([cosines for cosines, *_ in tests_TMM]).reshape(-1, n_models, n_models).T
    equal_MMT = np.array([equal for _, equal, _ in tests_TMM], dtype=bool).reshape(-1, n_models, n_models).T
    # Values that are free once each run is centred.
    freedom_T = np.array([n_free for *_, n_free in tests_TMM])
    tests = [[Kinship(1.0, 0.0, 1.0, 0.0)] * len(values) for _ in values]
    # All chances at once: one call of scipy takes longer than all else of a pair.
    tested, facts = [], []
    for a in range(len(values)):
        for b in range(a + 1, len(values)):
            is_known = ~np.isnan(cosines_MMT[a, b])
            differs = is_known & ~equal_MMT[a, b]
            used = differs if 2 * differs.sum() >= is_known.sum() else is_known
            cosines = cosines_MMT[a, b][used]
            if len(cosines) < FEWEST_TENSORS and cosines.size and cosines.mean() >= CLEAR_COSINE:
                # Too few for the test, and no stranger's: the equal ones are frozen.
                used = is_known
                cosines = cosines_MMT[a, b][used]
            n = len(cosines)
            if n < FEWEST_TENSORS:
                tests[a][b] = tests[b][a] = Kinship(float(np.mean(cosines)) if n else np.nan, np.nan)
                continue
            spread, mean = max(float(np.std(cosines, ddof=1)), 1e-12) / n**0.5, float(np.mean(cosines))
            deviations = float(np.median(cosines * freedom_T[used] ** 0.5))
            tested.append((a, b))
            facts.append((mean, mean / spread, n - 1, float(np.median(cosines)), deviations))
    means, t, freedom, medians, deviations_of_median = np.array(facts).reshape(-1, 5).T
    found = np.stack([means, stats.t.sf(t, freedom), medians, stats.norm.sf(deviations_of_median)], 1).tolist()
    for (a, b), numbers in zip(tested, found, strict=True):
        tests[a][b] = tests[b][a] = Kinship(*numbers)
    return tests


def _by_tensor(values: Sequence[Values]) -> Iterator[np.ndarray]:
    """Yield the values of one tensor after the other in all checkpoints, float64 ``[M, runs, length]``: NaN for a
    checkpoint that lacks the tensor or has it in another shape than the first one with it.
    """
    for name in sorted({name for held in values for name in held}):
        shape = next(held[name].shape for held in values if name in held)
        there = [held[name] if name in held and held[name].shape == shape else None for held in values]
        yield np.stack([np.full(shape, np.nan) if x is None else x.astype(np.float64) for x in there])


def _cosines(x_MRL: np.ndarray) -> np.ndarray:
    """Return the cosine of every two ``[M, M]``, each run centred; NaN if one is constant or missing."""
    x_MN = (x_MRL - x_MRL.mean(2, keepdims=True)).reshape(len(x_MRL), -1)
    products_MM, norms_M = x_MN @ x_MN.T, np.linalg.norm(x_MN, axis=1)
    norms_MM = np.outer(norms_M, norms_M)
    known_MM = (norms_MM > 0) & np.isfinite(norms_MM)
    return np.divide(products_MM, norms_MM, out=np.full_like(products_MM, np.nan), where=known_MM)


def _are_equal(x_MRL: np.ndarray) -> np.ndarray:
    """Return ``[M, M]``: True for two checkpoints whose values are the same to the bit."""
    first: dict[bytes, int] = {}
    number_M = np.array([first.setdefault(x_RL.tobytes(), i) for i, x_RL in enumerate(x_MRL)])
    return np.equal.outer(number_M, number_M)


def births(kin_MM: np.ndarray) -> list[list[int]]:
    """Group checkpoints that pairs of kin connect, the largest group first; ties by first member.

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


def squared_distances(values: Sequence[Values]) -> np.ndarray:
    """Compute the squared distance between every two checkpoints by tensor, ``[T, M, M]``: ``‖a − b‖² / (‖a‖·‖b‖)``;
    tensors in the order of their names, NaN where one of the two lacks it or holds zeros alone."""
    n, shares = len(values), []
    for x_MRL in _by_tensor(values):
        x_MN = x_MRL.reshape(len(x_MRL), -1)
        norms_M = np.linalg.norm(x_MN, axis=1)
        # As differences and not from products: neighbours may differ in their last digits.
        squares_MM = np.stack([((x_MN - x_N) ** 2).sum(1) for x_N in x_MN])
        scales_MM = np.outer(norms_M, norms_M)
        shares.append(np.divide(squares_MM, scales_MM, out=np.full_like(scales_MM, np.nan), where=scales_MM > 0))
    return np.stack(shares) if shares else np.empty((0, n, n))


def mean_distances(squares_TMM: np.ndarray) -> np.ndarray:
    """Compute the distance between every two checkpoints ``[M, M]``: the root mean over tensors of the squares."""
    is_known_TMM = ~np.isnan(squares_TMM)
    sums_MM, counts_MM = np.where(is_known_TMM, squares_TMM, 0.0).sum(0), is_known_TMM.sum(0)
    found_MM = np.sqrt(np.divide(sums_MM, counts_MM, out=np.full(sums_MM.shape, np.nan), where=counts_MM > 0))
    np.fill_diagonal(found_MM, 0.0)
    return found_MM


def shortest_path(distance_MM: np.ndarray, start: Sequence[int]) -> list[int]:
    """Search an order of all checkpoints with a short path through them. From ``start``, move a part of up to three,
    reverse a part of any length or exchange two, each time as shortens the path most, until nothing does. Training
    hardly turns back, so its checkpoints in their order are close to the shortest path.

    Args:
        distance_MM: symmetric.
        start: each checkpoint once.
    """
    path = list(start)
    while path:
        # A place at distance 0 beyond each end: an end is then as any other place.
        d_PP = np.pad(distance_MM[np.ix_(path, path)], 1)
        changes = [*_changes(d_PP)]
        places = [np.unravel_index(np.nanargmin(change), change.shape) for change in changes]
        move = min(range(len(changes)), key=lambda kind: changes[kind][places[kind]])
        # Less may be an error of rounding.
        if not changes[move][places[move]] < -1e-12 * max(1.0, np.nanmax(d_PP)):
            break
        path = _moved(path, move, *map(int, places[move]))
    return path


def _changes(d_PP: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the changes of a path's length by `_moved`, ``[i, j]`` for each kind of move; 0 where it moves nothing."""
    n, step_P = len(d_PP) - 2, d_PP.diagonal(1)
    # From the place before i to j, and from i to the one behind j.
    reversed_NN = d_PP[:-2, 1:-1] + d_PP[1:-1, 2:] - step_P[:-1, None] - step_P[None, 1:]
    yield np.triu(reversed_NN, 1)
    yield np.triu(reversed_NN + reversed_NN.T, 2)
    for size in range(1, min(3, n) + 1):
        closed = d_PP.diagonal(size + 1) - step_P[: n - size + 1] - step_P[size:]
        moved = d_PP[:-1, 1 : n - size + 2].T + d_PP[size:-1, 1:] - step_P + closed[:, None]
        ahead = np.arange(n + 1) - np.arange(n - size + 1)[:, None]
        yield np.where((ahead >= 0) & (ahead <= size), 0.0, moved)


def _moved(path: list[int], move: int, i: int, j: int) -> list[int]:
    """Reverse the places from i to j (``move`` 0), exchange the two (1), or put as many as ``move`` says, less 1, from
    i on before j.
    """
    if move == 0:
        return [*path[:i], *path[i : j + 1][::-1], *path[j + 1 :]]
    if move == 1:
        return [*path[:i], path[j], *path[i + 1 : j], path[i], *path[j + 1 :]]
    end = i + move - 1
    if j < i:
        return [*path[:j], *path[i:end], *path[j:i], *path[end:]]
    return [*path[:i], *path[end:j], *path[i:end], *path[j:]]


def nearest_path(distance_MM: np.ndarray) -> list[int]:
    """Return an order to begin `shortest_path` from, where no labels give one: from an end, which is far from the first
    checkpoint, to the nearest of those that are left. From an order by chance the search takes many more moves.
    """
    left = set(range(len(distance_MM)))
    path = [int(distance_MM[0].argmax())] if left else []
    while left := left - {*path[-1:]}:
        path.append(min(left, key=lambda i: (distance_MM[path[-1], i], i)))
    return path


def is_shorter(other: Sequence[int], order: Sequence[int], distance_MM: np.ndarray) -> bool:
    """Return True if a path is clearly shorter than ``order``, over the steps that only one of them takes."""
    return length_ratio(steps_of(other), steps_of(order), distance_MM) < SHORTER


def steps_of(path: Sequence[int]) -> Steps:
    """Return the steps of a path as pairs of checkpoints."""
    return frozenset(frozenset(step) for step in pairwise(path))


def length_ratio(other: Steps, steps: Steps, distance_MM: np.ndarray) -> float:
    """Divide the length of some steps by that of others, ignoring steps in both; infinite if no step is left to divide
    by.
    """
    a, b = (sum(float(distance_MM[tuple(step)]) for step in only) for only in (other - steps, steps - other))
    return a / b if b > 0 else np.inf


def tailedness(values: Values) -> float:
    """Return the mean over tensors of the excess kurtosis: at most 0 for drawn weights; training raises it."""
    found = []
    for x in values.values():
        centred = x.astype(np.float64).ravel() - x.mean(dtype=np.float64)
        if (variance := float((centred**2).mean())) > 0:
            found.append(float((centred**4).mean()) / variance**2 - 3)
    return float(np.mean(found)) if found else np.nan


def overshoot(sizes: Sequence[float], gaps: Sequence[int]) -> float:
    """Divide the last step of a curve by the length that the two steps before it let expect; NaN if unknown.

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
