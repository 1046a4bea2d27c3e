"""The null ``matched``: channels aligned by the token tables, then units against random pairings (definitions §10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, nan, sqrt

import numpy as np
from scipy import stats
from scipy.optimize import linear_sum_assignment

from .seedprint import Fingerprint, aggregate, judged, pairing_moments

# ---------------------------------------------------------------- stream weights
# The weights of one model that face the residual stream, as the null ``matched`` reads them (definitions §10).
#
# Legend: R rows of a table, one per token; D width of the residual stream; N units of a block; M maps of a unit.


@dataclass(frozen=True)
class StreamWeights:
    """Tables that align the channels of two models, and the units that are compared once aligned.

    The gain of a norm belongs to the map that reads behind it, so that models that hold it in either place are alike.
    """

    tables: Mapping[str, np.ndarray]
    """Token vectors float32 ``[R, D]`` by name: embeddings, and the output head where it is not the same."""
    units: Mapping[str, np.ndarray]
    """Every unit's vectors in the residual stream, one per map that reads or writes it: float32 ``[N, M, D]`` by place
    in the model. A unit is identified only by its number in a block: a hidden unit of the MLP, a channel of the values.
    """


def spread_rows(n: int, most: int) -> np.ndarray:
    """Return indices of at most ``most`` of ``n`` rows, evenly spaced, rising, int64."""
    return np.arange(n) if n <= most else np.linspace(0, n - 1, most).round().astype(np.int64)


# ---------------------------------------------------------------- alignments of the channels of two models
# A signed permutation, or an orthogonal map (definitions §10).
#
# Legend: R rows of a table, D width of the residual stream; A and B the two models, each with its token tables ``[R,
# D]`` by name, the same names in both.

#: Vectors of model B ``[…, D]`` → the same in the channels of model A.
ToChannelsOfA = Callable[[np.ndarray], np.ndarray]


def _centred(table_RD: np.ndarray) -> np.ndarray:
    """Subtract the mean over tokens; NaN stays in place and is found later."""
    return table_RD - table_RD.mean(0, dtype=np.float64).astype(np.float32)


def _over(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """Divide ``x`` by ``norm``; 0 where the norm is 0."""
    return np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)


def unit_channels(vectors: np.ndarray) -> np.ndarray:
    """Scale ``[R, …, D]`` to norm 1 over the first axis, so that factors of single channels drop out."""
    return _over(vectors, np.sqrt(np.einsum("r...,r...->...", vectors, vectors)))


def channel_correlations(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> np.ndarray:
    """Compute the correlation over tokens of every channel of A with every channel of B, mean of the tables: ``[D,
    D]``.
    """
    return np.mean([unit_channels(_centred(a[t])).T @ unit_channels(_centred(b[t])) for t in a], axis=0)


def signed_permutation(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> ToChannelsOfA:
    """Find the pairing of channels, with signs, that has the largest sum of \\|correlation\\| over the tables.

    It undoes an order of the channels, flips of sign, and factors of single channels.
    """
    m_DD = channel_correlations(a, b)
    rows, order = linear_sum_assignment(np.abs(m_DD), maximize=True)
    sign_D = np.where(m_DD[rows, order] < 0, np.float32(-1), np.float32(1))
    return lambda vectors: vectors[..., order] * sign_D


def rotation(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> ToChannelsOfA:
    """Find the orthogonal map that brings the tables of B closest to those of A, each of equal weight (Schönemann
    1966).

    It undoes any orthogonal map of the residual stream, a signed permutation among them, but no factor of a channel.
    """

    def scaled(table_RD: np.ndarray) -> np.ndarray:
        centred_RD = _centred(table_RD)
        return _over(centred_RD, np.asarray(np.linalg.norm(centred_RD)))

    u_DD, _, v_DD = np.linalg.svd(np.sum([scaled(b[t]).T @ scaled(a[t]) for t in a], axis=0))
    q_DD = (u_DD @ v_DD).astype(np.float32)
    # As one product: numpy takes a stack of short ones apart, and reads all of the map for each.
    return lambda vectors: (vectors.reshape(-1, len(q_DD)) @ q_DD).reshape(vectors.shape)


# ---------------------------------------------------------------- unit pairings
# The null ``matched``: channels aligned by the token tables, then units against random pairings (definitions §10).

NULL = "matched"
#: z from which on reordered units are hinted at: strangers stay far below it.
REORDERED_Z = 10.0
#: Fewer units in all, and the normal form of the null is a rough one.
_FEW_UNITS = 30


@dataclass(frozen=True)
class UnitPairings:
    """Units of two models in pairs of one number, against random pairings inside each block."""

    statistic: float
    """Mean cosine of the pairs."""
    mean: float
    """Exact mean of the same statistic under random pairings."""
    sd: float
    """Exact standard deviation of the statistic under random pairings."""
    k: int
    """Number of pairs."""

    @property
    def z(self) -> float:
        """Distance of the statistic from its mean under random pairings, in standard deviations; 0 if all pairings are
        alike.
        """
        return (self.statistic - self.mean) / self.sd if self.sd > 1e-12 else 0.0


def _directions(units_NMD: np.ndarray) -> np.ndarray:
    """Scale vectors to norm 1 and join those of a unit: float32 ``[N, M·D]``; a map of zeros counts as 0."""
    norms_NM1 = np.linalg.norm(units_NMD, axis=-1, keepdims=True)
    unit_NMD = np.divide(units_NMD, norms_NM1, out=np.zeros_like(units_NMD), where=norms_NM1 > 0)
    return unit_NMD.reshape(len(units_NMD), -1)


def cosine_matrix(a_NMD: np.ndarray, b_NMD: np.ndarray) -> np.ndarray:
    """Compute the cosine of every unit of one with every unit of the other, mean over maps: float64 ``[N, N]``."""
    return (_directions(a_NMD) @ _directions(b_NMD).T).astype(np.float64) / a_NMD.shape[1]


@dataclass(frozen=True)
class BlockCosines:
    """Cosines of all units of one model's block with all of the other's, in two halves of their maps."""

    read_NN: np.ndarray
    """Mean over the first half of the maps, which a unit reads by, float64 ``[N, N]``."""
    written_NN: np.ndarray | None
    """Mean over the other maps, which a unit writes by; None if a unit has one map."""
    share: float
    """Share of the first half among the maps."""

    @property
    def whole_NN(self) -> np.ndarray:  # noqa: N802, a shape suffix
        """Mean over all maps."""
        if self.written_NN is None:
            return self.read_NN
        whole_NN: np.ndarray = self.share * self.read_NN + (1 - self.share) * self.written_NN
        return whole_NN


def block_cosines(
    a: StreamWeights, b: StreamWeights, aligned: ToChannelsOfA, *, by_channel: bool = False
) -> list[BlockCosines]:
    """Compute the cosines of every block that has the same number of units, at least two, in both models.

    Args:
        a: the first model.
        b: the second.
        aligned: function that brings vectors of the second to the channels of the first.
        by_channel: scale every channel of every map to one norm over the units of its block.
    """
    found = []
    for place in a.units:
        a_NMD, b_NMD = a.units[place], b.units.get(place)
        if b_NMD is None or a_NMD.shape != b_NMD.shape or len(a_NMD) < 2:
            continue
        if by_channel:
            a_NMD, b_NMD = unit_channels(a_NMD), unit_channels(b_NMD)
        b_NMD, n_maps = aligned(b_NMD), a_NMD.shape[1]
        n_read = n_maps - n_maps // 2
        written_NN = cosine_matrix(a_NMD[:, n_read:], b_NMD[:, n_read:]) if n_read < n_maps else None
        found.append(BlockCosines(cosine_matrix(a_NMD[:, :n_read], b_NMD[:, :n_read]), written_NN, n_read / n_maps))
    return found


def pair_units(blocks: Sequence[BlockCosines]) -> UnitPairings | None:
    """Compare units of the same number, by all their maps; None without blocks."""
    return _pairings(block.whole_NN for block in blocks)


def pair_reordered_units(blocks: Sequence[BlockCosines]) -> UnitPairings | None:
    """Compare units regardless of order: pair them by the maps that read, as the assignment with the largest sum of
    cosines, then compare the maps that write. Exact for newborn strangers, whose maps are independent; training ties
    the maps of a unit together.
    """

    def matrices() -> Iterator[np.ndarray]:
        for block in blocks:
            if block.written_NN is not None:
                _, order = linear_sum_assignment(block.read_NN, maximize=True)
                yield block.written_NN[:, order]

    return _pairings(matrices())


def _pairings(matrices: Iterable[np.ndarray]) -> UnitPairings | None:
    """Pool the diagonals of the blocks' matrices ``[N, N]``."""
    total = mean = variance = 0.0
    k = 0
    for m_NN in matrices:
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
    # A factor on single channels drops out beside a permutation, but not beside a rotation, which mixes channels.
    cosines = {
        "permutation": block_cosines(a, b, signed_permutation(*tables), by_channel=True),
        "rotation": block_cosines(a, b, rotation(*tables)),
    }
    found = aggregate([_test(name, n_rows, pair_units(blocks)) for name, blocks in cosines.items()])
    if found.verdict != "stranger":
        return found
    reordered = [pair_reordered_units(blocks) for blocks in cosines.values()]
    z = max((pairs.z for pairs in reordered if pairs is not None), default=0.0)
    return replace(found, warnings=(*found.warnings, _hint(z))) if z >= REORDERED_Z else found


def _hint(z: float) -> str:
    return (
        f"units that are paired by what they read write alike too (z {z:.1f}): this hints at kin whose hidden units "
        "stand in another order; it is no verdict, because training on the same data ties what a unit reads to what it "
        "writes"
    )


def _test(name: str, n_rows: int, pairs: UnitPairings | None) -> Fingerprint:
    if pairs is None:
        return _undefined(0, n_rows, "no block of one has units as many as the same block of the other")
    if not pairs.sd > 1e-12:
        return _undefined(pairs.k, n_rows, "all pairings of units are alike")
    few = f"{pairs.k} units: the normal form of the null is rough below {_FEW_UNITS}"
    log10_p = float(stats.norm.logsf(pairs.z)) / log(10)
    return judged(
        NULL, pairs.statistic, pairs.z, log10_p, pairs.k, n_rows,
        alignment=name, warnings=(few,) if pairs.k < _FEW_UNITS else (),
    )  # fmt: skip


def _fault(weights: StreamWeights) -> str:
    """Return the reason why no verdict is possible; empty if one is."""
    if not weights.units:
        return "the units of this model's blocks are not known"
    if not all(np.isfinite(x).all() for x in (*weights.tables.values(), *weights.units.values())):
        return "weights with NaN or inf"
    return ""


def _undefined(k: int, n_rows: int, reason: str) -> Fingerprint:
    return Fingerprint(NULL, "undefined", nan, nan, nan, k, n_rows, reason)
