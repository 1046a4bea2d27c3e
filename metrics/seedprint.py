"""SeedPrint: the test that two models share a birth, by their rankings of the same inputs (definitions §10) [SP]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import log, log10, nan, sqrt
from typing import Literal

import numpy as np
from scipy import special, stats

from .config import LineageTestConfig, Null

#: Gaussian pairs of a null that must have two identity dimensions in common for its moments to mean something.
_FEWEST_DRAWS = 10


def identity_dimensions(x_ND: np.ndarray, k: int) -> np.ndarray:
    """Return the ``k`` columns of smallest mean over the inputs, smallest first [SP]."""
    return np.argsort(x_ND.mean(0, dtype=np.float64), kind="stable")[:k]


def common_dimensions(x_ND: np.ndarray, y_ND: np.ndarray, k: int, choice: str) -> np.ndarray:
    """Return the identity dimensions on which a pair is compared: ``coset``, those of both; ``base``, those of the
    first.
    """
    of_x = identity_dimensions(x_ND, k)
    return np.sort(of_x) if choice == "base" else np.intersect1d(of_x, identity_dimensions(y_ND, k))


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


# ---------------------------------------------------------------- the test

Verdict = Literal["kin", "stranger", "undefined"]

#: p below which two models are kin.
LEVEL = 0.01
#: Fewer inputs give no test.
FEWEST_INPUTS = 10
#: Fewer columns, and the normal form of a null is a rough one.
_FEW_COLUMNS = 30
#: Strangers reach a z this far below 0 once in three million tests.
REVERSED_Z = -5.0
#: Smaller vocabularies, and births share more by chance than the published nulls allow.
_SMALL_VOCABULARY = 32_000
# Columns ranked at a time: the sort's own indices would take as much room as the matrix.
_BLOCK = 256


@dataclass(frozen=True)
class Fingerprint:
    """Result of a test of two models."""

    null: str
    """The null that it was held against."""
    verdict: Verdict
    """``kin``: p < 0.01 with z > 0; ``undefined``: there was no test, see ``reason``."""
    statistic: float
    """Mean rank correlation over columns: Spearman's ρ or Kendall's τ-b."""
    z: float
    """Distance from the null's mean, in the null's standard deviations."""
    log10_p: float
    """Base-10 logarithm of p, which itself would underflow."""
    k: int
    """Columns compared."""
    n_inputs: int
    """N."""
    reason: str = ""
    """Reason for an undefined verdict."""
    warnings: tuple[str, ...] = ()
    """Warnings about a null that is known to be off for this pair, and about the z of a stranger."""
    alignment: str = ""
    """For the null ``matched``: the map from the channels of one model to those of the other, a signed ``permutation``
    or a ``rotation``, the better of the two.
    """

    @property
    def reversed(self) -> bool:
        """True if z lies too far below 0 for two strangers: the models share something, reversed."""
        return self.z <= REVERSED_Z

    @property
    def p(self) -> float:
        """p; 0 if it underflows."""
        return float(10.0**self.log10_p)


class HiddenStates:
    """Last-position final hidden states of one model over N inputs, with the results that all its tests share.

    Args:
        x_ND: floats ``[N, D]``.
    """

    def __init__(self, x_ND: np.ndarray) -> None:
        self.x_ND = np.asarray(x_ND)

    @cached_property
    def fault(self) -> str:
        """Reason why no verdict is possible; empty if one is."""
        if len(self.x_ND) < FEWEST_INPUTS:
            return f"{len(self.x_ND)} inputs: at least {FEWEST_INPUTS} are needed"
        if not np.isfinite(self.x_ND).all():
            return "hidden states with NaN or inf"
        n_constant = int((np.ptp(self.x_ND, axis=0) == 0).sum())
        if n_constant:
            return f"{n_constant} of {self.x_ND.shape[1]} dimensions are the same for all inputs"
        return ""

    @cached_property
    def ranks(self) -> np.ndarray:
        """Ranks of the inputs in every column, ties at their mean, centred: float32 ``[N, D]``, exact in it."""
        n, width = self.x_ND.shape
        ranks_ND = np.empty((n, width), dtype=np.float32)
        for first in range(0, width, _BLOCK):
            block_KN = np.ascontiguousarray(self.x_ND[:, first : first + _BLOCK].T)
            ranks_ND[:, first : first + _BLOCK] = (stats.rankdata(block_KN, axis=1) - (n + 1) / 2).T
        return ranks_ND


def _unit(ranks_ND: np.ndarray) -> np.ndarray:
    unit_ND = ranks_ND.astype(np.float64)
    unit_ND /= np.sqrt(np.einsum("nd,nd->d", unit_ND, unit_ND))
    return unit_ND


def spearman_matrix(a: HiddenStates, b: HiddenStates) -> np.ndarray:
    """Compute Spearman's ρ of every column of one with every column of the other: float64 ``[D, D]``."""
    return _unit(a.ranks).T @ _unit(b.ranks)


def kendall_matrix(a: HiddenStates, b: HiddenStates) -> np.ndarray:
    """Compute Kendall's τ-b of every column of one with every column of the other: float64 ``[D, D]``."""
    columns = np.arange(b.x_ND.shape[1])
    return np.array([column_taus(x_N[:, None].repeat(len(columns), 1), b.x_ND) for x_N in a.x_ND.T])


def compare(
    x: np.ndarray | HiddenStates,
    y: np.ndarray | HiddenStates,
    recipe: LineageTestConfig = LineageTestConfig(),  # noqa: B008, it is immutable
    *,
    probe: Literal["token", "embedding"] = "token",
    vocab_size: int | None = None,
) -> Fingerprint:
    """Test two models on their hidden states ``[N, D]`` over the same N inputs.

    Args:
        x: the first model's; ``base`` takes its identity dimensions.
        y: the second model's.
        recipe: settings of the test.
        probe: kind of the inputs, for the warnings.
        vocab_size: the models' vocabulary, for the warnings.

    Raises:
        ValueError: the states differ in shape.
    """
    a, b = (z if isinstance(z, HiddenStates) else HiddenStates(z) for z in (x, y))
    if a.x_ND.shape != b.x_ND.shape:
        raise ValueError(f"hidden states of different shapes: {a.x_ND.shape} and {b.x_ND.shape}")
    n, width = a.x_ND.shape
    fault = a.fault or b.fault or (f"{width} dimension: at least 2 are needed" if width < 2 else "")
    if fault:
        found = _undefined(recipe, 0, n, fault)
    else:
        found = (_by_pairings if recipe.null.startswith("dimensions") else _as_published)(a, b, recipe)
    return replace(found, warnings=_warnings(found, probe, vocab_size))


def _by_pairings(a: HiddenStates, b: HiddenStates, recipe: LineageTestConfig) -> Fingerprint:
    """Test the diagonal of the correlation matrix against random pairings of columns.

    The test is one-sided, so that strangers are called kin as often as the level says. For sampled pairings, p is the
    share of them that reach the statistic.
    """
    n, width = a.x_ND.shape
    m_DD = (spearman_matrix if recipe.correlation == "spearman" else kendall_matrix)(a, b)
    statistic = float(m_DD.diagonal().mean())
    mean, sd = pairing_moments(m_DD)
    if not sd > 1e-12:
        return _undefined(recipe, width, n, "all pairings of dimensions correlate alike")
    log10_p = float(stats.norm.logsf((statistic - mean) / sd)) / log(10)
    if recipe.null == "dimensions_sampled":
        sampled = sampled_pairings(m_DD, recipe.n_draws, recipe.null_seed)
        mean, sd = float(sampled.mean()), float(sampled.std(ddof=1))
        log10_p = log10((1 + (sampled >= statistic).sum()) / (1 + len(sampled)))
    return judged(recipe.null, statistic, (statistic - mean) / sd, log10_p, width, n)


def _as_published(a: HiddenStates, b: HiddenStates, recipe: LineageTestConfig) -> Fingerprint:
    """Test the mean τ-b over identity dimensions and, if asked, the τ-b of their mean; ``p = 2·sf(z)`` [SP], capped at
    1.
    """
    n, width = a.x_ND.shape
    wanted, draws = recipe.n_dimensions(width), recipe.n_draws
    columns = common_dimensions(a.x_ND, b.x_ND, wanted, recipe.choice)
    k = len(columns)
    if k < 2:
        return _undefined(recipe, k, n, f"{k} identity dimensions in common (of {wanted}): at least 2 are needed")
    p_NK, q_NK = (softened(z.x_ND, columns, recipe.temperature) for z in (a, b))
    statistic = float(column_taus(p_NK, q_NK).mean())
    if recipe.null == "analytic":
        mean, sd = 0.0, analytic_sd(n, k)
    elif recipe.null == "empirical":
        mean, sd = gaussian_moments(n, k, recipe.temperature, draws, recipe.null_seed)
    elif recipe.null == "empirical_full":
        mean, sd = pipeline_moments(n, width, wanted, recipe.choice, recipe.temperature, draws, recipe.null_seed)
    else:
        mean, sd = permuted_inputs_moments(p_NK, q_NK, draws, recipe.null_seed)
    if not np.isfinite(statistic):
        return _undefined(recipe, k, n, "an identity dimension is the same for all inputs after the softmax")
    if not sd > 0:
        return _undefined(recipe, k, n, "too few Gaussian pairs have two identity dimensions in common: raise k")
    signals = [(statistic, (statistic - mean) / sd)]
    if recipe.aggregate:
        means_N1 = (z.x_ND[:, columns].mean(1, dtype=np.float64)[:, None] for z in (a, b))
        tau = float(column_taus(*means_N1)[0])
        if not np.isfinite(tau):
            return _undefined(recipe, k, n, "the mean over identity dimensions is the same for all inputs")
        signals.append((tau, tau / analytic_sd(n, 1)))
    return aggregate([judged(recipe.null, *signal, _two_sided(signal[1]), k, n) for signal in signals])


def _two_sided(z: float) -> float:
    return min(0.0, (log(2) + float(stats.norm.logsf(z))) / log(10))


def level_z(null: Null) -> float:
    """Return the z from which on a test calls two models kin: one-sided, or two-sided for nulls that double p."""
    return float(stats.norm.isf(LEVEL if null.startswith("dimensions") else LEVEL / 2))


def judged(
    null: str,
    statistic: float,
    z: float,
    log10_p: float,
    k: int,
    n: int,
    *,
    alignment: str = "",
    warnings: tuple[str, ...] = (),
) -> Fingerprint:
    """Build the result of a test with its verdict: kin if p is below the level and z above 0."""
    verdict: Verdict = "kin" if z > 0 and log10_p < log10(LEVEL) else "stranger"
    return Fingerprint(null, verdict, float(statistic), float(z), float(log10_p), k, n, "", warnings, alignment)


def _undefined(recipe: LineageTestConfig, k: int, n: int, reason: str) -> Fingerprint:
    return Fingerprint(recipe.null, "undefined", nan, nan, nan, k, n, reason)


def _warnings(found: Fingerprint, probe: str, vocab_size: int | None) -> tuple[str, ...]:
    warnings, calibrated = [], found.null.startswith("dimensions")
    if probe == "embedding":
        warnings.append(
            "embedding probe: what goes in leaks along the residual stream to the same dimensions of every model of "
            "this width, so that strangers may pass for kin; use the token probe where vocabularies agree"
        )
    if not calibrated:
        small = vocab_size is not None and vocab_size < _SMALL_VOCABULARY
        warnings.append(
            f"null {found.null}: takes columns for independent, which calls strangers kin more often than p says"
            + (f", the more so with a small vocabulary ({vocab_size})" if small else "")
            + "; the null dimensions is calibrated"
        )
    if found.reversed:
        warnings.append(
            f"z {found.z:.1f}: the same dimensions rank the inputs in opposite order, which two strangers do not do; "
            "this hints at kin whose weights were negated or whose channels had their signs flipped; --null matched "
            "undoes that"
        )
    if 2 <= found.k < _FEW_COLUMNS:
        warnings.append(f"{found.k} dimensions: the normal form of the null is rough below {_FEW_COLUMNS}")
    return tuple(warnings)


def aggregate(results: Sequence[Fingerprint]) -> Fingerprint:
    """Return the strongest of several signals of one pair, with p times their number (Bonferroni) [SP].

    Undefined tests count among the number; if all are undefined, so is the result.

    Raises:
        ValueError: no tests.
    """
    if not results:
        raise ValueError("no tests to aggregate")
    defined = [r for r in results if r.verdict != "undefined"]
    if not defined:
        return results[0]
    best = min(defined, key=lambda r: (r.log10_p, -r.z))
    log10_p = bonferroni(best.log10_p, len(results))
    found = judged(best.null, best.statistic, best.z, log10_p, best.k, best.n_inputs, alignment=best.alignment)
    return replace(found, warnings=tuple(dict.fromkeys(w for r in results for w in r.warnings)))


def bonferroni(log10_p: float, n_tests: int) -> float:
    """Compute ``log10 min(1, n·p)``."""
    return min(0.0, log10_p + log10(n_tests))
