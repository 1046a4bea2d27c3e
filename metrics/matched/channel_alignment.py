"""Alignments of the channels of two models: a signed permutation, or an orthogonal map (definitions §10).

Legend: R rows of a table, D width of the residual stream; A and B the two models, each with its token tables ``[R, D]``
by name, the same names in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.optimize import linear_sum_assignment

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
