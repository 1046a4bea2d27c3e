"""Unbiased linear CKA between hidden states, over minibatches of examples (definitions, between models).

HSIC of two sets of features of the same n examples is estimated without bias (Song et al. 2012, eq. 5) from their Gram
matrices; for many examples, the estimate is the mean over minibatches (Nguyen et al., arXiv 2010.15327), and CKA is
HSIC over the root of the product with themselves (Kornblith et al., arXiv 1905.00414). In the form of Székely and Rizzo
(2014) the estimate is an inner product of Gram matrices that are centred one by one. So each place of a model is stored
as one vector, and the HSIC of any two places is the inner product of their vectors.

Legend: n examples of a minibatch, D features, E entries of a place's vector, P and Q places.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

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
