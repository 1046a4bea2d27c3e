"""Keys that belong to no token and that every query sees: those of a normaliser, learned ones, and prefixes.

Legend: B sequences, H query heads, G key/value heads, T queries, N learned keys, K head width.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .grouped_heads import over_heads
from .scores import Scores


class ExtraKey(NamedTuple):
    """A key that every query sees and that belongs to no token."""

    score_BHT: Tensor
    value: Tensor | None = None
    """``[H, K]``; or, of a key that stands for several, ``[B, H, T, K]``; None: zero."""
    of_prefix: bool = False
    """True if it belongs to the prefix of an adapter."""

    def values(self, start: int = 0, stop: int | None = None) -> Tensor | None:
        """Return the values that the queries ``start … stop − 1`` read from it, broadcastable to ``[B, H, queries,
        K]``.
        """
        if self.value is None:
            return None
        return self.value[:, None] if self.value.ndim == 2 else self.value[:, :, start:stop]


def learned_keys(
    scores: Scores, key_GNK: Tensor, value_GNK: Tensor | None, as_one: bool, of_prefix: bool = False
) -> list[ExtraKey]:
    """Build keys from parameters, without positions.

    Args:
        scores: scores of the tokens.
        key_GNK: the keys; grouped keys without repeats.
        value_GNK: their values; None: zero.
        as_one: replace all by one key, which is exact in a softmax: its score is their log-sum-exp, its value their
            joint value.
        of_prefix: the keys are the prefix of an adapter.
    """
    q_BHTK, n_keys = scores.q_BHTK, key_GNK.shape[1]
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)

    def of_heads(x_GNK: Tensor) -> Tensor:
        return over_heads(x_GNK[None], q_BHTK.shape[1])[0].to(wide)

    key_HNK, value_HNK = of_heads(key_GNK), None if value_GNK is None else of_heads(value_GNK)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        score_BHTN = q_BHTK.to(wide) @ key_HNK.mT * scores.scale
        if as_one and n_keys > 1:
            value_BHTK = None if value_HNK is None else score_BHTN.softmax(-1) @ value_HNK
            return [ExtraKey(score_BHTN.logsumexp(-1), value_BHTK, of_prefix)]
    values = [None] * n_keys if value_HNK is None else value_HNK.unbind(1)
    return [ExtraKey(score, value, of_prefix) for score, value in zip(score_BHTN.unbind(-1), values, strict=True)]


def lse_of_extra(extra: list[ExtraKey]) -> Tensor | None:
    """Compute the log-sum-exp of the scores of the extra keys ``[B, H, T]``; None without any."""
    scores = [key.score_BHT.to(torch.promote_types(key.score_BHT.dtype, torch.float32)) for key in extra]
    return reduce(torch.logaddexp, scores) if scores else None


def value_of_extra(extra: list[ExtraKey], others_BHT: Tensor) -> Tensor | None:
    """Compute the joint value of the extra keys, broadcastable to ``[B, H, T, K]``, given the log-sum-exp of their
    scores; None if none has a value.
    """
    if len(extra) == 1:
        value = extra[0].values()
        return value if value is None or value.ndim == 4 else value[None]
    brought = [
        (key.score_BHT - others_BHT).exp()[..., None].to(values.dtype) * values
        for key in extra
        if (values := key.values()) is not None
    ]
    return sum(brought[1:], brought[0]) if brought else None
