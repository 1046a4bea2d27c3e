"""Rows of explicit weights that depend on all scores of a row: softmax and its relatives.

Each function takes scores ``[B, H, R, S]``, a mask of seen keys, and the scores of extra keys ``[B, H, R, 1]`` that
every query sees. It returns weights, 0 where unseen, and the shares of the extra keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Keeps a row of softpick whose scores are all 0 from 0/0: that of the authors' code.
_SOFTPICK_EPS = 1e-8


def _joined(scores: Tensor, seen: Tensor, extra: list[Tensor]) -> Tensor:
    return torch.cat([scores.masked_fill(~seen, -torch.inf), *extra], dim=-1)


def _apart(weights: Tensor, n_extra: int) -> tuple[Tensor, list[Tensor]]:
    n_keys = weights.shape[-1] - n_extra
    return weights[..., :n_keys], [weights[..., [n_keys + i]] for i in range(n_extra)]


def softmax_rows(scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Apply a softmax over seen and extra keys."""
    return _apart(_joined(scores, seen, extra).softmax(-1), len(extra))


def softmax_with_lse_(scores: Tensor) -> Tensor:
    """Make weights of scores, in place, by a softmax along the last axis; the log-sum-exp of the scores of each row.

    The largest score s has the weight exp(s − lse), which gives the log-sum-exp without another pass of exponentials.
    """
    largest = scores.amax(-1)
    torch.softmax(scores, -1, out=scores)
    return largest.sub_(scores.amax(-1).log_())


def clipped_rows(
    scores: Tensor, seen: Tensor, extra: list[Tensor], zeta: float, gamma: float
) -> tuple[Tensor, list[Tensor]]:
    """Apply a softmax, stretch it from ``gamma`` (at most 0) to ``zeta`` (at least 1) and clip it to 0 … 1 (arXiv
    2306.12929).
    """
    stretched = (zeta - gamma) * _joined(scores, seen, extra).softmax(-1) + gamma
    return _apart(stretched.clamp(0, 1), len(extra))


def softpick_rows(scores: Tensor, seen: Tensor, extra: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Compute ``relu(exp(s) − 1) / (Σ |exp(s) − 1| + ε)`` over seen and extra keys (arXiv 2504.20966)."""
    scores = _joined(scores, seen, extra)
    # Both parts of the fraction are divided by exp(level), which keeps each exponential at most 1.
    level = scores.detach().amax(-1, keepdim=True).clamp_min(0)
    excess = ((scores - level).exp() - (-level).exp()).masked_fill(scores == -torch.inf, 0)
    return _apart(excess.relu() / (excess.abs().sum(-1, keepdim=True) + _SOFTPICK_EPS), len(extra))
