"""Independence tests for language models (Zhu et al., ICML 2025, arXiv 2502.12292): csu, csh, match.

Hidden units of one model are matched with those of the other; kin keep their order. Training treats all units of a
block alike, so that between models of independent births the matching is a random order, and p is exact. Blocks are
combined by Fisher's method. Spearman's p is two-sided, as published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log

import numpy as np
from scipy import stats
from scipy.optimize import linear_sum_assignment

from .evidence import Evidence
from .method import Finding, Method, NoTest

_SOURCE = "arXiv 2502.12292, ICML 2025; ahmeda14960/model-tracing 5e65e7b"
#: Spearman's p of a long perfect match underflows; a score must be a number.
_LEAST_LOG10_P = -1e5


def matching(a_FX: np.ndarray, b_FX: np.ndarray) -> np.ndarray:
    """Match each row of one matrix with a row of the other, such that the sum of cosines is largest (the paper's
    Algorithm 2).

    The released code of ``match`` takes the smallest sum of squared distances instead; rows of one length agree.
    """
    unit_a, unit_b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a_FX.astype(float), b_FX.astype(float)))
    return linear_sum_assignment(unit_a @ unit_b.T, maximize=True)[1]


def spearman_p(first_F: np.ndarray, second_F: np.ndarray) -> float:
    """Compute the two-sided p of Spearman's correlation of two permutations (Algorithm 3)."""
    return float(stats.spearmanr(first_F, second_F).pvalue)


def fisher(p_values: Iterable[float]) -> float:
    """Combine p-values by Fisher's method into a base-10 logarithm (Algorithm 4); NaN are left out; NaN if none is
    left.
    """
    known = [p for p in p_values if not np.isnan(p)]
    if not known:
        return np.nan
    with np.errstate(divide="ignore"):
        return float(stats.chi2.logsf(-2 * np.log(known).sum(), 2 * len(known))) / log(10)


def _combined(p_values: Iterator[float]) -> Finding | NoTest:
    log10_p = fisher(p_values)
    if np.isnan(log10_p):
        return NoTest("no block has a p")
    return Finding(-max(log10_p, _LEAST_LOG10_P), max(log10_p, _LEAST_LOG10_P))


def csu(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute φ_U: the test on rows of the up-projections."""
    order_F = np.arange(len(a.blocks[0].up))
    pairs = zip(a.blocks, b.blocks, strict=True)
    return _combined(spearman_p(matching(x.up, y.up), order_F) for x, y in pairs)


def csh(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute φ_H: the test on outputs of the up-projections for the same inputs."""
    order_F = np.arange(a.up_LRF.shape[-1])
    pairs = zip(a.up_LRF, b.up_LRF, strict=True)
    return _combined(spearman_p(matching(x_RF.T, y_RF.T), order_F) for x_RF, y_RF in pairs)


def match(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute φ_MATCH: the test whether outputs of gates and of up-projections give the same matching, in any order of
    units.
    """
    assert a.gate_LRF is not None
    assert b.gate_LRF is not None
    pairs = zip(a.gate_LRF, b.gate_LRF, a.up_LRF, b.up_LRF, strict=True)
    return _combined(spearman_p(matching(g.T, h.T), matching(x.T, y.T)) for g, h, x, y in pairs)


CSU = Method("csu", _SOURCE, ("weights", "width", "hidden units", "depth"), csu)
CSH = Method("csh", _SOURCE, ("states", "vocabulary", "hidden units", "depth"), csh)
MATCH = Method("match", _SOURCE, ("states", "vocabulary", "hidden units", "depth", "gated MLP"), match)
