"""HuRef (Zeng et al., NeurIPS 2024, arXiv 2312.04828): cosine of invariant terms (ICS) and of all parameters (PCS).

An invariant term is a product of matrices between embeddings of tokens, which a change of coordinates that keeps the
model's output leaves as it is: ``X W_q W_kᵀ Xᵀ``, ``X W_v W_o Xᵀ`` and ``X W_up W_down Xᵀ``, of the last two blocks.
Gains of norms and rotary positions are not in them. The score is the cosine of the terms, each made to mean 0 and
deviation 1.
"""

from __future__ import annotations

import numpy as np

from .evidence import Block, Evidence, shared_names
from .method import Finding, Method, NoTest

_SOURCE = "arXiv 2312.04828, NeurIPS 2024; LUMIA-Group/HuRef 9c34548"
#: The least frequent tokens are taken, so many. Ids rise with rarity in the usual tokenizers: they are the last ones.
N_TOKENS = 4096
N_BLOCKS = 2


def repeated(x: np.ndarray, n_heads: int, d_head: int) -> np.ndarray:
    """Repeat the rows of keys or values ``[H_kv·K, D]`` for each query head that reads them, ``[H·K, D]``."""
    n_kv = len(x) // d_head
    return np.repeat(x.reshape(n_kv, d_head, -1), n_heads // n_kv, axis=0).reshape(n_heads * d_head, -1)


def invariant_terms(block: Block, x_VD: np.ndarray, n_heads: int) -> np.ndarray:
    """Compute the three terms ``[3, V, V]``; in a gated MLP the up-projection is multiplied with the gate, entry by
    entry.
    """
    d_head = len(block.q) // n_heads
    k, v = (repeated(w, n_heads, d_head) for w in (block.k, block.v))
    up = block.up if block.gate is None else block.gate * block.up
    products = ((block.q, k), (v, block.o.T), (up, block.down.T))
    return np.stack([(x_VD @ first.T) @ (x_VD @ second.T).T for first, second in products])


def _standardised(terms_MVV: np.ndarray) -> np.ndarray:
    centred = terms_MVV - terms_MVV.mean((1, 2), keepdims=True)
    return (centred / terms_MVV.std((1, 2), ddof=1, keepdims=True)).ravel()


def ics(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute the cosine of the invariant terms of the last two blocks."""
    n_blocks = min(N_BLOCKS, len(a.blocks), len(b.blocks))

    def terms(model: Evidence) -> np.ndarray:
        x_VD = model.embed_VD[-N_TOKENS:]
        found = [invariant_terms(block, x_VD, model.n_heads) for block in model.blocks[-n_blocks:]]
        return _standardised(np.concatenate(found))

    x, y = terms(a), terms(b)
    return Finding(float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y))))


def pcs(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute the cosine of all parameters that have the same name and shape in both models."""
    names = shared_names(a.parameters, b.parameters)
    if not names:
        return NoTest("no parameter of one name and shape")
    dot, aa, bb = np.sum(
        [
            [float(np.vdot(x, y)) for x, y in ((p, q), (p, p), (q, q))]
            for p, q in ((a.parameters[name], b.parameters[name]) for name in names)
        ],
        axis=0,
    )
    return Finding(float(dot / np.sqrt(aa * bb)))


ICS = Method("HuRef, ICS", _SOURCE, ("weights", "vocabulary"), ics)
PCS = Method("HuRef, PCS", _SOURCE, ("weights",), pcs)
