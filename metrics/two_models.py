"""Two models beside each other: loss barrier, CKA of hidden states, divergence of predictions (definitions)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Barrier(NamedTuple):
    """Largest rise of the loss above the straight line between its ends."""

    height: float
    """Nats; 0 where the loss is nowhere above that line: the two are linearly connected."""
    alpha: float
    """Position of the highest point; 0 is the first model."""


def loss_barrier(alphas: Sequence[float], losses: Sequence[float]) -> Barrier:
    """Return ``max_α L(α) − ((1 − α)·L(0) + α·L(1))``, over the measured points (Frankle et al., arXiv 1912.05671; the
    baseline of Entezari et al., arXiv 2110.06296).

    Args:
        alphas: rising from 0 to 1.
        losses: the loss at each.
    """
    a, found = np.asarray(alphas, np.float64), np.asarray(losses, np.float64)
    excess = found - ((1 - a) * found[0] + a * found[-1])
    at = int(excess.argmax())
    return Barrier(float(excess[at]), float(a[at]))


# ---------------------------------------------------------------- unbiased linear CKA of hidden states

#: The estimate divides by n − 3.
FEWEST_EXAMPLES = 4


def minibatches(n_examples: int, size: int) -> list[int]:
    """Return the sizes of the fewest minibatches of at most ``size`` examples; sizes differ by at most one.

    Raises:
        ValueError: one of them has less than `FEWEST_EXAMPLES`.
    """
    n = -(-n_examples // size)
    found = [n_examples // n + (i < n_examples % n) for i in range(n)]
    if found[-1] < FEWEST_EXAMPLES:
        raise ValueError(f"a minibatch would have {found[-1]} examples, and needs {FEWEST_EXAMPLES}")
    return found


def gram_vector(x_ND: Tensor) -> Tensor:
    """Return the centred Gram matrix of a minibatch as a vector: float64 ``[n(n−1)/2]``.

    The inner product of two of them is the unbiased estimate of HSIC. The estimate can be negative, but not for a set
    of features with itself.

    Args:
        x_ND: features ``[n, D]``, a row per example, at least `FEWEST_EXAMPLES`.
    """
    n = len(x_ND)
    # A shift of all features changes nothing, and large means would cost digits.
    x_ND = x_ND.double() - x_ND.double().mean(0)
    gram_NN = (x_ND @ x_ND.T).fill_diagonal_(0)
    mean_N = gram_NN.sum(0) / (n - 2)
    mean_N -= mean_N.sum() / (2 * (n - 1))
    gram_NN -= mean_N[:, None] + mean_N[None, :]
    rows, columns = torch.triu_indices(n, n, offset=1, device=gram_NN.device)
    vector: Tensor = gram_NN[rows, columns] * (2 / (n * (n - 3))) ** 0.5
    return vector


def hsic(a: Iterable[np.ndarray], b: Iterable[np.ndarray]) -> np.ndarray:
    """Compute HSIC between every place of one model and every place of another, float64 ``[P, Q]``: the mean over
    minibatches.

    Args:
        a: for each minibatch, the vectors of all places, ``[P, E]``.
        b: the same of the other model, ``[Q, E]``.
    """
    of_each = [np.asarray(a_PE, np.float64) @ np.asarray(b_QE, np.float64).T for a_PE, b_QE in zip(a, b, strict=True)]
    found: np.ndarray = np.mean(of_each, axis=0)
    return found


def cka(ab_PQ: np.ndarray, aa_P: np.ndarray, bb_Q: np.ndarray) -> np.ndarray:
    """Compute CKA ``[P, Q]`` from the HSIC of the pairs and of each place with itself; NaN for constant features."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: np.ndarray = ab_PQ / np.sqrt(aa_P[:, None] * bb_Q[None, :])
    return np.where(np.isfinite(found), found, np.nan)


# ---------------------------------------------------------------- Kullback-Leibler divergence of predictions


def token_kl(logits: list[Tensor]) -> Tensor:
    """Compute ``KL(p_a ‖ p_b)`` of every ordered pair of models at every row, in nats: float64 ``[R, A, A]``.

    Args:
        logits: finite logits ``[R, V]`` of each model.
    """
    log_p_RAV = torch.stack([torch.log_softmax(logits_RV.double(), -1) for logits_RV in logits], 1)
    # −Σ_v p_a log p_b; the diagonal is the entropy of each.
    cross_RAA = -torch.bmm(log_p_RAV.exp(), log_p_RAV.transpose(1, 2))
    entropy_RA = cross_RAA.diagonal(dim1=1, dim2=2)
    return cross_RAA - entropy_RA[:, :, None]


def token_loss(logits_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Compute ``−log p(target)`` of every row in nats, float64 ``[R]``."""
    logits_RV = logits_RV.double()
    return logits_RV.logsumexp(-1) - logits_RV.gather(-1, targets_R[:, None])[:, 0]
