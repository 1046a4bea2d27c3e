"""Tokens that a model prefers regardless of its input (definitions §4) [BB, SP]."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from .summed_metrics import AdditiveMetric

#: Sequences whose choices are looked at together: 8 bytes for every token of the vocabulary each.
_TOGETHER = 64


class PreferenceResult(NamedTuple):
    """Float64 ``[V]``."""

    mean_prob: np.ndarray
    """p̄: mean over sequences of the next-token distribution at the last position."""
    argmax_share: np.ndarray
    """w: share of positions at which each token is the argmax; tied tokens share."""


class TokenPreference(AdditiveMetric):
    """Mean next-token distribution and argmax shares over a probe. States are sums: additive over batches and ranks.

    Tokens that tie for the largest logit of a sequence share its choice equally: a model whose
    output is exactly uniform chooses every token 1/V of the time.
    """

    prob_sum: Tensor
    argmax_count: Tensor
    n_sequences: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.add_sums(prob_sum=(vocab_size,), argmax_count=(vocab_size,), n_sequences=())

    def update(self, logits_BV: Tensor) -> None:
        """Add a batch of last-position logits ``[B, V]``."""
        wide_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
        self.prob_sum += wide_BV.softmax(-1).sum(0, dtype=torch.float64)
        # Nothing depends on how many are tied: to ask would make the caller wait for the device.
        for some_BV in logits_BV.split(_TOGETHER):
            is_chosen_BV = (some_BV == some_BV.amax(-1, keepdim=True)).double()
            self.argmax_count += torch.mv(is_chosen_BV.T, is_chosen_BV.sum(-1).reciprocal_())
        self.n_sequences += len(logits_BV)

    def compute(self) -> PreferenceResult:
        """Return p̄ and w."""
        mean = (self.prob_sum / self.n_sequences, self.argmax_count / self.n_sequences)
        return PreferenceResult(*(value.cpu().numpy() for value in mean))


def preference_ratio(mean_prob_V: np.ndarray) -> float:
    """Compute ``V · max p̄``; 1 means no preference."""
    return float(mean_prob_V.max() * len(mean_prob_V))


def kl_to_uniform(p_V: np.ndarray) -> float:
    """Compute ``KL(p ‖ uniform)`` in nats."""
    return float(special.rel_entr(p_V, 1 / len(p_V)).sum())


def normalised_entropy(p_V: np.ndarray) -> float:
    """Compute entropy over ``log V``: 1 is uniform, 0 is one token only."""
    return float(special.entr(p_V).sum() / np.log(len(p_V)))


def coverage(argmax_share_V: np.ndarray, share: float = 0.8) -> float:
    """Return the smallest part of the vocabulary that receives ``share`` of the argmax choices, in (0, 1]."""
    # Most tokens are never the argmax. The shares are multiples of 1/N that need not add up exactly.
    reached = np.cumsum(np.sort(argmax_share_V[argmax_share_V > 0])[::-1]) >= share - 1e-12
    return float((reached.argmax() + 1) / len(argmax_share_V))
