"""Intrinsic fingerprint (Yoon et al. 2025, arXiv 2507.03014): how the spread of attention weights changes with depth.

For each of W_q, W_k, W_v, W_o the standard deviations of the blocks, a sequence, are standardised to mean 0 and
deviation 1. The score is the correlation of two models' sequences, all four together. Fewer than three blocks give
±1 always.
"""

from __future__ import annotations

import numpy as np

from .evidence import Evidence
from .method import Finding, Method, NoTest

_KINDS = ("q", "k", "v", "o")


def normalised_spreads(model: Evidence) -> np.ndarray:
    """Compute the standardised spreads, ``[4, L]``; NaN if a spread is the same in all blocks."""
    spreads = np.array([[getattr(block, kind).std(dtype=np.float64) for block in model.blocks] for kind in _KINDS])
    with np.errstate(divide="ignore", invalid="ignore"):
        return (spreads - spreads.mean(1, keepdims=True)) / spreads.std(1, keepdims=True)


def intrinsic(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute Pearson's correlation over matrices and blocks."""
    x, y = normalised_spreads(a).ravel(), normalised_spreads(b).ravel()
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return NoTest("a spread is the same in all blocks")
    return Finding(float(np.corrcoef(x, y)[0, 1]))


INTRINSIC = Method("intrinsic", "arXiv 2507.03014", ("weights", "depth", "three blocks"), intrinsic)
