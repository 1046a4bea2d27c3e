"""The null ``matched``: channels aligned by the token tables, then units against random pairings (definitions §10).

Which number a unit has in its block means nothing: births draw all units alike, and training treats them alike. So in
one of two strangers, trained or not, the units of a block could stand in any order, whatever aligned the channels, as
long as that looked at no unit. This makes the null exact; kin have their units in the same order.

Legend: N units of a block, M maps of a unit, D width of the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, nan, sqrt

import numpy as np
from scipy import stats

from ..null_distributions import pairing_moments
from ..seedprint import Fingerprint, aggregate, judged
from .channel_alignment import ToChannelsOfA, rotation, signed_permutation, unit_channels
from .stream_weights import StreamWeights

NULL = "matched"
#: Fewer units in all, and the normal form of the null is a rough one.
_FEW_UNITS = 30


@dataclass(frozen=True)
class UnitPairings:
    """Units of two models in pairs of one number, against random pairings inside each block."""

    statistic: float
    """Mean cosine of the pairs."""
    mean: float
    """Of the same under random pairings, exactly."""
    sd: float
    """Likewise."""
    k: int
    """Pairs."""


def _directions(units_NMD: np.ndarray) -> np.ndarray:
    """Vectors of norm 1, those of one unit side by side: float64 ``[N, M·D]``; a map that is zero counts as 0."""
    norms_NM1 = np.linalg.norm(units_NMD, axis=-1, keepdims=True)
    unit_NMD = np.divide(units_NMD, norms_NM1, out=np.zeros_like(units_NMD), where=norms_NM1 > 0)
    return unit_NMD.reshape(len(units_NMD), -1)


def cosine_matrix(a_NMD: np.ndarray, b_NMD: np.ndarray) -> np.ndarray:
    """Cosine of every unit of one with every unit of the other, mean of their maps: float64 ``[N, N]``."""
    return (_directions(a_NMD) @ _directions(b_NMD).T).astype(np.float64) / a_NMD.shape[1]


def pair_units(
    a: StreamWeights, b: StreamWeights, aligned: ToChannelsOfA, *, by_channel: bool = False
) -> UnitPairings | None:
    """The units of all blocks that both models have; None if no block has at least two in both.

    Args:
        a: the first model.
        b: the second.
        aligned: brings vectors of the second to the channels of the first.
        by_channel: scale every channel of every map to one norm over the units of its block.
    """
    total = mean = variance = 0.0
    k = 0
    for place in a.units:
        a_NMD, b_NMD = a.units[place], b.units.get(place)
        if b_NMD is None or a_NMD.shape != b_NMD.shape or len(a_NMD) < 2:
            continue
        if by_channel:
            a_NMD, b_NMD = unit_channels(a_NMD), unit_channels(b_NMD)
        m_NN = cosine_matrix(a_NMD, aligned(b_NMD))
        n = len(m_NN)
        expected, sd = pairing_moments(m_NN)
        total, mean, variance, k = total + m_NN.trace(), mean + n * expected, variance + (n * sd) ** 2, k + n
    return UnitPairings(total / k, mean / k, sqrt(variance) / k, k) if k else None


def compare_weights(a: StreamWeights, b: StreamWeights) -> Fingerprint:
    """Test two models on their weights, in whatever order, sign, scale or basis their channels are.

    Two alignments are tried, a signed permutation and a rotation; p of the better one is doubled (Bonferroni).
    ``statistic`` is the mean cosine of units, ``k`` their number, ``n_inputs`` that of the tokens that aligned them.

    Raises:
        ValueError: the models have other widths or vocabularies.
    """
    names = [t for t, table in a.tables.items() if t in b.tables and b.tables[t].shape == table.shape]
    if not names:
        shapes = [{name: table.shape for name, table in weights.tables.items()} for weights in (a, b)]
        raise ValueError(f"token tables of different shapes: {shapes[0]} and {shapes[1]}")
    n_rows, fault = len(a.tables[names[0]]), _fault(a) or _fault(b)
    if fault:
        return _undefined(0, n_rows, fault)
    tables = [{name: weights.tables[name] for name in names} for weights in (a, b)]
    tests = [
        _test(a, b, signed_permutation(*tables), n_rows, "permutation", by_channel=True),
        _test(a, b, rotation(*tables), n_rows, "rotation", by_channel=False),
    ]
    return aggregate(tests)


def _test(
    a: StreamWeights, b: StreamWeights, aligned: ToChannelsOfA, n_rows: int, name: str, *, by_channel: bool
) -> Fingerprint:
    pairs = pair_units(a, b, aligned, by_channel=by_channel)
    if pairs is None:
        return _undefined(0, n_rows, "no block of one has units as many as the same block of the other")
    if not pairs.sd > 1e-12:
        return _undefined(pairs.k, n_rows, "all pairings of units are alike")
    z = (pairs.statistic - pairs.mean) / pairs.sd
    few = f"{pairs.k} units: the normal form of the null is rough below {_FEW_UNITS}"
    log10_p = float(stats.norm.logsf(z)) / log(10)
    return judged(
        NULL, pairs.statistic, z, log10_p, pairs.k, n_rows,
        alignment=name, warnings=(few,) if pairs.k < _FEW_UNITS else (),
    )  # fmt: skip


def _fault(weights: StreamWeights) -> str:
    """Why there is no verdict; empty if there is one."""
    if not weights.units:
        return "the units of this model's blocks are not known"
    if not all(np.isfinite(x).all() for x in (*weights.tables.values(), *weights.units.values())):
        return "weights with NaN or inf"
    return ""


def _undefined(k: int, n_rows: int, reason: str) -> Fingerprint:
    return Fingerprint(NULL, "undefined", nan, nan, nan, k, n_rows, reason)
