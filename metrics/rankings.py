"""Similarity of two rankings of the vocabulary: persistence of token preference (definitions §4).

Nothing in this module loads torch: pages use it.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from scipy import stats

#: Weight of all ranks below a depth at which a sum over ranks may end.
_NOTHING = 1e-30


class Ranked:
    """A preference that is compared with several others: it is sorted once for all of them.

    Args:
        p_V: float ``[V]``, a number for every token.
    """

    def __init__(self, p_V: np.ndarray) -> None:
        self.p_V = p_V

    def __len__(self) -> int:
        return len(self.p_V)

    @cached_property
    def varies(self) -> bool:
        """True if two tokens differ; False with NaN."""
        return bool(np.ptp(self.p_V) > 0)

    @cached_property
    def ids(self) -> np.ndarray:
        """Token ids by falling preference; ties in order of id."""
        rising_V = -self.p_V
        order_V = np.argsort(rising_V)
        sorted_V = rising_V[order_V]
        # Different numbers have one order; a stable sort takes longer.
        return order_V if (sorted_V[1:] > sorted_V[:-1]).all() else np.argsort(rising_V, kind="stable")

    @cached_property
    def places(self) -> np.ndarray:
        """Rank of every token id, from 0 for the most preferred; int64 ``[V]``, the inverse of `ids`."""
        return self._of_tokens(np.arange(len(self)))

    @cached_property
    def _starts(self) -> np.ndarray:
        """Places, in the order of `ids`, at which another preference begins: rising."""
        falling_V = self.p_V[self.ids]
        return np.flatnonzero(np.concatenate([[True], falling_V[1:] != falling_V[:-1]]))

    def _of_tokens(self, numbers: np.ndarray) -> np.ndarray:
        """Give every token id its number: there is one for each token in the order of `ids`, or for each preference."""
        if len(numbers) < len(self):
            numbers = np.repeat(numbers, np.diff(self._starts, append=len(self)))
        number_V = np.empty_like(numbers)
        number_V[self.ids] = numbers
        return number_V

    @cached_property
    def groups(self) -> np.ndarray:
        """Number of different preferences above each token id's; int64 ``[V]``."""
        return self._of_tokens(np.arange(len(self._starts)))

    @cached_property
    def mean_ranks(self) -> np.ndarray:
        """Rank of every token id, ties at their mean; float64 ``[V]``."""
        length_G = np.diff(self._starts, append=len(self))
        return self._of_tokens(self._starts + (length_G - 1) / 2)


def ranked(preference: np.ndarray | Ranked) -> Ranked:
    """Attach ranks to a preference; return it unchanged if it has them."""
    return preference if isinstance(preference, Ranked) else Ranked(preference)


def spearman(p_V: np.ndarray | Ranked, q_V: np.ndarray | Ranked) -> float:
    """Compute Spearman's ρ, the correlation of mean ranks; NaN if either side is constant."""
    p, q = ranked(p_V), ranked(q_V)
    if not (p.varies and q.varies):
        return float("nan")
    return float(np.corrcoef(p.mean_ranks, q.mean_ranks)[0, 1])


def kendall_tau(p_V: np.ndarray | Ranked, q_V: np.ndarray | Ranked) -> float:
    """Compute Kendall's τ-b; NaN if either side is constant."""
    p, q = ranked(p_V), ranked(q_V)
    if not (p.varies and q.varies):
        return float("nan")
    # In the order of one side, as integers: scipy takes half of its time.
    return float(stats.kendalltau(p.groups[q.ids], q.groups[q.ids], variant="b").statistic)


def ranking(p_V: np.ndarray) -> np.ndarray:
    """Return token ids by falling preference; ties in order of id."""
    return Ranked(p_V).ids


def places(p_V: np.ndarray) -> np.ndarray:
    """Return the rank of every token id, from 0 for the most preferred; int64 ``[V]``, inverse of :func:`ranking`."""
    return Ranked(p_V).places


def top_overlap(p_V: np.ndarray | Ranked, q_V: np.ndarray | Ranked, k: int) -> float:
    """Return the share of the ``k`` most preferred tokens that two preferences share; NaN if ``k`` exceeds V."""
    if k > len(p_V):
        return float("nan")
    return len(np.intersect1d(ranked(p_V).ids[:k], ranked(q_V).ids[:k])) / k


def rank_biased_overlap(p_V: np.ndarray | Ranked, q_V: np.ndarray | Ranked, persistence: float = 0.98) -> float:
    """Compute the rank-biased overlap of two full rankings (Webber, Moffat & Zobel 2010), extrapolated at depth V.

    ``(1−p) Σ_d p^(d−1) A_d + A_V p^V``, ``A_d`` the overlap of the first d of each over d. At the default p the first
    50 ranks carry most of the weight. 1 is the same ranking; two random ones give about their chance overlap.
    """
    n = len(p_V)
    depth = min(n, math.ceil(math.log(_NOTHING) / math.log(persistence)))
    # A token is shared by the first d of both rankings from the depth on at which the later of the two has it.
    later_V = np.maximum(ranked(p_V).places, ranked(q_V).places)
    agreement = np.cumsum(np.bincount(later_V[later_V < depth], minlength=depth)) / np.arange(1, depth + 1)
    weights = (1 - persistence) * persistence ** np.arange(depth)
    return float(weights @ agreement + persistence**n)  # all tokens are shared by all of both
