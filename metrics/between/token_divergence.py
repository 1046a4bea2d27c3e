"""Kullback-Leibler divergence between the next-token predictions of several models (definitions, between models).

Legend: A models, R rows (positions of sequences), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
