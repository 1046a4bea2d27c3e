"""Distributions of the statistics of :mod:`.seedprint` between strangers: moments under each null (definitions §10)."""

from __future__ import annotations

from functools import cache
from math import sqrt

import numpy as np
from scipy import special, stats

#: Gaussian pairs of a null that must have two identity dimensions in common for its moments to mean something.
_FEWEST_DRAWS = 10


def identity_dimensions(x_ND: np.ndarray, k: int) -> np.ndarray:
    """Return the ``k`` columns of smallest mean over the inputs, smallest first [SP]."""
    return np.argsort(x_ND.mean(0, dtype=np.float64), kind="stable")[:k]


def common_dimensions(x_ND: np.ndarray, y_ND: np.ndarray, k: int, choice: str) -> np.ndarray:
    """Return the identity dimensions on which a pair is compared: ``coset``, those of both; ``base``, those of the
    first.
    """
    ours = identity_dimensions(x_ND, k)
    return np.sort(ours) if choice == "base" else np.intersect1d(ours, identity_dimensions(y_ND, k))


def softened(x_ND: np.ndarray, columns: np.ndarray, temperature: float) -> np.ndarray:
    """Apply a softmax over ``columns`` of each row at a temperature: float64 ``[N, k]`` [SP]."""
    return special.softmax(x_ND[:, columns].astype(np.float64) / temperature, axis=1)


def column_taus(p_NK: np.ndarray, q_NK: np.ndarray) -> np.ndarray:
    """Compute Kendall's τ-b of each column of one with the same column of the other, across inputs ``[k]``; NaN if
    constant.
    """
    pairs = zip(p_NK.T, q_NK.T, strict=True)
    return np.array([stats.kendalltau(p_N, q_N, variant="b").statistic for p_N, q_N in pairs])


def analytic_sd(n_inputs: int, k: int) -> float:
    """Return the standard deviation of the mean of ``k`` independent τ between unrelated rankings of N inputs [SP]."""
    return sqrt(2 * (2 * n_inputs + 5) / (9 * n_inputs * (n_inputs - 1))) / sqrt(k)


def _moments(found: list[float]) -> tuple[float, float]:
    return (float(np.mean(found)), float(np.std(found, ddof=1))) if len(found) >= _FEWEST_DRAWS else (np.nan, np.nan)


@cache
def gaussian_moments(n_inputs: int, k: int, temperature: float, draws: int, seed: int) -> tuple[float, float]:
    """Estimate mean and sd of the mean τ of independent Gaussian matrices ``[N, k]``, from the softmax on [SP]."""
    rng, columns, found = np.random.default_rng(seed), np.arange(k), []
    for _ in range(draws):
        p_NK, q_NK = (softened(rng.standard_normal((n_inputs, k)), columns, temperature) for _ in range(2))
        found.append(float(column_taus(p_NK, q_NK).mean()))
    return _moments(found)


@cache
def pipeline_moments(
    n_inputs: int, width: int, k: int, choice: str, temperature: float, draws: int, seed: int
) -> tuple[float, float]:
    """Estimate mean and sd of the mean τ of independent Gaussian matrices ``[N, D]`` through the whole procedure [SP].

    Pairs with fewer than two dimensions in common have no statistic and are left out; NaN if too few are left.
    """
    rng, found = np.random.default_rng(seed), []
    for _ in range(draws):
        x_ND, y_ND = (rng.standard_normal((n_inputs, width), dtype=np.float32) for _ in range(2))
        columns = common_dimensions(x_ND, y_ND, k, choice)
        if len(columns) >= 2:
            taus = column_taus(*(softened(z_ND, columns, temperature) for z_ND in (x_ND, y_ND)))
            found.append(float(taus.mean()))
    return _moments(found)


def permuted_inputs_moments(p_NK: np.ndarray, q_NK: np.ndarray, draws: int, seed: int) -> tuple[float, float]:
    """Estimate mean and sd of the mean τ when the inputs of one side are shuffled [SP]."""
    rng = np.random.default_rng(seed)
    return _moments([float(column_taus(p_NK, rng.permutation(q_NK, axis=0)).mean()) for _ in range(draws)])


def pairing_moments(m_DD: np.ndarray) -> tuple[float, float]:
    """Compute the exact mean and sd of ``1/D · Σ_i M[i, π(i)]`` over all permutations π, each as likely (Hoeffding
    1951).

    The variance of the sum is ``Σ_ij d_ij² / (D−1)``, d the matrix with its row and column means taken out.
    """
    n = len(m_DD)
    mean = m_DD.mean()
    centred_DD = m_DD - m_DD.mean(1, keepdims=True)
    centred_DD -= centred_DD.mean(0, keepdims=True)
    return float(mean), sqrt(np.einsum("ij,ij->", centred_DD, centred_DD) / (n - 1)) / n


def sampled_pairings(m_DD: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Sample ``1/D · Σ_i M[i, π(i)]`` for ``draws`` random permutations π."""
    rng, rows = np.random.default_rng(seed), np.arange(len(m_DD))
    return np.array([m_DD[rows, rng.permutation(len(m_DD))].mean() for _ in range(draws)])
