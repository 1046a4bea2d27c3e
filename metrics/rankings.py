"""How alike two rankings of the vocabulary are: persistence of token preference (definitions §4)."""

from __future__ import annotations

import numpy as np
from scipy import stats


def spearman(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """Spearman's ρ; NaN where either side is constant."""
    if np.ptp(p_V) == 0 or np.ptp(q_V) == 0:
        return float("nan")
    return float(stats.spearmanr(p_V, q_V).statistic)


def kendall_tau(p_V: np.ndarray, q_V: np.ndarray) -> float:
    """Kendall's τ-b; NaN where either side is constant."""
    return float(stats.kendalltau(p_V, q_V, variant="b").statistic)


def ranking(p_V: np.ndarray) -> np.ndarray:
    """Token ids by falling preference; ties in order of id."""
    return np.argsort(-p_V, kind="stable")


def places(p_V: np.ndarray) -> np.ndarray:
    """Rank of every token id, from 0 for the most preferred; int64 ``[V]``, the inverse of :func:`ranking`."""
    place_V = np.empty(len(p_V), dtype=np.int64)
    place_V[ranking(p_V)] = np.arange(len(p_V))
    return place_V


def top_overlap(p_V: np.ndarray, q_V: np.ndarray, k: int) -> float:
    """Share of the ``k`` most preferred tokens that two preferences have in common; NaN where ``k`` exceeds V."""
    if k > len(p_V):
        return float("nan")
    return len(np.intersect1d(ranking(p_V)[:k], ranking(q_V)[:k])) / k


def rank_biased_overlap(p_V: np.ndarray, q_V: np.ndarray, persistence: float = 0.98) -> float:
    """Rank-biased overlap of two full rankings (Webber, Moffat & Zobel 2010), extrapolated at depth V.

    ``(1−p) Σ_d p^(d−1) A_d + A_V p^V``, ``A_d`` the overlap of the first d of each over d. At the default p the first
    50 ranks carry most of the weight. 1 is the same ranking; two random ones give about their chance overlap.
    """
    n = len(p_V)
    # A token is shared by the first d of both rankings from the depth on at which the later of the two has it.
    agreement = np.cumsum(np.bincount(np.maximum(places(p_V), places(q_V)), minlength=n)) / np.arange(1, n + 1)
    weights = (1 - persistence) * persistence ** np.arange(n)
    return float(weights @ agreement + agreement[-1] * persistence**n)
