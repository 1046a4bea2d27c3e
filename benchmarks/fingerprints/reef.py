"""REEF (Zhang et al., ICLR 2025, arXiv 2410.14273): linear CKA of representations of the same inputs.

The representations are those of the last token after one block, the 19th of 32 in the paper's main table; at another
depth the block at the same fraction of it. As in the released code each dimension is first standardised to mean 0 and
deviation 1. The paper reads 200 statements of TruthfulQA; here all methods read one probe.
"""

from __future__ import annotations

import numpy as np

from .evidence import Evidence
from .method import Finding, Method, NoTest

#: Inputs.
N_INPUTS = 200
#: The block, from 0, of so many.
LAYER, DEPTH = 18, 32


def linear_cka(x_ND: np.ndarray, y_ND: np.ndarray) -> float:
    """Compute ``‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖)`` (Frobenius) of centred features (Kornblith et al. 2019), biased as
    published.
    """
    x_ND, y_ND = (z - z.mean(0) for z in (x_ND.astype(float), y_ND.astype(float)))
    cross = np.linalg.norm(y_ND.T @ x_ND) ** 2
    return float(cross / (np.linalg.norm(x_ND.T @ x_ND) * np.linalg.norm(y_ND.T @ y_ND)))


def representations(model: Evidence) -> np.ndarray:
    """Return the standardised representations ``[N, D]``; a dimension that is constant over the inputs gives NaN."""
    x_ND = model.states_LND[LAYER * len(model.blocks) // DEPTH][:N_INPUTS].astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (x_ND - x_ND.mean(0)) / x_ND.std(0, ddof=1)


def reef(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Score the similarity of representations (larger is more alike); the paper gives no threshold."""
    x_ND, y_ND = representations(a), representations(b)
    if not (np.isfinite(x_ND).all() and np.isfinite(y_ND).all()):
        return NoTest("a dimension is the same for all inputs")
    return Finding(linear_cka(x_ND, y_ND))


REEF = Method("REEF", "arXiv 2410.14273, ICLR 2025; tmylla/REEF 48329f6", ("states", "vocabulary"), reef)
