"""AWM (Zeng et al., ICLR 2026, arXiv 2510.06738): attention matrices in coordinates that the embeddings align.

Columns of the two embedding tables are matched by the largest sum of |cosine|, which undoes a permutation and signs of
the residual stream. Then unbiased linear CKA of W_q, and of W_k, over residual channels, which no rotation inside of
heads changes. The score is the mean of both over blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from birthmark.metrics.two_models import gram_vector

from .evidence import Block, Evidence
from .method import Finding, Method


def aligned(wide_VD: np.ndarray, narrow_VD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Match each column of the narrower table with the wider table's column that equals it up to a sign; return these
    columns and signs.
    """
    wide, narrow = (x / np.linalg.norm(x, axis=0) for x in (wide_VD.astype(float), narrow_VD.astype(float)))
    cosines = wide.T @ narrow
    rows, columns = linear_sum_assignment(np.abs(cosines), maximize=True)
    chosen = rows[np.argsort(columns)]
    return chosen, np.sign(cosines[chosen, np.arange(cosines.shape[1])])


def unbiased_cka(a_DX: np.ndarray, b_DX: np.ndarray) -> float:
    """Compute the unbiased linear CKA (Song et al. 2012) of two sets of features of the same D examples."""
    a, b = (gram_vector(torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))) for x in (a_DX, b_DX))
    return float(a @ b / (a.norm() * b.norm()))


def _of_blocks(base: Block, target: Block, chosen_D: np.ndarray, signs_D: np.ndarray) -> float:
    pairs = ((base.q, target.q), (base.k, target.k))
    return float(np.mean([unbiased_cka((x[:, chosen_D] * signs_D).T, y.T) for x, y in pairs]))


def awm(a: Evidence, b: Evidence) -> Finding:
    """Compute the mean similarity of blocks; blocks of models of different depth are matched so that the sum of
    similarities is largest.
    """
    base, target = (a, b) if a.embed_VD.shape[1] >= b.embed_VD.shape[1] else (b, a)
    chosen_D, signs_D = aligned(base.embed_VD, target.embed_VD)
    if len(a.blocks) == len(b.blocks):
        pairs = zip(base.blocks, target.blocks, strict=True)
        return Finding(float(np.mean([_of_blocks(x, y, chosen_D, signs_D) for x, y in pairs])))
    all_LL = np.array([[_of_blocks(x, y, chosen_D, signs_D) for y in target.blocks] for x in base.blocks])
    return Finding(float(all_LL[linear_sum_assignment(all_LL, maximize=True)].mean()))


AWM = Method("AWM", "arXiv 2510.06738, ICLR 2026; LUMIA-Group/AWM bc20ff8", ("weights", "vocabulary"), awm)
