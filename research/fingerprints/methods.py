"""All methods, each by its paper, and their table in the order of the results: ours last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from math import log

import numpy as np
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment

from birthmark.metrics.config import LineageTestConfig
from birthmark.metrics.matched_weights import compare_weights
from birthmark.metrics.seedprint import Fingerprint
from birthmark.metrics.seedprint import compare as fingerprint
from birthmark.metrics.two_models import gram_vector
from birthmark.metrics.weight_kinship import FEWEST_TENSORS, kinship

from .evidence import Block, Evidence, shared_names
from .method import Finding, Method, Need, NoTest

# ---------------------------------------------------------------- awm
# AWM (Zeng et al., ICLR 2026, arXiv 2510.06738): attention matrices in coordinates that the embeddings align.
#
# Columns of the two embedding tables are matched by the largest sum of |cosine|, which undoes a permutation and signs
# of the residual stream. Then unbiased linear CKA of W_q, and of W_k, over residual channels, which no rotation
# inside of heads changes. The score is the mean of both over blocks.


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


# ---------------------------------------------------------------- huref
# HuRef (Zeng et al., NeurIPS 2024, arXiv 2312.04828): cosine of invariant terms (ICS) and of all parameters (PCS).
#
# An invariant term is a product of matrices between embeddings of tokens, which a change of coordinates that keeps
# the model's output leaves as it is: ``X W_q W_kᵀ Xᵀ``, ``X W_v W_o Xᵀ`` and ``X W_up W_down Xᵀ``, of the last two
# blocks. Gains of norms and rotary positions are not in them. The score is the cosine of the terms, each made to mean
# 0 and deviation 1.

_HUREF = "arXiv 2312.04828, NeurIPS 2024; LUMIA-Group/HuRef 9c34548"
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


ICS = Method("HuRef, ICS", _HUREF, ("weights", "vocabulary"), ics)
PCS = Method("HuRef, PCS", _HUREF, ("weights",), pcs)


# ---------------------------------------------------------------- model tracing
# Independence tests for language models (Zhu et al., ICML 2025, arXiv 2502.12292): csu, csh, match.
#
# Hidden units of one model are matched with those of the other; kin keep their order. Training treats all units of a
# block alike, so that between models of independent births the matching is a random order, and p is exact. Blocks are
# combined by Fisher's method. Spearman's p is two-sided, as published.

_SOURCE = "arXiv 2502.12292, ICML 2025; ahmeda14960/model-tracing 5e65e7b"
#: Spearman's p of a long perfect match underflows; a score must be a number.
_LEAST_LOG10_P = -1e5


def matching(a_FX: np.ndarray, b_FX: np.ndarray) -> np.ndarray:
    """Match each row of one matrix with a row of the other, such that the sum of cosines is largest (the paper's
    Algorithm 2).

    The released code of ``match`` takes the smallest sum of squared distances instead; rows of one length agree.
    """
    unit_a, unit_b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a_FX.astype(float), b_FX.astype(float)))
    return linear_sum_assignment(unit_a @ unit_b.T, maximize=True)[1]


def spearman_p(first_F: np.ndarray, second_F: np.ndarray) -> float:
    """Compute the two-sided p of Spearman's correlation of two permutations (Algorithm 3)."""
    return float(stats.spearmanr(first_F, second_F).pvalue)


def fisher(p_values: Iterable[float]) -> float:
    """Combine p-values by Fisher's method into a base-10 logarithm (Algorithm 4); NaN are left out; NaN if none is
    left.
    """
    known = [p for p in p_values if not np.isnan(p)]
    if not known:
        return np.nan
    with np.errstate(divide="ignore"):
        return float(stats.chi2.logsf(-2 * np.log(known).sum(), 2 * len(known))) / log(10)


def _combined(p_values: Iterator[float]) -> Finding | NoTest:
    log10_p = fisher(p_values)
    if np.isnan(log10_p):
        return NoTest("no block has a p")
    return Finding(-max(log10_p, _LEAST_LOG10_P), max(log10_p, _LEAST_LOG10_P))


def csu(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute φ_U: the test on rows of the up-projections."""
    order_F = np.arange(len(a.blocks[0].up))
    pairs = zip(a.blocks, b.blocks, strict=True)
    return _combined(spearman_p(matching(x.up, y.up), order_F) for x, y in pairs)


def csh(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute φ_H: the test on outputs of the up-projections for the same inputs."""
    order_F = np.arange(a.up_LRF.shape[-1])
    pairs = zip(a.up_LRF, b.up_LRF, strict=True)
    return _combined(spearman_p(matching(x_RF.T, y_RF.T), order_F) for x_RF, y_RF in pairs)


def match(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Compute φ_MATCH: the test whether outputs of gates and of up-projections give the same matching, in any order of
    units.
    """
    assert a.gate_LRF is not None
    assert b.gate_LRF is not None
    pairs = zip(a.gate_LRF, b.gate_LRF, a.up_LRF, b.up_LRF, strict=True)
    return _combined(spearman_p(matching(g.T, h.T), matching(x.T, y.T)) for g, h, x, y in pairs)


CSU = Method("csu", _SOURCE, ("weights", "width", "hidden units", "depth"), csu)
CSH = Method("csh", _SOURCE, ("states", "vocabulary", "hidden units", "depth"), csh)
MATCH = Method("match", _SOURCE, ("states", "vocabulary", "hidden units", "depth", "gated MLP"), match)


# ---------------------------------------------------------------- reef
# REEF (Zhang et al., ICLR 2025, arXiv 2410.14273): linear CKA of representations of the same inputs.
#
# The representations are those of the last token after one block, the 19th of 32 in the paper's main table; at
# another depth the block at the same fraction of it. As in the released code each dimension is first standardised to
# mean 0 and deviation 1. The paper reads 200 statements of TruthfulQA; here all methods read one probe.

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


# ---------------------------------------------------------------- seedprint nulls
# SeedPrint [SP] (arXiv 2509.26404): rank correlation of final hidden states, its nulls and ours; ``matched``.
#
# The statistic and the nulls are the package's own (birthmark.metrics.seedprint; docs/lineage.md).

_NEEDS: tuple[Need, ...] = ("states", "width", "vocabulary")


def by_null(recipe: LineageTestConfig, a: Evidence, b: Evidence) -> Finding | NoTest:
    """Test the final hidden states under one null."""
    return _finding(fingerprint(a.final, b.final, recipe, vocab_size=len(a.embed_VD)))


def matched(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Test the weights by our own method: channels are aligned by the embeddings, then units of the same index are
    compared.
    """
    return _finding(compare_weights(a.stream, b.stream))


def _finding(found: Fingerprint) -> Finding | NoTest:
    """Return z as the score, with the null's p."""
    return NoTest(found.reason) if found.verdict == "undefined" else Finding(found.z, found.log10_p)


def _method(name: str, source: str, recipe: LineageTestConfig) -> Method:
    return Method(name, source, _NEEDS, partial(by_null, recipe))


ANALYTIC = _method("SeedPrint, analytic", "arXiv 2509.26404", LineageTestConfig(null="analytic"))
#: In a narrow model two sets of 10 % of the dimensions have hardly any in common.
ANALYTIC_WIDER = _method("SeedPrint, analytic, 25 %", "arXiv 2509.26404", LineageTestConfig(null="analytic", k=0.25))
EMPIRICAL = _method("SeedPrint, empirical, 25 %", "arXiv 2509.26404", LineageTestConfig(null="empirical", k=0.25))
MATCHED = Method("`matched`", "docs/lineage.md", ("weights", "width", "vocabulary"), matched)
DIMENSIONS = _method("`dimensions`", "docs/lineage.md", LineageTestConfig(null="dimensions"))


# ---------------------------------------------------------------- weight cosine
# The audit's test of weights (docs/audit.md): the mean cosine of tensors of one name, and its p.
#
# The audit samples a thousandth of each tensor; here it reads all of them.


def weight_cosine(a: Evidence, b: Evidence) -> Finding | NoTest:
    """Take the cosine as the score; its verdict asks for a cosine of 0.1 and p below 10⁻⁴."""
    names = shared_names(a.parameters, b.parameters)
    found = kinship(*({name: model.parameters[name].reshape(1, -1) for name in names} for model in (a, b)))
    if found.verdict is None:
        return NoTest(f"fewer than {FEWEST_TENSORS} tensors of one name and shape")
    with np.errstate(divide="ignore"):
        return Finding(found.cosine, max(float(np.log10(found.p)), -300.0), found.verdict)


WEIGHT_COSINE = Method("audit's cosine", "docs/audit.md", ("weights",), weight_cosine)


# ---------------------------------------------------------------- intrinsic fingerprint (Yoon et al
# 2025, arXiv 2507.03014): how the spread of attention weights changes with depth.
#
# For each of W_q, W_k, W_v, W_o the standard deviations of the blocks, a sequence, are standardised to mean 0 and
# deviation 1. The score is the correlation of two models' sequences, all four together. Fewer than three blocks give
# ±1 always.

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


# ---------------------------------------------------------------- the table

METHODS: tuple[Method, ...] = (
    ANALYTIC, ANALYTIC_WIDER, EMPIRICAL, CSU, CSH, MATCH, AWM, ICS, PCS, REEF, INTRINSIC, WEIGHT_COSINE, DIMENSIONS,
    MATCHED,
)  # fmt: skip
